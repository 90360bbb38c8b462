"""What is known of every line of a batch, outside memory: a private SQLite database that goes with the process.

Files of millions of lines are indexed in a few megabytes of memory. One row per line of the input: where it begins, its
custom_id if it is the first to have it, and where its record lies in the output once there is one.
"""

import sqlite3
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from server.commands.batch.output import Span
from server.commands.server_target import ToolError

_CACHE_KIB = 32_768
_SCHEMA = """
CREATE TABLE lines (
    number INTEGER PRIMARY KEY, offset INTEGER NOT NULL, custom_id TEXT UNIQUE,
    out_offset INTEGER, out_length INTEGER
)
"""


class PendingLine(NamedTuple):
    """A line without a record, and where it begins."""

    number: int
    offset: int


class BatchIndex:
    """A context manager, within which errors of the database are ToolErrors."""

    def __init__(self) -> None:
        # an empty name: a temporary file, written only when the cache is full
        self._database = sqlite3.connect("", isolation_level=None)
        for statement in (f"PRAGMA cache_size = -{_CACHE_KIB}", "PRAGMA journal_mode = OFF", _SCHEMA, "BEGIN"):
            self._database.execute(statement)

    def __enter__(self) -> "BatchIndex":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._database.close()
        if isinstance(error, sqlite3.Error):
            raise ToolError(f"The index of the batch, a temporary file, cannot be written: {error}.") from error

    def add(self, number: int, offset: int, custom_id: str | None) -> None:
        """Add a line. Of several with one custom_id only the first has it."""
        cursor = self._database.execute(
            "INSERT OR IGNORE INTO lines (number, offset, custom_id) VALUES (?, ?, ?)", (number, offset, custom_id)
        )
        if cursor.rowcount == 0:
            self._database.execute("INSERT INTO lines (number, offset) VALUES (?, ?)", (number, offset))

    def find(self, custom_id: str) -> int | None:
        """Return the line that has a custom_id."""
        row = self._database.execute("SELECT number FROM lines WHERE custom_id = ?", (custom_id,)).fetchone()
        return None if row is None else row[0]

    def record(self, number: int, span: Span) -> None:
        """Say where a line's record lies."""
        self._database.execute("UPDATE lines SET out_offset = ?, out_length = ? WHERE number = ?", (*span, number))

    def forget_records(self) -> None:
        """Forget where every record lies."""
        self._database.execute("UPDATE lines SET out_offset = NULL, out_length = NULL")

    def num_lines(self) -> int:
        """Count the lines."""
        return self._count("SELECT count(*) FROM lines")

    def num_records(self) -> int:
        """Count the lines that have a record."""
        return self._count("SELECT count(*) FROM lines WHERE out_offset IS NOT NULL")

    def pending(self) -> Iterator[PendingLine]:
        """Yield the lines without a record in order. Records may be added meanwhile."""
        number = 0
        while True:
            row = self._database.execute(
                "SELECT number, offset FROM lines WHERE number > ? AND out_offset IS NULL ORDER BY number LIMIT 1",
                (number,),
            ).fetchone()
            if row is None:
                return
            number = row[0]
            yield PendingLine(*row)

    def spans(self) -> Iterator[Span]:
        """Yield where the records lie, in the order of the input."""
        query = "SELECT out_offset, out_length FROM lines WHERE out_offset IS NOT NULL ORDER BY number"
        for row in self._database.execute(query):
            yield Span(*row)

    def is_sorted(self) -> bool:
        """Tell if the records lie in the order of the input."""
        last = -1
        for span in self.spans():
            if span.offset < last:
                return False
            last = span.offset
        return True

    def _count(self, query: str) -> int:
        return self._database.execute(query).fetchone()[0]
