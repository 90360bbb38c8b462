"""CPU time of an HTTP worker per streamed token: `python -m benchmarks.worker_cpu`. Linux only; never torch.

    scripted engine ─ one StepEvents a step, a token for each stream ─→ worker process ─ SSE ─→ plain sockets

The worker is the real process; engine, launcher and clients are this process, whose own CPU time does not count. The
steps are far enough apart that the worker keeps up, so each token is a chunk of its own. The clock of the worker's
process is read between two steps, when every stream has begun and none has ended: the figure has no share of reading
requests and ending answers.

--against DIR: the worker of another checkout runs at the same time, and the two have blocks of steps in turn, so that
what else the machine does meanwhile meets both. The difference is the median over pairs of blocks.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.report import BenchError, Report, check_outputs, format_table, host_facts, now, write_report
from engine.interface.config import ServerConfig
from engine.interface.control import Serving, Stage, State, ToLauncher
from engine.interface.protocol import AddRequest, EngineReady, Finished, Started, StepEvents, ToEngine
from engine.interface.transport import encode_frame, read_messages
from server.config.model_source import resolve_model
from server.config.serve_config import WorkerConfig
from server.text.tokenizer import load_tokenizer

_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind. A worker reads tokens from the engine, "
    "makes text of them and sends it to its clients: one event a token. Is that much? It is 3,200 events a second!\n"
)
_STEPS_PER_BLOCK = 32
_SETTLE_S = 0.1  # for the worker to send what it has
_START_TIMEOUT_S = 120.0
_MIN_EVENTS = 0.9  # a token: a part of a character has none, and the beginning and the end have some more
_MODEL = "bench"


class Case(NamedTuple):
    """One kind of stream: the path, and the request's fields beside model and stream. LIMIT: its number of tokens."""

    path: str
    fields: dict[str, Any]


_CHAT = [{"role": "user", "content": "Say something."}]
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
_CASES = {
    "chat": Case("/v1/chat/completions", {"messages": _CHAT, "max_completion_tokens": "LIMIT"}),
    "chat with tools": Case(
        "/v1/chat/completions", {"messages": _CHAT, "max_completion_tokens": "LIMIT", "tools": [_TOOL]}
    ),
    "completions": Case("/v1/completions", {"prompt": "Say", "max_tokens": "LIMIT"}),
    "responses": Case("/v1/responses", {"input": "Say something.", "max_output_tokens": "LIMIT"}),
    "messages": Case("/v1/messages", {"messages": _CHAT, "max_tokens": "LIMIT"}),
}


class Load(NamedTuple):
    """A measurement: `num_streams` at once, `num_blocks` of 32 steps each, a step every `step_s` seconds."""

    num_streams: int
    num_blocks: int
    step_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens of a stream. The first block and the last step do not count."""
        return _STEPS_PER_BLOCK * (self.num_blocks + 1) + 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case, print and save the medians."""
    arguments = _parse(argv)
    check_outputs(json_path=arguments.json, plot_path=None, html_path=None)
    load = Load(arguments.streams, arguments.blocks, arguments.step_ms / 1e3)
    model = resolve_model(arguments.model)
    tokenizer = load_tokenizer(model.folder)
    script = tokenizer.encode(_TEXT, add_special_tokens=False)
    trees = {"this": Path(__file__).parent.parent}
    if arguments.against is not None:
        trees["against"] = Path(arguments.against).resolve()
    measured: dict[str, list[list[float]]] = {}
    for name in arguments.case:
        workers = [
            _Worker(
                load,
                _CASES[name],
                str(model.folder),
                script,
                tokenizer.vocab_size,
                tree=path,
                profile=arguments.profile,
            )
            for path in trees.values()
        ]
        try:
            measured[name] = asyncio.run(_measure(workers))
        except BenchError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    report = _report(load, arguments.model, list(trees), measured)
    print(_format(report))
    if arguments.json:
        write_report(arguments.json, report)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_cpu", description=__doc__)
    parser.add_argument("--case", action="append", choices=list(_CASES), help="one kind of stream; default: all")
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default 64)")
    parser.add_argument("--blocks", type=int, default=24, help="blocks of 32 steps, a token a stream each (default 24)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time from one step to the next (default 20)")
    parser.add_argument(
        "--model", default=None, help="folder or hub id whose tokenizer and template count; default: the demo"
    )
    parser.add_argument(
        "--against", metavar="DIR", default=None, help="another checkout, measured in turn with this one"
    )
    parser.add_argument(
        "--profile", metavar="FILE", default=None, help="write the worker's cProfile; it slows the worker"
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="save the result")
    arguments = parser.parse_args(argv)
    arguments.case = arguments.case or list(_CASES)
    for name in ("streams", "blocks", "step_ms"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be above 0")
    if arguments.profile and arguments.against:
        parser.error("--profile is for one worker: it cannot be used with --against")
    return arguments


async def _measure(workers: Sequence["_Worker"]) -> list[list[float]]:
    """Return the CPU time of each worker's blocks, in µs per token. Raises BenchError."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.streaming())
        times = [[await worker.run_block() for worker in workers] for _ in range(workers[0].load.num_blocks + 1)]
        for worker in workers:
            await worker.end()
    return [list(column) for column in zip(*times[1:], strict=True)]  # the first warmed up


class _Worker:
    """One worker process with its streams. Life: streaming() → run_block(), again and again → end()."""

    def __init__(
        self,
        load: Load,
        case: Case,
        model: str,
        script: Sequence[int],
        vocab_size: int,
        *,
        tree: Path,
        profile: str | None,
    ) -> None:
        self.load = load
        self._case = case
        self._model = model
        self._script, self._vocab_size = script, vocab_size
        self._tree = tree
        self._profile = profile
        self._serving = asyncio.Event()
        self._requests: list[str] = []
        self._has_all = asyncio.Event()
        self._engine: asyncio.StreamWriter | None = None
        self._clients: list[asyncio.Task[int]] = []
        self._step = 0
        self._pid = 0

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Start the process and its streams; end it at the end. Raises BenchError."""
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder, socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1024)
            port = listener.getsockname()[1]
            launcher = await asyncio.start_unix_server(self._serve_launcher, f"{folder}/control.sock")
            engine = await asyncio.start_unix_server(self._serve_engine, f"{folder}/engine.sock")
            async with launcher, engine, self._process(Path(folder), listener):
                body = self._request(port)
                self._clients = [asyncio.create_task(_read_stream(port, body)) for _ in range(self.load.num_streams)]
                await asyncio.wait_for(self._has_all.wait(), _START_TIMEOUT_S)
                yield

    async def run_block(self) -> float:
        """Send 32 steps; return the CPU time that the worker took for them, in µs per token."""
        before_s = _cpu_s(self._pid)
        for _ in range(_STEPS_PER_BLOCK):
            due_s = time.monotonic() + self.load.step_s
            self._send_step()
            await asyncio.sleep(due_s - time.monotonic())
        await asyncio.sleep(_SETTLE_S)
        return (_cpu_s(self._pid) - before_s) / (_STEPS_PER_BLOCK * self.load.num_streams) * 1e6

    async def end(self) -> None:
        """Send the last step, which ends every stream. Raises BenchError if tokens had no events of their own."""
        self._send_step()
        num_events, num_tokens = sum(await asyncio.gather(*self._clients)), self.load.num_streams * self._step
        if num_events < _MIN_EVENTS * num_tokens:
            raise BenchError(
                f"The worker did not keep up: {num_events} events for {num_tokens} tokens. Use a longer --step-ms."
            )

    @contextlib.asynccontextmanager
    async def _process(self, folder: Path, listener: socket.socket) -> AsyncIterator[None]:
        """Run the worker process until it has ended; go on once it serves."""
        config = WorkerConfig(
            server=ServerConfig(
                model=self._model,
                served_model_names=[_MODEL],
                engine_socket=f"{folder}/engine.sock",
                control_socket=f"{folder}/control.sock",
            ),
            listen_fd=listener.fileno(),
            tls_cert=None,
            tls_key=None,
            log_level="warning",
            log_format="text",
            debug=True,
        )
        (folder / "worker.json").write_bytes(msgspec.json.encode(config))
        profiler = ["-m", "cProfile", "-o", self._profile] if self._profile is not None else []
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, *profiler, "-m", "server.http.worker", str(folder / "worker.json")],
            cwd=self._tree,
            env=os.environ | {"PYTHONPATH": str(self._tree)},
            pass_fds=[listener.fileno()],
        )
        self._pid = process.pid
        try:
            await asyncio.wait_for(self._serving.wait(), _START_TIMEOUT_S)
            yield
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), _START_TIMEOUT_S)

    async def _serve_launcher(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(State(Stage("ready"), False)))
        async for message in read_messages(reader, ToLauncher):
            if isinstance(message, Serving):
                self._serving.set()
        writer.close()

    async def _serve_engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._engine = writer
        ready = EngineReady(
            max_model_len=65_536,
            max_num_seqs=self.load.num_streams,
            max_num_batched_tokens=8192,
            num_blocks=65_536,
            block_size=16,
            vocab_size=self._vocab_size,
            max_queued_requests=self.load.num_streams,
            hidden_size=8,
            max_queued_tokens=1 << 20,
        )
        writer.write(encode_frame(ready))
        async for message in read_messages(reader, ToEngine):
            if isinstance(message, AddRequest):
                self._requests.append(message.request_id)
                if len(self._requests) == self.load.num_streams:
                    self._has_all.set()
        writer.close()

    def _send_step(self) -> None:
        rows = range(len(self._requests))
        tokens = [self._script[(self._step + row) % len(self._script)] for row in rows]
        events = StepEvents(self._step, self._requests, [1] * len(rows), tokens)
        if self._step == 0:
            events.started = [Started(row, 0, 0.001, 0.002) for row in rows]
        self._step += 1
        if self._step == self.load.num_tokens:
            events.finished = [Finished(row, "length", None) for row in rows]
        assert self._engine is not None, "the worker has not connected"
        self._engine.write(encode_frame(events))

    def _request(self, port: int) -> bytes:
        fields = {
            name: self.load.num_tokens if value == "LIMIT" else value for name, value in self._case.fields.items()
        }
        body = json.dumps({"model": _MODEL, "stream": True, **fields}).encode()
        head = f"POST {self._case.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _read_stream(port: int, request: bytes) -> int:
    """Send a request; return how many events its answer has. Raises BenchError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        status = head.partition(b"\r\n")[0].decode("latin-1")
        raise BenchError(f"The worker answered {status!r}.")
    count, end = 0, b""
    while data := await reader.read(1 << 16):
        count += (end + data).count(b"\n\n")
        end = data[-1:]
    writer.close()
    return count


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and all its threads, in seconds (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def _report(load: Load, model: str | None, trees: Sequence[str], measured: dict[str, list[list[float]]]) -> Report:
    cases: dict[str, dict[str, Any]] = {}
    for name, columns in measured.items():
        cases[name] = {
            f"{tree}_us_per_token": round(statistics.median(blocks), 2)
            for tree, blocks in zip(trees, columns, strict=True)
        }
        if len(columns) > 1:
            shares = [1 - ours / theirs for ours, theirs in zip(*columns, strict=True)]
            cases[name]["less"] = round(statistics.median(shares), 3)
        cases[name]["blocks_us_per_token"] = [[round(value, 2) for value in blocks] for blocks in columns]
    return {
        "benchmark": "worker_cpu",
        "date": now(),
        "host": host_facts(),
        "model": model or "demo",
        "load": load._asdict(),
        "cases": cases,
    }


def _format(report: Report) -> str:
    rows = [["µs of CPU per token", "this", "against", "less"]]
    for name, case in report["cases"].items():
        against, less = case.get("against_us_per_token"), case.get("less")
        rows.append(
            [
                name,
                f"{case['this_us_per_token']:.1f}",
                "-" if against is None else f"{against:.1f}",
                "-" if less is None else f"{100 * less:.0f} %",
            ]
        )
    return format_table(rows)


if __name__ == "__main__":
    sys.exit(main())
