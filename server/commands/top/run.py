"""`quire top` from its first look to the key that ends it. Imports rich only on a terminal."""

import argparse
import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator

import msgspec

from server.commands.server_target import ToolError, handled, leave, make_target
from server.commands.target_flags import DEFAULT_URL
from server.commands.top.render import frame_lines
from server.commands.top.sampling import Frame, Watch

_PLAIN_WIDTH = 80
_QUIT = (b"q", b"Q", b"\x04", b"")  # "": the terminal is gone


def run(arguments: argparse.Namespace) -> int:
    """Run `quire top`; return the exit code. Raises ToolError."""
    target = make_target(arguments.url or DEFAULT_URL, arguments.api_key, os.environ)
    with contextlib.closing(Watch(target, window_s=arguments.window)) as watch:
        is_terminal = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        if arguments.json or arguments.once or not is_terminal:
            watch.look()
            time.sleep(min(arguments.interval, arguments.window))
            frame = watch.look()
            if arguments.json:
                print(msgspec.json.encode(frame).decode())
            else:
                print("\n".join(frame_lines(frame, width=_PLAIN_WIDTH, height=None)))
            return 0
        with contextlib.suppress(KeyboardInterrupt), handled(leave):
            _live(watch, watch.look(), interval_s=arguments.interval)
    return 0


def _live(watch: Watch, frame: Frame, *, interval_s: float) -> None:
    """Draw until q. A server that goes away is said, and waited for."""
    from rich.live import Live
    from rich.text import Text

    trouble = ""
    with Live(screen=True, auto_refresh=False) as live, _single_keys():
        next_s = time.monotonic() + interval_s
        while True:
            live.update(Text(_screen(frame, trouble)), refresh=True)
            if _is_quit(next_s):
                return
            next_s = time.monotonic() + interval_s
            try:
                frame, trouble = watch.look(), ""
            except ToolError as error:
                trouble = f"{error.message} Trying again."


def _screen(frame: Frame, trouble: str) -> str:
    width, height = shutil.get_terminal_size()
    lines = frame_lines(frame, width=width, height=height)[: height - 2]
    lines += [""] * (height - 1 - len(lines))
    return "\n".join([*lines, (trouble or "q quits")[:width]])


def _is_quit(until_s: float) -> bool:
    """Wait until a time, or for a key that quits."""
    while (rest_s := until_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], rest_s)[0] and os.read(sys.stdin.fileno(), 1) in _QUIT:
            return True
    return False


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys without Enter, unechoed; the terminal is as before afterwards."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
