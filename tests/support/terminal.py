"""A command in a real pseudo-terminal, as a person has it: typed to, read from, with Ctrl-C and a size."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

from tests.support.daemon import ROOT

CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>()][0-9A-B]?|\r")


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests run in the background inherit that it is ignored


class Terminal:
    """`quire ARGUMENTS` in a terminal of 24 × 80. A context manager, which kills what is left."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None, columns: int = 80) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server", *arguments],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.raw = b""
        self._read_until = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._master)

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDWR)

    @property
    def text(self) -> str:
        """All that was shown, without escape sequences."""
        return _ESCAPES.sub("", self.raw.decode(errors="replace"))

    def send(self, text: str) -> None:
        """Type."""
        os.write(self._master, text.encode())

    def line(self, text: str) -> None:
        """Type a line."""
        self.send(text + "\n")

    def expect(self, pattern: str, *, timeout_s: float = 60.0) -> re.Match[str]:
        """Wait until something new matches; what came before its end is not new any more."""
        end_s = time.monotonic() + timeout_s
        while True:
            match = re.compile(pattern).search(self.text, self._read_until)
            if match is not None:
                self._read_until = match.end()
                return match
            if not self._read(end_s):
                raise AssertionError(f"no {pattern!r} in {self.text[self._read_until :][-3000:]!r}")

    def press(self, key: str, pattern: str) -> None:
        """Press a key until something new matches: one pressed just before a program waits for keys can be lost."""
        for _ in range(30):
            self.send(key)
            with contextlib.suppress(AssertionError):
                self.expect(pattern, timeout_s=60)
                return
        end = self.process.poll()
        raise AssertionError(f"no {pattern!r} after {key!r}, but {self.text[-1000:]!r}; exit code {end}")

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the end; return the exit code."""
        end_s = time.monotonic() + timeout_s
        while self._read(end_s):
            pass
        return self.process.wait(max(0.1, end_s - time.monotonic()))

    def _read(self, end_s: float) -> bool:
        """Read some; return False at the end, of the time or of the process."""
        rest_s = end_s - time.monotonic()
        if rest_s <= 0 or not select.select([self._master], [], [], rest_s)[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):  # EIO: the last one who had the terminal open is gone
            data = os.read(self._master, 65_536)
        self.raw += data
        return bool(data)
