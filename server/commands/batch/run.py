"""Runs a batch: indexes the input, keeps the records that the output already has, sends the rest, sorts the output.

Memory holds the requests in flight and a few megabytes of index, whatever the size of the files.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO

import httpx

from server.commands.batch.output import BatchError, OutputFile, new_record
from server.commands.batch.records import (
    MAX_LINE_BYTES,
    BatchIndex,
    BatchRequest,
    LineError,
    PendingLine,
    parse_line,
    read_lines,
)
from server.commands.batch.send import BatchProgress, Sender
from server.commands.child_server import TemporaryServer
from server.commands.server_target import (
    ServerEndpoint,
    ToolError,
    handled,
    make_endpoint,
    nobody_message,
    served_models,
    stopping_signals,
)
from server.commands.target_flags import DEFAULT_URL

_MAX_SERVED_NAMES = 32
_CONNECT_TIMEOUT_S = 10.0


def run(arguments: argparse.Namespace) -> int:
    """Run `quire batch`; return the exit code. Raises ToolError."""
    if arguments.url is not None and arguments.model is not None:
        raise ToolError("--url and --model exclude each other: --model starts a server of its own.", exit_code=2)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_open_input(arguments.input))
        path = os.path.realpath(arguments.output)
        if os.path.exists(path) and os.path.samefile(path, arguments.input):
            raise ToolError(f"-o {arguments.output} is the input: choose another file.", exit_code=2)
        index = stack.enter_context(BatchIndex())
        names = _index_input(source, index)
        output = stack.enter_context(contextlib.closing(OutputFile(path)))
        _keep_answers(output, index)
        stack.enter_context(handled(signal.default_int_handler))
        return Batch(arguments, source, output, index).run(names)


class Batch:
    """One run over files that are open and indexed."""

    def __init__(self, arguments: argparse.Namespace, source: BinaryIO, output: OutputFile, index: BatchIndex) -> None:
        self._arguments = arguments
        self._source = source
        self._output = output
        self._index = index
        self._pending = index.pending()

    def run(self, names: list[str]) -> int:
        """Send the remaining requests and sort the output; return the exit code. names: models in the input."""
        total, kept = self._index.num_lines(), self._index.num_records()
        if total == kept:
            self._put_in_order()
            print(f"Nothing to do: all {total:,} lines are answered in {self._arguments.output}.", file=sys.stderr)
            return 0
        with self._server(names) as endpoint:
            progress = BatchProgress(sys.stderr, total=total, kept=kept)
            try:
                asyncio.run(self._answer_all(endpoint, progress))
                self._put_in_order()
            except (KeyboardInterrupt, asyncio.CancelledError, ToolError) as error:
                progress.close()
                print(f"Stopped: {progress.summary()}. Run the same command to go on.", file=sys.stderr)
                if isinstance(error, ToolError):
                    raise
                return 130
            finally:
                progress.close()
        print(f"{progress.summary()}: {self._arguments.output}", file=sys.stderr)
        return 1 if progress.num_failed else 0

    async def _answer_all(self, endpoint: ServerEndpoint, progress: BatchProgress) -> None:
        concurrency = self._arguments.concurrency
        client = httpx.AsyncClient(
            base_url=endpoint.url,
            headers={**endpoint.headers(), "content-type": "application/json"},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=endpoint.trusts_proxies(),
        )
        async with client:
            sender = Sender(client, endpoint, retries=self._arguments.retries, timeout_s=self._arguments.timeout)
            try:
                async with _cancelled_by_signals(), asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(self._work(sender, progress))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _work(self, sender: Sender, progress: BatchProgress) -> None:
        """Take the next line until there is none."""
        for line in self._pending:
            try:
                record = await sender.send(self._request(line))
            except LineError as error:
                fault = BatchError(error.code, error.message, error.param or None, line.number)
                record = new_record(error.custom_id, error=fault)
            self._index.record(line.number, self._output.append(record))
            progress.count(is_answered=record.is_answered)

    def _request(self, line: PendingLine) -> BatchRequest:
        """Read a line again and check it. Raises LineError."""
        self._source.seek(line.offset)
        request = parse_line(self._source.readline(MAX_LINE_BYTES + 1), line.number)
        first = self._index.find(request.custom_id)
        if first != line.number:
            message = f'Line {line.number}: custom_id "{request.custom_id}" is that of line {first} as well.'
            raise LineError("duplicate_custom_id", message, param="custom_id", custom_id=request.custom_id)
        return request

    def _put_in_order(self) -> None:
        if not self._index.is_sorted():
            self._output.sort(self._index.spans())

    @contextlib.contextmanager
    def _server(self, names: list[str]) -> Iterator[ServerEndpoint]:
        arguments = self._arguments
        if arguments.model is not None:
            with TemporaryServer(arguments.model, served_names=names, stream=sys.stderr) as own:
                try:
                    yield own.endpoint
                except ToolError as error:
                    if why := own.why_gone():
                        raise ToolError(f"The server that was started is gone: {why}") from error
                    raise
            return
        endpoint = make_endpoint(arguments.url or DEFAULT_URL, arguments.api_key, os.environ)
        if served_models(endpoint) is None:
            hint = "start one with quire serve, or name a model with --model"
            raise ToolError(nobody_message(endpoint, hint))
        yield endpoint


def _open_input(name: str) -> BinaryIO:
    try:
        source = open(name, "rb")  # noqa: SIM115  closed by the caller's stack
    except OSError as error:
        raise ToolError(f"{name} cannot be read: {error.strerror}.", exit_code=2) from error
    if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
        source.close()
        raise ToolError(f"{name} must be a file: it is read twice.", exit_code=2)
    return source


def _index_input(source: BinaryIO, index: BatchIndex) -> list[str]:
    """Index every line; return the names of the first few models in the input."""
    names: dict[str, None] = {}
    for line in read_lines(source):
        custom_id = None
        try:
            request = parse_line(line.data, line.number)
        except LineError:
            pass  # it is said when its turn comes
        else:
            custom_id = request.custom_id
            if request.model and len(names) < _MAX_SERVED_NAMES:
                names[request.model] = None
        index.add(line.number, line.offset, custom_id)
    return list(names)


def _keep_answers(output: OutputFile, index: BatchIndex) -> None:
    """Find existing answers. Failed records are removed, so that their requests are sent again."""
    output.repair()
    if _find_answers(output, index) > index.num_records():
        output.sort(index.spans())
        index.forget_records()
        _find_answers(output, index)


def _find_answers(output: OutputFile, index: BatchIndex) -> int:
    """Store the position of every answer in the index; return the number of records, with failed ones."""
    num_records = 0
    for span, record in output.read_records():
        num_records += 1
        if not record.is_answered:
            continue
        number = None if record.custom_id is None else index.find(record.custom_id)
        if number is None:
            message = f'{output.path} has an answer to "{record.custom_id}", which is not in the input'
            raise ToolError(f"{message}: choose another file with -o.", exit_code=2)
        index.record(number, span)
    return num_records


@contextlib.asynccontextmanager
async def _cancelled_by_signals() -> AsyncIterator[None]:
    """Let the stopping signals cancel the current task: raised as anything else, they would break the loop itself."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = stopping_signals()
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)
