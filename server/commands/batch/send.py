"""Sender and BatchProgress: send batch requests with retries, and show the progress. Imports httpx.

A 429 or 503 is a statement about the server, so after one every request waits, not only the refused one.
Progress is a bar on a terminal and an occasional line elsewhere; rich is imported on a terminal only.
"""

import asyncio
import email.utils
import math
import random
import time
from typing import TYPE_CHECKING, TextIO

import httpx
import msgspec

from server.commands.batch.output import BatchError, BatchRecord, BatchResponse, new_record
from server.commands.batch.records import BatchRequest
from server.commands.server_target import ServerEndpoint, ToolError, error_message, transport_message

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_RETRIED_STATUSES = (429, 502, 503, 504)
_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 30.0
_MAX_RETRY_AFTER_S = 300.0
_LINE_EVERY_S = 10.0


class Sender:
    """Sends the requests of one batch. Use within one event loop."""

    def __init__(self, client: httpx.AsyncClient, endpoint: ServerEndpoint, *, retries: int, timeout_s: float) -> None:
        self._client = client
        self._endpoint = endpoint
        self._retries = retries
        self._timeout_s = timeout_s
        self._resume_s = 0.0  # time.monotonic() before which nothing is sent

    async def send(self, request: BatchRequest) -> BatchRecord:
        """Return the record of a request. Raises ToolError when no other would fare better."""
        attempt = 0
        while True:
            await self._wait()
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._client.post(request.url, content=request.body)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if attempt >= self._retries:
                    raise ToolError(
                        f"{transport_message(self._endpoint, error)} Run the same command to go on."
                    ) from error
                self._pause(_backoff_s(attempt))
            except TimeoutError:
                return _failed(request, "timeout", f"No answer within {self._timeout_s:g} s, the limit of --timeout.")
            except httpx.HTTPError as error:
                if attempt >= self._retries:
                    return _failed(request, "connection_lost", transport_message(self._endpoint, error))
                await asyncio.sleep(_backoff_s(attempt))
            else:
                if response.status_code in (401, 403):
                    message = error_message(response.status_code, response.content)
                    raise ToolError(f"The server refuses: {message}", exit_code=2)
                if attempt >= self._retries or not _is_worth_again(response):
                    return _record_of(request, response)
                self._pause(retry_after_s(response.headers.get("retry-after"), now_s=time.time(), attempt=attempt))
            attempt += 1

    async def _wait(self) -> None:
        while (rest_s := self._resume_s - time.monotonic()) > 0:
            await asyncio.sleep(rest_s)

    def _pause(self, delay_s: float) -> None:
        self._resume_s = max(self._resume_s, time.monotonic() + delay_s)


def retry_after_s(value: str | None, *, now_s: float, attempt: int) -> float:
    """Return the time to wait: the header's (seconds or a date), or a back-off without the header."""
    seconds = math.nan
    if value is not None:
        try:
            seconds = float(value)
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
            except (ValueError, OverflowError):
                seconds = math.nan
    if not math.isfinite(seconds):
        return _backoff_s(attempt)
    # never at once: a header of 0 or a date gone by would make this a busy loop
    return min(max(seconds, _FIRST_DELAY_S / 2), _MAX_RETRY_AFTER_S)


class BatchProgress:
    """Counts answers and failures, and shows them. Life: made → count … → close."""

    def __init__(self, stream: TextIO, *, total: int, kept: int) -> None:
        self.num_answered = 0
        self.num_failed = 0
        self._stream = stream
        self._total = total
        self._kept = kept
        self._started_s = time.monotonic()
        self._told_s = self._started_s
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if stream.isatty():
            self._bar, self._task = _make_bar(stream, total=total, completed=kept)
            self._bar.start()

    def count(self, *, is_answered: bool) -> None:
        """Count one record."""
        if is_answered:
            self.num_answered += 1
        else:
            self.num_failed += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, failed=f"{self.num_failed:,} failed" if self.num_failed else "")
        elif time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            rate = (self.num_answered + self.num_failed) / (self._told_s - self._started_s)
            done = self._kept + self.num_answered + self.num_failed
            self._say(f"batch done={done} of={self._total} failed={self.num_failed} rate={rate:.1f}/s")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def summary(self) -> str:
        """Return the counts of answers and failures as a sentence."""
        elapsed_s = time.monotonic() - self._started_s
        kept = f", {self._kept:,} were there already" if self._kept else ""
        rest = self._total - self._kept - self.num_answered - self.num_failed
        left = f", {rest:,} are left" if rest else ""
        return f"{self.num_answered:,} answered, {self.num_failed:,} failed{kept}{left}, in {elapsed_s:.1f} s"

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def _backoff_s(attempt: int) -> float:
    return min(_FIRST_DELAY_S * 2 ** min(attempt, 16), _LAST_DELAY_S) * random.uniform(0.75, 1.25)


def _is_worth_again(response: httpx.Response) -> bool:
    return response.status_code in _RETRIED_STATUSES and response.headers.get("x-should-retry") != "false"


def _record_of(request: BatchRequest, response: httpx.Response) -> BatchRecord:
    """Return an answer as a record; its body stays as it came, on one line."""
    try:
        response.content.decode()
        body = msgspec.json.format(response.content, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _failed(request, "invalid_response", error_message(response.status_code, response.content))
    request_id = response.headers.get("x-request-id", "")
    answer = BatchResponse(response.status_code, request_id, msgspec.Raw(body))
    return new_record(request.custom_id, response=answer)


def _failed(request: BatchRequest, code: str, message: str) -> BatchRecord:
    return new_record(request.custom_id, error=BatchError(code, message))


def _make_bar(stream: TextIO, *, total: int, completed: int) -> "tuple[Progress, TaskID]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("Batch"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("[red]{task.fields[failed]}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
    )
    return bar, bar.add_task("batch", total=total, completed=completed, failed="")
