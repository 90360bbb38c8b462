"""How a chat looks: PlainScreen for pipes and dumb terminals, TerminalScreen for the others. rich only there.

Per answer: begin → piece … → end. What a model writes can move no cursor and ring no bell: control characters go.
"""

import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from server.commands.chat.chat_cli_markdown import MarkdownStream
from server.commands.chat.client import Answer, Piece
from server.commands.tool_text import printable

if TYPE_CHECKING:
    from rich.status import Status


class Screen(Protocol):
    """Shows answers and notes."""

    def begin(self, *, thinking: str, is_markdown: bool) -> None:
        """An answer is asked for. thinking: dim or hidden."""
        ...

    def piece(self, piece: Piece) -> None:
        """Show some of it."""
        ...

    def end(self, answer: Answer | None, *, is_stopped: bool) -> None:
        """Close the answer; None if it failed."""
        ...

    def note(self, text: str) -> None:
        """Say something that is no answer."""
        ...

    def error(self, text: str) -> None:
        """Say what went wrong."""
        ...


def make_screen(out: TextIO, err: TextIO, *, is_dumb: bool) -> Screen:
    """Return the screen that fits."""
    return TerminalScreen(out) if out.isatty() and not is_dumb else PlainScreen(out, err)


class PlainScreen:
    """The answer's text as it comes, and nothing else, on `out`; notes on `err`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._last = "\n"

    def begin(self, *, thinking: str, is_markdown: bool) -> None:
        """See Screen.begin. Neither is shown in plain text."""
        self._last = "\n"

    def piece(self, piece: Piece) -> None:
        """See Screen.piece."""
        if not piece.is_thinking:
            self._last = piece.text
            self._out.write(piece.text)
            self._out.flush()

    def end(self, answer: Answer | None, *, is_stopped: bool) -> None:
        """See Screen.end."""
        if not self._last.endswith("\n"):
            self._out.write("\n")
            self._out.flush()

    def note(self, text: str) -> None:
        """See Screen.note."""
        print(text, file=self._err)

    def error(self, text: str) -> None:
        """See Screen.error."""
        print(f"quire: error: {text}", file=self._err)


class TerminalScreen:
    """Markdown as it grows, thinking dimmed, a line of figures below."""

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
        """See Screen.begin."""
        self._thinking, self._is_markdown = thinking, is_markdown
        self._markdown, self._is_in_thought, self._column_zero = None, False, True
        self._begun_s = time.monotonic()
        self._status = self._console.status("[dim]waiting", spinner="dots")
        self._status.start()

    def piece(self, piece: Piece) -> None:
        """See Screen.piece."""
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
        """See Screen.end."""
        self._end_status()
        if self._markdown is not None:
            self._markdown.close()
            self._markdown = None
        self._break_line()
        if answer is not None:
            self._console.print(figures(answer, is_stopped=is_stopped), style="dim", markup=False)
        self._console.print()

    def note(self, text: str) -> None:
        """See Screen.note."""
        self._console.print(printable(text), style="dim", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """See Screen.error."""
        self._console.print(printable(text), style="red", markup=False, soft_wrap=True)

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
    """Keep Python from complaining at exit about a reader that left."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
