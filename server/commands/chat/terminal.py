"""The terminal side of a chat: screens that print answers, Markdown while it streams, and the input prompt.

PlainScreen is for pipes and dumb terminals, TerminalScreen for the others. Life per answer: begin → piece … → end.
Control characters are removed from the model's text, so it can neither move the cursor nor ring the bell. Markdown
blocks are printed once they are complete and only the last block is redrawn: an answer longer than the screen stays
whole in the terminal's history, and a redraw costs one block. Prompt reads lines with history and editing. Imports
readline, and rich inside functions.
"""

import contextlib
import re
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from server.commands.chat.client import Answer, Piece
from server.commands.chat.session import COMMANDS
from server.commands.server_target import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.status import Status

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_GOES_ON = re.compile(r"\s|[-*+] |\d{1,9}[.)] |\|")  # a list, a table, an indented part of one
_MAX_HISTORY = 1000
_BLOCK = '"""'


def split_complete(text: str) -> int:
    """Return how much of `text` is complete blocks, whatever comes after: up to a blank line outside of code."""
    fence, end, position = "", 0, 0
    is_after_blank = False
    for line in _LINE.findall(text):
        if not line.endswith("\n"):
            if is_after_blank and line and not _may_go_on(line):
                end = position
            break
        match = _FENCE.match(line)
        if fence:
            if match and match[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        else:
            if is_after_blank and line.strip() and not _may_go_on(line):
                end = position
            if match:
                fence = match[1]
        is_after_blank = not fence and not line.strip()
        position += len(line)
    return end


class MarkdownStream:
    """Markdown of one answer. Life: feed … → close."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self._console = console
        self._text = ""
        self._has_printed = False
        self._live: Live = Live(
            console=console, get_renderable=lambda: _Tail(self._text), transient=True, refresh_per_second=12
        )
        self._live.start()

    def feed(self, text: str) -> None:
        """Add text."""
        self._text += text
        end = split_complete(self._text)
        if end:
            complete, self._text = self._text[:end], self._text[end:]
            self._print(complete)

    def close(self) -> None:
        """Print the rest."""
        self._live.stop()
        if self._text.strip():
            self._print(self._text)
        self._text = ""

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        if self._has_printed:
            self._console.print()
        self._has_printed = True
        self._console.print(Markdown(text.strip("\n")))


class Screen(Protocol):
    """Shows answers and notes."""

    def begin(self, *, thinking: str, is_markdown: bool) -> None:
        """Prepare for an answer. thinking: dim or hidden."""
        ...

    def piece(self, piece: Piece) -> None:
        """Show some of it."""
        ...

    def end(self, answer: Answer | None, *, is_stopped: bool) -> None:
        """Close the answer; None if it failed."""
        ...

    def note(self, text: str) -> None:
        """Show a note."""
        ...

    def error(self, text: str) -> None:
        """Show an error."""
        ...


def make_screen(out: TextIO, err: TextIO, *, is_dumb: bool) -> Screen:
    """Return the screen that fits."""
    return TerminalScreen(out) if out.isatty() and not is_dumb else PlainScreen(out, err)


class PlainScreen:
    """Prints only the answer's text as it arrives on `out`, and notes on `err`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._last = "\n"

    def begin(self, *, thinking: str, is_markdown: bool) -> None:
        """See Screen.begin. Neither is shown in plain text."""
        self._last = "\n"

    def piece(self, piece: Piece) -> None:
        if not piece.is_thinking:
            self._last = piece.text
            self._out.write(piece.text)
            self._out.flush()

    def end(self, answer: Answer | None, *, is_stopped: bool) -> None:
        if not self._last.endswith("\n"):
            self._out.write("\n")
            self._out.flush()

    def note(self, text: str) -> None:
        print(text, file=self._err)

    def error(self, text: str) -> None:
        print(f"quire: error: {text}", file=self._err)


class TerminalScreen:
    """Prints Markdown while it streams, dimmed reasoning, and a line of figures below."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=out, highlight=False)
        self._markdown: MarkdownStream | None = None
        self._status: Status | None = None
        self._thinking = "dim"
        self._is_markdown = True
        self._is_in_thought = False
        self._column_zero = True
        self._begun_s = 0.0

    def begin(self, *, thinking: str, is_markdown: bool) -> None:
        self._thinking, self._is_markdown = thinking, is_markdown
        self._markdown, self._is_in_thought, self._column_zero = None, False, True
        self._begun_s = time.monotonic()
        self._status = self._console.status("[dim]waiting", spinner="dots")
        self._status.start()

    def piece(self, piece: Piece) -> None:
        text = printable(piece.text)
        if piece.is_thinking:
            self._thought(text)
            return
        self._end_status()
        if self._is_in_thought:
            self._is_in_thought = False
            self._break_line()
            self._console.print()
        if not self._is_markdown:
            self._write(text, style="")
            return
        if self._markdown is None:
            self._markdown = MarkdownStream(self._console)
        self._markdown.feed(text)

    def end(self, answer: Answer | None, *, is_stopped: bool) -> None:
        self._end_status()
        if self._markdown is not None:
            self._markdown.close()
            self._markdown = None
        self._break_line()
        if answer is not None:
            self._console.print(figures(answer, is_stopped=is_stopped), style="dim", markup=False)
        self._console.print()

    def note(self, text: str) -> None:
        self._console.print(printable(text), style="dim", markup=False)

    def error(self, text: str) -> None:
        self._console.print(printable(text), style="red", markup=False)

    def _thought(self, text: str) -> None:
        if self._thinking == "dim":
            self._end_status()
            self._is_in_thought = True
            self._write(text, style="dim italic")
        elif self._status is not None:
            self._status.update(f"[dim]thinking, {time.monotonic() - self._begun_s:.0f} s")

    def _write(self, text: str, *, style: str) -> None:
        if text:
            self._console.print(text, style=style, markup=False, end="", soft_wrap=True)
            self._column_zero = text.endswith("\n")

    def _break_line(self) -> None:
        if not self._column_zero:
            self._console.print()
            self._column_zero = True

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def figures(answer: Answer, *, is_stopped: bool) -> str:
    """Return the line below an answer. One that was stopped has no usage to show."""
    parts = []
    if answer.completion_tokens:
        parts.append(f"{answer.completion_tokens:,} token{'s' if answer.completion_tokens > 1 else ''}")
    if answer.ttft_s:
        parts.append(f"TTFT {answer.ttft_s * 1000:,.0f} ms")
    rate = answer.tokens_per_s()
    if rate is not None:
        parts.append(f"{rate:,.1f} tok/s")
    if answer.prompt_tokens:
        parts.append(f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} prompt tokens cached")
    if is_stopped:
        parts.append("stopped")
    elif answer.finish_reason == "length":
        parts.append("cut off: the limit of tokens")
    elif not answer.text:
        parts.append("empty answer")
    return " · ".join(parts)


def silence_broken_pipe() -> None:
    """Prevent Python's message at exit about a closed pipe."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Show no keys: a ^C or a question typed ahead would move the cursor, of which a redraw takes the place.

        What is typed meanwhile is the next prompt's.
        """
        if not sys.stdin.isatty():
            yield
            return
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(fd, termios.TCSADRAIN, silent)
        try:
            yield
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def _line(self, prompt: str) -> str:
        if self._has_readline:
            return input(prompt)
        sys.stderr.write(prompt)  # the answers' place is for answers
        sys.stderr.flush()
        return input()


def clean(text: str) -> str:
    """Return text that can be sent: bytes that are no text become the sign for that."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()


def _may_go_on(line: str) -> bool:
    """Return True if a line after a blank one may belong to the previous block, or is too short to decide."""
    return _GOES_ON.match(line) is not None or (not line.endswith("\n") and len(line) < 12)


class _Tail:
    """The last lines of some Markdown, as many as fit the screen."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.markdown import Markdown
        from rich.segment import Segment

        lines = console.render_lines(Markdown(self._text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def _complete(text: str, state: int) -> str | None:
    """Complete the name of a command, as readline asks: the state-th one that fits."""
    fitting = [name for name in COMMANDS if text.startswith("/") and name.startswith(text)]
    return fitting[state] if state < len(fitting) else None
