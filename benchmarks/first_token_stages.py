"""A first token's way through a real daemon, stage by stage: `python -m benchmarks.first_token_stages`. Never torch.

    client ─ POST ─→ worker ─ AddRequest ─→ engine: plan → launch → device → read ─ StepEvents ─→ worker ─ SSE ─→ client

A daemon with random weights of --shape answers one streamed completion of random ids after the other. Marks in its
processes (benchmarks/first_token_marks.py) and at the client, which has a socket that blocks, are on one clock. A stage
is the time between two marks that follow each other; its percentiles are over requests, so they do not sum to those of
the whole. Requests whose first token has no text by itself are counted, and left out: their client waits for the next.
Other flags go to `quire serve` as they are.

--against DIR: a daemon of another checkout runs, too, and the two have blocks of requests in turn; one waits meanwhile.
Both need room on one GPU: --kv-cache-memory 4GiB.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from benchmarks.first_token_marks import FOLDER_VARIABLE, MARKS, WRITES, read_marks, site_lines
from benchmarks.latency import percentile
from benchmarks.online import SHAPES, model_name, stop_server, wait_until_ready, write_model_folder
from benchmarks.report import BenchError, Report, check_outputs, format_table, host_facts, now, write_report

_PERCENTS = (10, 50, 90)
_BLOCK = 20  # requests of one daemon in turn; the first of them is not counted with --against
_NUM_WARM_UP = 20
_TIMEOUT_S = 300.0
_SENT, _SHOWN, _WHOLE = "client sends", "client has token", "sent until the client has it"
_OF_DEVICE = "device: "

Marks = dict[str, float]  # of one request: µs by name, since it was sent; of the device durations


class _Daemon(NamedTuple):
    """A daemon that serves, with its client."""

    folder: Path  # of its marks
    client: socket.socket
    model: str


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save the stages."""
    arguments, flags = _parse(argv)
    try:
        check_outputs(json_path=arguments.json, plot_path=None, html_path=None)
        measured = _measure(arguments, flags)
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report: Report = {"benchmark": "first_token_stages", "date": now(), "host": host_facts()}
    report |= {"shape": arguments.shape, "server_flags": flags, "num_requests": arguments.requests}
    report |= {"input_len": arguments.input_len, "output_len": arguments.output_len}
    report["num_with_text"] = {name: len(requests) for name, requests in measured.items()}
    report["trees"] = {name: _summarise(requests) for name, requests in measured.items()}
    for name, stages in report["trees"].items():
        print(_format(f"{name}: {report['num_with_text'][name]} requests, µs", stages))
    if arguments.json:
        write_report(arguments.json, report)
    return 0


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_token_stages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shapes = sorted(path.name for path in SHAPES.iterdir())
    parser.add_argument("--shape", default="tiny", choices=shapes, help="the model's sizes (default tiny)")
    parser.add_argument("--requests", type=int, default=200, help="requests that count, of each daemon (default 200)")
    parser.add_argument("--input-len", type=int, default=512, help="ids of a prompt (default 512)")
    parser.add_argument("--output-len", type=int, default=16, help="tokens of an answer (default 16)")
    parser.add_argument("--settle", type=float, default=4.0, metavar="S", help="wait before the first request (4)")
    parser.add_argument("--against", metavar="DIR", default=None, help="another checkout, measured in turn")
    parser.add_argument("--json", metavar="FILE", default=None, help="save the result")
    arguments, flags = parser.parse_known_args(argv)
    for name, least in (("requests", 1), ("input_len", 1), ("output_len", 1), ("settle", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least {least}")
    return arguments, flags


def _measure(arguments: argparse.Namespace, flags: list[str]) -> dict[str, list[Marks]]:
    """Return the marks of each counted request, by checkout. Raises BenchError."""
    trees = {"this": Path(__file__).resolve().parent.parent}
    if arguments.against is not None:
        trees["against"] = Path(arguments.against).resolve()
    config, rng = SHAPES / arguments.shape / "config.json", Random(0)
    vocab_size = json.loads(config.read_text())["vocab_size"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        (folder / "model").mkdir()
        write_model_folder(config, folder / "model")
        starting = {name: stack.enter_context(_start(tree, folder, name, flags)) for name, tree in trees.items()}
        daemons = {name: stack.enter_context(_connect(*started)) for name, started in starting.items()}
        time.sleep(arguments.settle)  # an engine captures graphs while it has nothing else to do
        asked: dict[str, list[tuple[int, int]]] = {name: [] for name in daemons}
        for number in range(-(-(arguments.requests + _NUM_WARM_UP) // (_BLOCK - len(daemons) + 1))):
            for name in sorted(daemons, reverse=bool(number % 2)):
                for place in range(_BLOCK):
                    prompt = [rng.randrange(vocab_size) for _ in range(arguments.input_len)]
                    times = _ask(daemons[name], prompt, arguments.output_len)
                    if len(daemons) == 1 or place:
                        asked[name].append(times)
        measured = {
            name: _match(asked[name][_NUM_WARM_UP:][: arguments.requests], read_marks(daemon.folder))
            for name, daemon in daemons.items()
        }
    if not all(measured.values()):
        raise BenchError("No first token had text.")
    return measured


@contextlib.contextmanager
def _start(
    tree: Path, folder: Path, name: str, flags: list[str]
) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Start a checkout's daemon on the model in `folder`; end it afterwards."""
    marks = folder / name
    marks.mkdir()
    (marks / "sitecustomize.py").write_text("\n".join(site_lines(tree)) + "\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server", "serve", str(folder / "model"), "--load-format", "dummy"]
    command += ["--port", str(port), "--max-queue-wait", "0", "--log-level", "warning", *flags]
    path = os.pathsep.join(filter(None, [str(marks), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, FOLDER_VARIABLE: str(marks)}
    server = subprocess.Popen(command, cwd=tree, env=environment)
    try:
        yield server, port, marks
    finally:
        stop_server(server)


@contextlib.contextmanager
def _connect(server: subprocess.Popen[bytes], port: int, marks: Path) -> Iterator[_Daemon]:
    """Wait for a daemon that starts, and open the client's connection. Raises BenchError if it does not serve."""
    wait_until_ready(server, port, timeout_s=_TIMEOUT_S)
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield _Daemon(marks, client, model_name(port))


def _ask(daemon: _Daemon, prompt: list[int], num_tokens: int) -> tuple[int, int]:
    """Read one streamed answer; return when it was sent and when its first token came, in ns. Raises BenchError."""
    fields = {"model": daemon.model, "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    sent_ns, shown_ns, reply = time.monotonic_ns(), 0, b""
    daemon.client.sendall(message)
    while not reply.endswith(b"0\r\n\r\n"):
        part = daemon.client.recv(1 << 16)
        if not part:
            raise BenchError("The daemon closed the connection.")
        reply += part
        if not shown_ns and b"\ndata: " in reply:
            shown_ns = time.monotonic_ns()
        if not reply.startswith(b"HTTP/1.1 200"):
            raise BenchError(f"The daemon answered {reply.partition(bytes([13]))[0].decode('latin-1')!r}.")
    if b'"error"' in reply or not shown_ns:
        raise BenchError("The daemon's stream failed.")
    return sent_ns, shown_ns


def _match(asked: list[tuple[int, int]], marks: list[tuple[int, str, float]]) -> list[Marks]:
    """Return the marks of each request whose first token has text: the first of each name, as one request is open."""
    requests = []
    for sent_ns, shown_ns in asked:
        found: Marks = {_SHOWN: (shown_ns - sent_ns) / 1e3}
        has_text = True
        for at_ns, name, value in marks[bisect_left(marks, (sent_ns,)) : bisect_left(marks, (shown_ns,))]:
            found.setdefault(name, value if name.startswith(_OF_DEVICE) else (at_ns - sent_ns) / 1e3)
            has_text &= name != WRITES or value > 0
        if has_text:
            requests.append(found)
    return requests


def _summarise(requests: list[Marks]) -> dict[str, dict[str, float]]:
    """Return the percentiles of each stage, µs: of those whose marks all requests have."""
    known = [name for name in MARKS if all(name in found for found in requests)]
    host = [name for name in known if not name.startswith(_OF_DEVICE)]
    stages: dict[str, list[float]] = {}
    for first, second in zip([_SENT, *host], [*host, _SHOWN], strict=True):
        stages[f"{first} → {second}"] = [found[second] - found.get(first, 0.0) for found in requests]
    stages[_WHOLE] = [found[_SHOWN] for found in requests]
    for name in known[len(host) :]:
        stages[name] = [found[name] for found in requests]
    return {
        name: {f"p{percent}": round(percentile(sorted(times), percent), 1) for percent in _PERCENTS}
        for name, times in stages.items()
    }


def _format(name: str, stages: dict[str, dict[str, float]]) -> str:
    rows = [[name, *(f"p{percent}" for percent in _PERCENTS)]]
    rows += [[stage, *(f"{value:,.0f}" for value in figures.values())] for stage, figures in stages.items()]
    return format_table(rows)


if __name__ == "__main__":
    sys.exit(main())
