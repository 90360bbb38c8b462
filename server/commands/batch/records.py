"""Input lines of a batch: parsed one by one (parse_line) and indexed on disk (BatchIndex). Imports msgspec, sqlite3.

A wrong line becomes a LineError with its number and reason; the other lines are sent. The index is a private SQLite
database that is deleted with the process; millions of lines take a few megabytes of memory. It has one row per input
line: the line's offset, its custom_id if no earlier line has it, and the position of its record in the output.
"""

import sqlite3
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, NamedTuple

import msgspec

from server.commands.batch.output import Span
from server.commands.server_target import ToolError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_LINE_BYTES = 32 * 2**20
MAX_CUSTOM_ID_CHARACTERS = 512
_FIELDS = ("custom_id", "method", "url", "body")
_BOM = b"\xef\xbb\xbf"
_SHOWN_CHARACTERS = 80
_CACHE_KIB = 32_768
_SCHEMA = """
CREATE TABLE lines (
    number INTEGER PRIMARY KEY, offset INTEGER NOT NULL, custom_id TEXT UNIQUE,
    out_offset INTEGER, out_length INTEGER
)
"""


class LineError(Exception):
    """A line that cannot be sent. code: stable; param: the wrong field, "" for the whole line."""

    def __init__(self, code: str, message: str, *, param: str = "", custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.custom_id = custom_id


class BatchRequest(NamedTuple):
    """A checked line. body: the same bytes as in the file; model: "" if the body names none."""

    custom_id: str
    url: str
    body: bytes
    model: str


class RawLine(NamedTuple):
    """A line that is not blank. number: from 1, blank ones counted; data: cut after MAX_LINE_BYTES + 1."""

    number: int
    offset: int
    data: bytes


def read_lines(file: BinaryIO) -> Iterator[RawLine]:
    """Yield the lines that are not blank. Holds one at a time, and of one without an end only its beginning."""
    number, offset = 0, 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        begin = offset
        offset += len(data)
        part = data
        while not part.endswith(b"\n") and len(part) > MAX_LINE_BYTES:
            part = file.readline(MAX_LINE_BYTES + 1)
            offset += len(part)
        if data.strip() not in (b"", _BOM):
            yield RawLine(number, begin, data)


def parse_line(data: bytes, number: int) -> BatchRequest:
    """Check one line. Raises LineError that names line and field."""
    if len(data) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"Line {number} has more than {MAX_LINE_BYTES:,} bytes, the limit.")
    fields = _object(data.removeprefix(_BOM) if number == 1 else data, number)
    custom_id = _custom_id(fields, number)
    for name in _FIELDS:
        if name not in fields:
            raise LineError("missing_field", f"Line {number}: {name} is missing.", param=name, custom_id=custom_id)
    for name, allowed in (("method", ("POST",)), ("url", URLS)):
        value = _decoded(fields[name])
        if not isinstance(value, str) or value not in allowed:
            known = " or ".join(allowed) if len(allowed) < 3 else f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            message = f"Line {number}: {name} is {_shown(fields[name])}, it must be {known}."
            raise LineError(f"invalid_{name}", message, param=name, custom_id=custom_id)
    model = _body_model(bytes(fields["body"]), number, custom_id)
    return BatchRequest(custom_id, str(_decoded(fields["url"])), bytes(fields["body"]), model)


class PendingLine(NamedTuple):
    """A line without a record, and where it begins."""

    number: int
    offset: int


class BatchIndex:
    """The index of the input, as a context manager. Database errors are raised as ToolErrors."""

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
        """Store the position of a line's record."""
        self._database.execute("UPDATE lines SET out_offset = ?, out_length = ? WHERE number = ?", (*span, number))

    def forget_records(self) -> None:
        """Delete the positions of all records."""
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
        """Yield the positions of the records, in the order of the input."""
        query = "SELECT out_offset, out_length FROM lines WHERE out_offset IS NOT NULL ORDER BY number"
        for row in self._database.execute(query):
            yield Span(*row)

    def is_sorted(self) -> bool:
        """Return True if the records are in the order of the input."""
        last = -1
        for span in self.spans():
            if span.offset < last:
                return False
            last = span.offset
        return True

    def _count(self, query: str) -> int:
        return self._database.execute(query).fetchone()[0]


def _object(data: bytes, number: int) -> dict[str, msgspec.Raw]:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise LineError("invalid_json_line", f"Line {number} is not UTF-8 text (byte {error.start}).") from error
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise LineError("invalid_json_line", f"Line {number} is no JSON object.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"Line {number} is not JSON: {error}.") from error


def _custom_id(fields: dict[str, msgspec.Raw], number: int) -> str:
    if "custom_id" not in fields:
        raise LineError("missing_field", f"Line {number}: custom_id is missing.", param="custom_id")
    value = _decoded(fields["custom_id"])
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID_CHARACTERS:
        message = (
            f"Line {number}: custom_id is {_shown(fields['custom_id'])}, "
            f"it must be a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters."
        )
        raise LineError("invalid_custom_id", message, param="custom_id")
    return value


def _body_model(body: bytes, number: int, custom_id: str) -> str:
    """Check the body fields that the file format requires; the server checks the others."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        message = f"Line {number}: body is {_shown(msgspec.Raw(body))}, it must be a JSON object."
        raise LineError("invalid_body", message, param="body", custom_id=custom_id) from None
    if "stream" in fields and _decoded(fields["stream"]) not in (False, None):
        message = f"Line {number}: body.stream is {_shown(fields['stream'])}, a batch has no streams."
        raise LineError("invalid_body", message, param="body.stream", custom_id=custom_id)
    model = _decoded(fields["model"]) if "model" in fields else ""
    return model if isinstance(model, str) else ""


def _decoded(raw: msgspec.Raw) -> object:
    """Return a value, or None where it is one that cannot be read."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _shown(raw: msgspec.Raw) -> str:
    text = bytes(raw).decode(errors="replace")
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
