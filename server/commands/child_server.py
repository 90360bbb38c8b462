"""TemporaryServer: a `quire serve` that another command starts and stops. Imports the standard library and httpx.

It listens on a free loopback port, with a random key that only the command has, and ends with the command.
Life: TemporaryServer(…) → start, which blocks until the server is ready → endpoint → stop.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from engine.interface.child_process import PROJECT_ROOT, describe_exit, die_with
from server.commands.server_target import ServerEndpoint, ToolError
from server.launcher.run_dir import RunDir

_POLL_S = 0.05
_STOP_S = 10.0
_ERROR = "quire: error: "
_MAX_NAME_CHARACTERS = 512


class TemporaryServer:
    """A server as a context manager, ready on entry. model: folder, hub id, or None for the demo model."""

    def __init__(self, model: str | None, *, served_names: list[str], stream: TextIO) -> None:
        self._model = model
        self._served_names = served_names
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._run_dir = RunDir()
        self._log_path = self._run_dir.path / "server.log"
        self._key = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ServerEndpoint("", self._key)

    def __enter__(self) -> "TemporaryServer":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def why_gone(self) -> str | None:
        """Return why the server ended, None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        errors = [line for line in self._log().splitlines() if line.startswith(_ERROR)]
        return errors[-1].removeprefix(_ERROR) if errors else f"It {describe_exit(self._process.returncode)}."

    def _start(self) -> None:
        started_s = time.monotonic()
        command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-format", "json"]
        command += ["--max-queue-wait", "0"]  # its only client has sent no more than it waits for
        command += served_name_flags(self._served_names)
        if self._model is not None:
            folder = Path(self._model).expanduser()
            command.append(str(folder.resolve()) if folder.exists() else self._model)
        pid = os.getpid()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=PROJECT_ROOT,
                env=_environment(self._key),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C in the terminal is for the command, which then stops its server
                preexec_fn=lambda: die_with(pid),
            )
        while not self._is_ready():
            why = self.why_gone()
            if why is not None:
                self._say("")
                raise ToolError(f"No server could be started: {why}")
            time.sleep(_POLL_S)
        self._say(f"Started {self._name()} on {self.endpoint.url} in {time.monotonic() - started_s:.1f} s.\n")

    def _is_ready(self) -> bool:
        """Read the log: show the stage, and take the address once it is there."""
        is_ready, doing = False, "process"
        for line in self._log().splitlines():
            try:
                message = json.loads(line)["message"]
            except (ValueError, KeyError, TypeError):
                continue
            if message.startswith("stage name="):
                doing = message.removeprefix("stage name=").split(" ")[0]
            elif message.startswith("Ready in "):
                self.endpoint = ServerEndpoint(message.rpartition("url=")[2], self._key)
                is_ready = True
        if self._is_terminal and not is_ready:
            self._say(f"Starting {self._name()}: {doing.replace('_', ' ')} …")
        return is_ready

    def _say(self, text: str) -> None:
        """Replace the line with the start's progress; without a terminal, write only the last one."""
        if self._is_terminal:
            self._stream.write(f"\r\x1b[2K{text}")
        else:
            self._stream.write(text)
        self._stream.flush()

    def _name(self) -> str:
        return "the demo model" if self._model is None else self._model

    def _log(self) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="replace") if self._log_path.exists() else ""

    def _stop(self) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                _end(process)
        finally:
            self._run_dir.remove()


def _environment(key: str) -> dict[str, str]:
    """Return the environment with that key, and without other QUIRE_* variables, which configure other servers."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    return {**own, "QUIRE_API_KEY": key}


def served_name_flags(names: Iterable[str]) -> list[str]:
    """Return the flags that serve these names; one that no command line can carry is left out, and not found later."""
    return [f"--served-model-name={name}" for name in names if _can_be_served(name)]


def _can_be_served(name: str) -> bool:
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in name)
    return bool(name.strip()) and len(name) <= _MAX_NAME_CHARACTERS and "\0" not in name and is_unicode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM twice, then kill; a second Ctrl-C skips the waiting."""
    for _ in range(2):  # the second SIGTERM ends the server at once
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_S / 2)
            return
    process.kill()
    process.wait()
