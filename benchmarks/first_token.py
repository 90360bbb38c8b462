"""An HTTP worker's share of the time to the first token: `python -m benchmarks.first_token`. Linux only; never torch.

    client ─ POST ─→ worker process ─ AddRequest ─→ scripted engine        in: sent until the engine has the request
    client ←─ SSE ── worker process ←─ StepEvents ─ scripted engine        out: first token sent until the client has it

One request at a time, on a connection that stays open. The worker is the real process; client and engine are this one,
with sockets that block. CPU: of the worker's process, for a request with two tokens. Other work on the machine makes
both times longer, so the report has the 10th percentile beside the median.

--against DIR: each request is sent to the worker of another checkout as well, in turn.
"""

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from benchmarks.latency import percentile
from benchmarks.report import BenchError, Report, check_outputs, format_table, host_facts, now, write_report
from engine.interface.config import ServerConfig
from engine.interface.control import Serving, Stage, State, ToLauncher
from engine.interface.protocol import AddRequest, EngineReady, Finished, Started, StepEvents, ToEngine
from engine.interface.transport import FrameDecoder, encode_frame
from server.config.model_source import resolve_model
from server.config.serve_config import WorkerConfig
from server.text.tokenizer import load_tokenizer

_MODEL = "bench"
_NUM_PROMPT_IDS = 1000  # ids below it are tokens of the demo model
_TIMEOUT_S = 120.0
_COMPUTING_S = 0.003  # between the request's arrival and its first token, in which the worker comes to rest
_NUM_WARM_UP = 20
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")


class Case(NamedTuple):
    """One kind of request: its path, and the fields of the next one beside model, stream and the tokens to answer."""

    path: str
    fields: Callable[[Random], dict[str, Any]]


class Times(NamedTuple):
    """Of one request, in µs."""

    in_us: float
    out_us: float
    cpu_us: float


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


CASES = {
    "completion of 512 ids": Case(
        "/v1/completions", lambda rng: {"prompt": [rng.randrange(_NUM_PROMPT_IDS) for _ in range(512)]}
    ),
    "short chat": Case("/v1/chat/completions", lambda rng: _chat("Say something.")),
    "chat of 400 words": Case("/v1/chat/completions", lambda rng: _chat(" ".join(rng.choices(_WORDS, k=400)))),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case, print and save the figures."""
    arguments = _parse(argv)
    check_outputs(json_path=arguments.json, plot_path=None, html_path=None)
    trees = {"this": Path(__file__).parent.parent}
    if arguments.against is not None:
        trees["against"] = Path(arguments.against).resolve()
    cases: dict[str, dict[str, dict[str, float]]] = {}
    try:
        with contextlib.ExitStack() as stack:
            workers = {name: stack.enter_context(_worker(path)) for name, path in trees.items()}
            for name in arguments.case:
                measured = _measure(CASES[name], workers, arguments.requests)
                cases[name] = {tree: _summarise(times) for tree, times in measured.items()}
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report: Report = {"benchmark": "first_token", "date": now(), "host": host_facts()}
    report |= {"num_requests": arguments.requests, "cases": cases}
    print(_format(report))
    if arguments.json:
        write_report(arguments.json, report)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token", description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="one kind of request; default: all")
    parser.add_argument("--requests", type=int, default=300, help="requests of each kind (default 300)")
    parser.add_argument("--against", metavar="DIR", default=None, help="another checkout, measured in turn")
    parser.add_argument("--json", metavar="FILE", default=None, help="save the result")
    arguments = parser.parse_args(argv)
    arguments.case = arguments.case or list(CASES)
    if arguments.requests <= 0:
        parser.error(f"--requests {arguments.requests} must be above 0")
    return arguments


def _measure(case: Case, workers: dict[str, "_Worker"], num_requests: int) -> dict[str, list[Times]]:
    rng = Random(0)
    measured: dict[str, list[Times]] = {name: [] for name in workers}
    for number in range(_NUM_WARM_UP + num_requests):
        fields = case.fields(rng)
        for name in sorted(workers, reverse=bool(number % 2)):  # the first one finds the caches as others left them
            times = workers[name].ask(case.path, fields)
            if number >= _NUM_WARM_UP:
                measured[name].append(times)
    return measured


class _Worker:
    """A worker process with its client and its engine."""

    def __init__(self, pid: int, client: socket.socket, engine: socket.socket) -> None:
        self._pid = pid
        self._client = client
        self._engine = engine
        self._decoder = FrameDecoder(ToEngine)

    def ask(self, path: str, fields: dict[str, Any]) -> Times:
        """Send a request, answer it with two tokens, and read the answer to its end. Raises BenchError."""
        cpu_s = _cpu_s(self._pid)
        limit = "max_completion_tokens" if "messages" in fields else "max_tokens"
        body = json.dumps({"model": _MODEL, "stream": True, limit: 2, **fields}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        sent_s = time.perf_counter()
        self._client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        request_id = self._request_id()
        arrived_s = time.perf_counter()
        time.sleep(_COMPUTING_S)
        token = StepEvents(0, [request_id], [1], [300], started=[Started(0, 0, 0.001, 0.002)])
        first_s = time.perf_counter()
        self._engine.sendall(encode_frame(token))
        text, num_texts = (
            (b'"content":"', 2) if "messages" in fields else (b'"text":"', 1)
        )  # a chat's role has one, too
        reply = b""
        while reply.count(text) < num_texts:
            reply += self._client.recv(1 << 16)
            if not reply.startswith(b"HTTP/1.1 200"):
                status = reply.partition(b"\r\n")[0].decode("latin-1")
                raise BenchError(f"The worker answered {status!r}.")
        shown_s = time.perf_counter()
        self._engine.sendall(
            encode_frame(StepEvents(1, [request_id], [1], [301], finished=[Finished(0, "length", None)]))
        )
        while not reply.endswith(b"0\r\n\r\n"):
            reply += self._client.recv(1 << 16)
        time.sleep(_COMPUTING_S)
        return Times((arrived_s - sent_s) * 1e6, (shown_s - first_s) * 1e6, (_cpu_s(self._pid) - cpu_s) * 1e6)

    def _request_id(self) -> str:
        while True:
            readable, _, _ = select.select([self._engine, self._client], [], [], _TIMEOUT_S)
            if not readable:
                raise BenchError(f"The worker sends the engine no request within {_TIMEOUT_S:g} s.")
            if self._engine not in readable:  # the engine never sees a request that is refused
                raise BenchError(f"The worker answered {self._client.recv(1 << 16).decode('latin-1')!r}.")
            for message in self._decoder.feed(self._engine.recv(1 << 18)):
                if isinstance(message, AddRequest):
                    return message.request_id


@contextlib.contextmanager
def _worker(tree: Path) -> Iterator[_Worker]:
    """Run a checkout's worker process. Raises BenchError if it does not serve in time."""
    model = resolve_model(None).folder
    ready = msgspec.structs.replace(_READY, vocab_size=load_tokenizer(model).vocab_size)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-"))
        http = stack.enter_context(socket.socket())
        http.bind(("127.0.0.1", 0))
        http.listen(64)
        control, engine = (_listen(stack, f"{folder}/{name}.sock") for name in ("control", "engine"))
        config = WorkerConfig(
            server=ServerConfig(
                model=str(model),
                served_model_names=[_MODEL],
                engine_socket=f"{folder}/engine.sock",
                control_socket=f"{folder}/control.sock",
            ),
            listen_fd=http.fileno(),
            tls_cert=None,
            tls_key=None,
            log_level="warning",
            log_format="text",
            debug=True,
        )
        Path(folder, "worker.json").write_bytes(msgspec.json.encode(config))
        process = subprocess.Popen(
            [sys.executable, "-m", "server.http.worker", f"{folder}/worker.json"],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            pass_fds=[http.fileno()],
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        try:
            to_launcher = stack.enter_context(control.accept()[0])
            to_launcher.settimeout(_TIMEOUT_S)
            to_launcher.sendall(encode_frame(State(Stage("ready"), False)))
            to_engine = stack.enter_context(engine.accept()[0])
            to_engine.settimeout(_TIMEOUT_S)
            to_engine.sendall(encode_frame(ready))
            decoder = FrameDecoder(ToLauncher)
            while not any(isinstance(message, Serving) for message in decoder.feed(to_launcher.recv(1 << 16))):
                pass
            client = stack.enter_context(socket.create_connection(http.getsockname(), timeout=_TIMEOUT_S))
        except TimeoutError as error:
            raise BenchError(f"The worker of {tree} does not serve within {_TIMEOUT_S:g} s.") from error
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield _Worker(process.pid, client, to_engine)


_READY = EngineReady(
    max_model_len=65_536,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    num_blocks=65_536,
    block_size=16,
    vocab_size=0,  # of the tokenizer that the worker loads
    max_queued_requests=64,
    hidden_size=8,
    max_queued_tokens=1 << 20,
)


def _listen(stack: contextlib.ExitStack, path: str) -> socket.socket:
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.settimeout(_TIMEOUT_S)
    listener.bind(path)
    listener.listen(4)
    return listener


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and all its threads, in seconds (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def _summarise(times: list[Times]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, column in zip(Times._fields, zip(*times, strict=True), strict=True):
        figures[f"median_{name}"] = round(statistics.median(column), 1)
        figures[f"p10_{name}"] = round(percentile(sorted(column), 10), 1)
    return figures


def _format(report: Report) -> str:
    rows = [["µs", "", "in p50", "p10", "out p50", "p10", "CPU p50", "p10"]]
    for case, trees in report["cases"].items():
        for tree, figures in trees.items():
            rows.append([case, tree, *(f"{value:,.0f}" for value in figures.values())])
    return format_table(rows)


if __name__ == "__main__":
    sys.exit(main())
