"""Runs `quire top`: samples the server and redraws until a key quits. Imports rich on a terminal only."""

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

from server.commands.server_target import ToolError, handled, leave, make_endpoint
from server.commands.target_flags import DEFAULT_URL
from server.commands.top.render import snapshot_lines
from server.commands.top.sampling import Monitor, Snapshot

_PLAIN_WIDTH = 80
_QUIT = (b"q", b"Q", b"\x04", b"")  # "": the terminal is gone


def run(arguments: argparse.Namespace) -> int:
    """Run `quire top`; return the exit code. Raises ToolError."""
    endpoint = make_endpoint(arguments.url or DEFAULT_URL, arguments.api_key, os.environ)
    with contextlib.closing(Monitor(endpoint, window_s=arguments.window)) as monitor:
        is_terminal = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        if arguments.json or arguments.once or not is_terminal:
            monitor.sample()
            time.sleep(min(arguments.interval, arguments.window))
            snapshot = monitor.sample()
            if arguments.json:
                print(msgspec.json.encode(snapshot).decode())
            else:
                print("\n".join(snapshot_lines(snapshot, width=_PLAIN_WIDTH, height=None)))
            return 0
        with contextlib.suppress(KeyboardInterrupt), handled(leave):
            _live(monitor, monitor.sample(), interval_s=arguments.interval)
    return 0


def _live(monitor: Monitor, snapshot: Snapshot, *, interval_s: float) -> None:
    """Draw until q. If the server does not reply, show that and try again."""
    from rich.live import Live
    from rich.text import Text

    trouble = ""
    with Live(screen=True, auto_refresh=False) as live, _single_keys():
        next_s = time.monotonic() + interval_s
        while True:
            live.update(Text(_screen(snapshot, trouble)), refresh=True)
            if _is_quit(next_s):
                return
            next_s = time.monotonic() + interval_s
            try:
                snapshot, trouble = monitor.sample(), ""
            except ToolError as error:
                trouble = f"{error.message} Trying again."


def _screen(snapshot: Snapshot, trouble: str) -> str:
    width, height = shutil.get_terminal_size()
    lines = snapshot_lines(snapshot, width=width, height=height)[: height - 2]
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
