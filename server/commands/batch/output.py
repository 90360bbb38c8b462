"""The output file of `quire batch`: one complete record per line, in the input's order once the batch is done.

While a batch runs, records are appended as they arrive, so an interruption loses no finished record. At the end
`sort` writes a sorted copy and replaces the file with it. Life: open_output → read_records → append … → sort →
close.
"""

import contextlib
import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from server.commands.server_target import ToolError

_COPY_BYTES = 2**20


class BatchResponse(msgspec.Struct):
    """The server's reply, of any status."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, omit_defaults=True):
    """The reason for a missing reply. param and line: the wrong place in the input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct):
    """One line of the output, in OpenAI's form."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def is_answered(self) -> bool:
        """Return True if the request need not be sent again."""
        return self.response is not None and self.response.status_code == 200


class Span(NamedTuple):
    """The position of a record in the file, with the end of its line."""

    offset: int
    length: int


def new_record(
    custom_id: str | None, *, response: BatchResponse | None = None, error: BatchError | None = None
) -> BatchRecord:
    """Return a record with an id of its own."""
    return BatchRecord(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)


class OutputFile:
    """An open, locked output file. Disk errors are raised as ToolErrors, after which the same command can continue."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = _open_locked(path)
        self._end = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close and unlock."""
        os.close(self._fd)

    def repair(self) -> None:
        """Remove an incomplete last line."""
        end = self._end
        while end > 0:
            begin = max(0, end - _COPY_BYTES)
            newline = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end != self._end:
            with _disk_errors(self.path):
                os.ftruncate(self._fd, end)
            self._end = end

    def read_records(self) -> Iterator[tuple[Span, BatchRecord]]:
        """Yield the existing records. Raises ToolError if the file is not the output of a batch."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            offset = 0
            for number, line in enumerate(file, 1):
                try:
                    record = msgspec.json.decode(line, type=BatchRecord)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    message = f"{self.path} is no output of a batch (line {number}): choose another file with -o."
                    raise ToolError(message, exit_code=2) from None
                yield Span(offset, len(line)), record
                offset += len(line)

    def append(self, record: BatchRecord) -> Span:
        """Write one record at the end, whole or not at all."""
        line = msgspec.json.encode(record) + b"\n"
        span = Span(self._end, len(line))
        with _disk_errors(self.path):
            try:
                _write_all(self._fd, line, offset=self._end)
            except OSError:
                os.ftruncate(self._fd, self._end)
                raise
        self._end += len(line)
        return span

    def sort(self, spans: Iterable[Span]) -> None:
        """Put the file in this order; what is in no span goes. The file is the old one or the new one, at any time."""
        copy = f"{self.path}.{os.getpid()}.tmp"
        with _disk_errors(self.path):
            fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, stat.S_IMODE(os.fstat(self._fd).st_mode))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before it has the name that others know
                end = self._copy(spans, fd)
                os.fsync(fd)
                os.replace(copy, self.path)
            except BaseException:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(copy)
                raise
        os.close(self._fd)
        self._fd, self._end = fd, end

    def _copy(self, spans: Iterable[Span], fd: int) -> int:
        """Copy records, those that lie side by side in one go. Return the number of bytes."""
        end = 0
        for offset, length in _joined(spans):
            done = 0
            while done < length:
                data = os.pread(self._fd, min(_COPY_BYTES, length - done), offset + done)
                _write_all(fd, data, offset=end)
                done += len(data)
                end += len(data)
        return end


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    run = Span(0, 0)
    for span in spans:
        if span.offset == run.offset + run.length:
            run = Span(run.offset, run.length + span.length)
        else:
            yield run
            run = span
    yield run


def _open_locked(path: str) -> int:
    with _disk_errors(path, exit_code=2):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ToolError(f"-o {path} must be a file: it is read again to go on with it.", exit_code=2)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ToolError(f"{path} is being written by another quire batch.", exit_code=2) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, data: bytes, *, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


@contextlib.contextmanager
def _disk_errors(path: str, *, exit_code: int = 3) -> Iterator[None]:
    """Turn an OSError into a sentence."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"No room to write {path} ({error.strerror}): make some, and run the same command to go on."
        else:
            message = f"{path} cannot be written: {error.strerror}."
        raise ToolError(message, exit_code=exit_code) from error
