"""Markdown while it is being written: what is complete is printed for good, only the last block is drawn again.

An answer longer than the screen so stays whole in the terminal's history, and each redraw costs one block. Imports rich
within functions.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_GOES_ON = re.compile(r"\s|[-*+] |\d{1,9}[.)] |\|")  # a list, a table, an indented part of one


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


def _may_go_on(line: str) -> bool:
    """Tell if a line after a blank one may belong to the block before, or is too short to know."""
    return _GOES_ON.match(line) is not None or (not line.endswith("\n") and len(line) < 12)


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
        """Take more of it."""
        self._text += text
        end = split_complete(self._text)
        if end:
            complete, self._text = self._text[:end], self._text[end:]
            self._print(complete)

    def close(self) -> None:
        """Print what is left."""
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
