"""Measures servers side by side on the GPUs of one host, one on each: one alone, all, and all behind a router.

    python -m benchmarks.replicas --shape llama-3.1-8b --replicas 4 --router vllm-router --json out.json
Without the router the load generator sends each server its share, as a router that knows the load would. The same loads
then go to the router's port; what differs is the router's cost: in tokens per second at full load, and in the time to
the first token with one client for each server. Weights are random.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from benchmarks import router
from benchmarks.client_processes import run_shares, split
from benchmarks.load import LoadConfig
from benchmarks.online import (
    SHAPES,
    add_load_flags,
    launch_server,
    metrics_page,
    model_name,
    stop_server,
    wait_until_ready,
    write_model_folder,
)
from benchmarks.report import BenchError, Report, now
from benchmarks.router import RouterProgram, running_router
from benchmarks.serve import make_report

LOADS = ("one", "all", "calm", "all routed", "calm routed")
_CALM_ROUNDS, _CALM_OUTPUT_LEN = 16, 8  # with one client for each server: little but the time to the first token
_FINISHED = re.compile(r"^quire_requests_finished_total\{.*\} ([\d.e+]+)$", re.MULTILINE)


def main() -> int:
    """Measure; return 1 if a request failed, a server or the router did not start, or there is no such router."""
    args, server_flags = _parser().parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends its processes
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _run(args, server_flags, Path(folder))
    except BenchError as error:
        print(f"benchmarks.replicas: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace, server_flags: list[str], folder: Path) -> int:
    places = {name: folder / name for name in ("model", "program", "router")}
    for place in places.values():
        place.mkdir()
    program = router.find_router(args.router, places["program"])
    facts = program and program.facts()
    report: Report = {"date": now(), "shape": args.shape, "server_flags": server_flags, "router": facts}
    ports = [args.port + i for i in range(args.replicas)]
    write_model_folder(SHAPES / args.shape / "config.json", places["model"])
    with contextlib.ExitStack() as stack:
        report["start_to_ready_s"] = _start_servers(stack, places["model"], ports, server_flags)
        print(f"{len(ports)} servers ready after {max(report['start_to_ready_s']):.1f} s", flush=True)
        load = _load(args, model_name(ports[0]))
        calm = msgspec.structs.replace(load, concurrency=1, num_requests=_CALM_ROUNDS, output_len=_CALM_OUTPUT_LEN)
        send = functools.partial(_send, args=args, report=report)
        send("", msgspec.structs.replace(load, seed=100_000, num_requests=load.concurrency), ports)  # warm-up
        send("one", load, ports[:1])
        send("all", msgspec.structs.replace(load, seed=50_000), ports)
        send("calm", msgspec.structs.replace(calm, seed=60_000), ports)
        if program is not None:
            _measure_routed(program, load, calm, ports, send, report, places["router"])
            _write(report, args.json)
    return int(any(report[name]["num_failed"] for name in LOADS if name in report))


def _measure_routed(
    program: RouterProgram,
    load: LoadConfig,
    calm: LoadConfig,
    ports: list[int],
    send: functools.partial[None],
    report: Report,
    folder: Path,
) -> None:
    """Send the same loads to the router, and count the requests that each server had of them."""
    port = ports[-1] + 1
    with running_router(program, port=port, servers=ports, folder=folder):
        print(f"{program.name} {program.version} ({program.policy}) is ready", flush=True)
        before = [_num_finished(server) for server in ports]
        send("all routed", msgspec.structs.replace(load, seed=70_000), [port] * len(ports))
        send("calm routed", msgspec.structs.replace(calm, seed=80_000), [port] * len(ports))
        report["router"]["requests_by_server"] = [
            _num_finished(server) - count for server, count in zip(ports, before, strict=True)
        ]


def _start_servers(stack: contextlib.ExitStack, model: Path, ports: list[int], flags: list[str]) -> list[float]:
    """Start a server on each port with a GPU of its own, all at once; return the seconds of each until it was ready."""
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(ports))))).split(",")
    if len(gpus) < len(ports):
        raise BenchError(f"--replicas {len(ports)} needs as many GPUs; CUDA_VISIBLE_DEVICES has {len(gpus)}.")
    pool = stack.enter_context(ThreadPoolExecutor(len(ports)))
    servers: list[subprocess.Popen[bytes]] = []
    stack.callback(lambda: stop_server(*servers))  # before the pool's end, whose threads wait for them
    started_s = time.monotonic()
    for port, gpu in zip(ports, gpus, strict=False):
        servers.append(launch_server(str(model), port, flags, gpus=gpu))

    def wait(server: subprocess.Popen[bytes], port: int) -> float:
        wait_until_ready(server, port)
        return time.monotonic() - started_s

    return list(pool.map(wait, servers, ports))


def _load(args: argparse.Namespace, model: str) -> LoadConfig:
    """Return the load of one server."""
    return LoadConfig(
        host="127.0.0.1",
        port=args.port,
        model=model,
        concurrency=args.concurrency,
        num_requests=args.concurrency * args.rounds,
        input_len=args.input_len,
        output_len=args.output_len,
    )


def _send(name: str, load: LoadConfig, ports: list[int], *, args: argparse.Namespace, report: Report) -> None:
    """Send every port this load at the same time, with prompts of its own; keep the figures of all together.

    name: of the load in the report, which is written; empty: it is no part of it.
    """
    shares = [
        share
        for i, port in enumerate(ports)
        for share in split(msgspec.structs.replace(load, port=port, seed=load.seed + 1000 * i), args.processes)
    ]
    results, _ = run_shares(shares)
    if not name:
        return
    whole = msgspec.structs.replace(
        load,
        port=ports[0],
        concurrency=load.concurrency * len(ports),
        num_requests=load.num_requests * len(ports),
    )
    report[name] = run = make_report(whole, results, goodput={})
    _write(report, args.json)
    times = [run.get(f"median_{metric}_ms", math.nan) for metric in ("tpot", "ttft")]
    print(
        f"{name}: {run['output_throughput_tok_per_s']:,.0f} tok/s, TPOT {times[0]:.2f} ms, TTFT {times[1]:.1f} ms,"
        f" errors: {run['errors']}",
        flush=True,
    )


def _write(report: Report, path: Path | None) -> None:
    """Write what is measured so far: a time limit may end this process."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _num_finished(port: int) -> int:
    """Return how many requests a server has ended."""
    return int(sum(float(value) for value in _FINISHED.findall(metrics_page(port))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas", description="Other flags go to `quire serve` as they are."
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--router", default=router.VLLM_ROUTER, metavar="NAME|PATH|none", help=router.HELP)
    parser.add_argument("--concurrency", type=int, default=64, help="clients of each server")
    add_load_flags(parser)
    parser.add_argument(
        "--port", type=int, default=8500, help="of the first server; the router's follows the last one's"
    )
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
