"""What a person types: lines with history and editing, several at once where they say so. Imports readline."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

from server.commands.chat.chat_cli_commands import COMMANDS

_MAX_HISTORY = 1000
_BLOCK = '"""'


class Prompt:
    """Reads questions. A context manager: the history is read at its beginning and kept in a private file."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        state = environment.get("XDG_STATE_HOME") or str(
            Path(environment.get("HOME", "~")).expanduser() / ".local/state"
        )
        self._history = Path(state) / "quire" / "chat_history"
        self._has_readline = sys.stdout.isatty()

    def __enter__(self) -> "Prompt":
        if self._has_readline:
            import readline

            with contextlib.suppress(OSError):  # none yet, or none that can be read
                readline.read_history_file(self._history)
            readline.set_history_length(_MAX_HISTORY)
            readline.set_completer(_complete)
            readline.set_completer_delims("")
            readline.parse_and_bind("tab: complete")
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_readline:
            import readline

            with contextlib.suppress(OSError):  # a home that cannot be written costs the history only
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._history.touch(mode=0o600)
                readline.write_history_file(self._history)

    def read(self) -> str:
        """Return a question or a command, stripped; "" for none. Raises EOFError, KeyboardInterrupt."""
        text = self._line("> ")
        if text.lstrip().startswith(_BLOCK):
            text = text.lstrip().removeprefix(_BLOCK)
            while not text.rstrip().endswith(_BLOCK):
                text += "\n" + self._line("… ")
            text = text.rstrip().removesuffix(_BLOCK)
        else:
            while text.endswith("\\"):
                text = text[:-1] + "\n" + self._line("… ")
        return clean(text)

    def _line(self, prompt: str) -> str:
        if self._has_readline:
            return input(prompt)
        sys.stderr.write(prompt)  # the answers' place is for answers
        sys.stderr.flush()
        return input()


def clean(text: str) -> str:
    """Return text that can be sent: bytes that are no text become the sign for that."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()


def _complete(text: str, state: int) -> str | None:
    """Complete the name of a command, as readline asks: the state-th one that fits."""
    fitting = [name for name in COMMANDS if text.startswith("/") and name.startswith(text)]
    return fitting[state] if state < len(fitting) else None
