"""What a polite kill or a closed terminal does to a command of the terminal: it ends by its own clean-up."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

_STOPPING = (signal.SIGTERM, signal.SIGHUP)


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that end a command. One that is ignored, as under nohup, stays ignored."""
    return [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Let a handler have the stopping signals, which raises what ends the command."""
    numbers = stopping_signals()
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            if signal.getsignal(number) == handler:  # else the process is leaving
                signal.signal(number, old)


def leave(number: int, _: FrameType | None) -> None:
    """End the process as a shell expects of one that a signal ended, after every clean-up, which nothing cuts short."""
    for other in _STOPPING:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)
