"""Measures servers side by side on the GPUs of one host, one on each, against one of them alone.

    python -m benchmarks.replicas --shape llama-3.1-8b --replicas 4 --json out.json
The load generator sends each server its share of the load, as a router that knows the load would: no router runs, so
none is measured. Weights are random.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.client_processes import run_shares, split
from benchmarks.load import LoadConfig
from benchmarks.online import SHAPES, model_name, start_server, stop_server, write_model_folder
from benchmarks.report import Report, now
from benchmarks.serve import make_report


def main() -> int:
    """Measure; return 1 if a request failed."""
    args, server_flags = _parser().parse_known_args()
    count = args.replicas
    report: Report = {"date": now(), "shape": args.shape, "server_flags": server_flags, "router": None}
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    ports = [args.port + i for i in range(count)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))

        def start(i: int) -> float:
            server, seconds = start_server(folder, ports[i], server_flags, gpus=gpus[i])
            stack.callback(stop_server, server)
            return seconds

        with ThreadPoolExecutor(count) as pool:
            report["start_to_ready_s"] = list(pool.map(start, range(count)))
        print(f"{count} servers ready after {max(report['start_to_ready_s']):.1f} s", flush=True)
        load = _load(args, model_name(ports[0]))
        _send(msgspec.structs.replace(load, seed=100_000, num_requests=load.concurrency), ports, args.processes)
        report["one"] = _send(load, ports[:1], args.processes)
        report["all"] = _send(msgspec.structs.replace(load, seed=50_000), ports, args.processes)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for name in ("one", "all"):
        run = report[name]
        times = [run.get(f"median_{metric}_ms", math.nan) for metric in ("tpot", "ttft")]
        print(
            f"{name}: {run['output_throughput_tok_per_s']:,.0f} tok/s, TPOT {times[0]:.2f} ms, TTFT {times[1]:.1f} ms,"
            f" errors: {run['errors']}"
        )
    return int(report["one"]["num_failed"] + report["all"]["num_failed"] > 0)


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


def _send(load: LoadConfig, ports: list[int], num_processes: int) -> Report:
    """Send every server this load at the same time, with prompts of its own; return the figures of all together."""
    shares = [
        share
        for i, port in enumerate(ports)
        for share in split(msgspec.structs.replace(load, port=port, seed=load.seed + 1000 * i), num_processes)
    ]
    results, _ = run_shares(shares)
    whole = msgspec.structs.replace(
        load, concurrency=load.concurrency * len(ports), num_requests=load.num_requests * len(ports)
    )
    return make_report(whole, results, goodput={})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas", description="Other flags go to `quire serve` as they are."
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=64, help="clients of each server")
    parser.add_argument("--rounds", type=int, default=8, help="requests per concurrent client")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--processes", type=int, default=4, help="client processes of each server")
    parser.add_argument("--port", type=int, default=8500)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
