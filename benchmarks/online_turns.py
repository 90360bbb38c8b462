"""Servers that are loaded in turns: python -m benchmarks.online_turns --server NAME[@CHECKOUT]: FLAGS … [--json FILE].

Starts one daemon for each --server on the same shape with random weights, from this checkout or another one, all on
one GPU, and sends the same load to one after the other, --turns times: so other work on the machine slows all. Each
needs a part of the GPU's memory (--gpu-memory-utilization, --kv-cache-memory). Prompts never come again, so with a
small pool blocks are evicted all the time. Of each load: tokens a second, CPU seconds of the server's processes, and
what went to host memory and came back.

    python -m benchmarks.online_turns --server "off: --kv-host-memory off" --server "on: --kv-host-memory 8GiB"
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.load import LoadConfig
from benchmarks.online import SHAPES, model_name, stop_server, wait_until_ready, write_model_folder
from benchmarks.report import format_table, host_facts, now
from benchmarks.serve import measure

_COUNTERS = ("quire_kv_host_blocks_total", "quire_kv_host_copied_bytes_total", "quire_kv_host_hit_tokens_total")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start all, load them in turns, print and write what was measured."""
    args = _parser().parse_args()
    loads: dict[str, list[dict[str, Any]]] = {}
    servers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
        try:
            for place, (name, checkout, flags) in enumerate(args.server):
                servers[name] = (_launch(folder, args.port + place, [*flags, *args.flags.split()], checkout), place)
            for server, place in servers.values():
                wait_until_ready(server, args.port + place, timeout_s=args.start_s)
            print(f"ready: {', '.join(servers)}", flush=True)
            _await_pins([args.port + place for _, place in servers.values()], most_s=args.settle)
            for turn in range(args.turns + 1):  # the first one warms up
                for name, (server, place) in servers.items():
                    load = _load(args, args.port + place, server.pid, turn=turn, place=place)
                    if turn:
                        loads.setdefault(name, []).append(load)
                    print(f"{turn} {name}: {load['output_throughput_tok_per_s']:,.0f} tok/s, {load}", flush=True)
        finally:
            stop_server(*(server for server, _ in servers.values()))
    print(format_table(_rows(loads)))
    if args.json:
        servers_of = [{"name": name, "flags": flags, "is_other": bool(path)} for name, path, flags in args.server]
        settings = {
            name: getattr(args, name) for name in ("shape", "flags", "concurrency", "rounds", "input_len", "output_len")
        }
        report = {"kind": "online-turns", "date": now(), "host": host_facts(), **settings, "servers": servers_of}
        Path(args.json).write_text(json.dumps(report | {"loads": loads}, indent=1) + "\n")


def _launch(folder: str, port: int, flags: list[str], checkout: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "server", "serve", folder, "--load-format", "dummy", "--port", str(port)]
    command += ["--max-queue-wait", "0", "--log-level", "warning", *flags]
    root = checkout or os.getcwd()
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": paths})


def _load(args: argparse.Namespace, port: int, pid: int, *, turn: int, place: int) -> dict[str, Any]:
    config = LoadConfig(
        host="127.0.0.1",
        port=port,
        model=model_name(port),
        concurrency=args.concurrency,
        num_requests=args.concurrency * (args.rounds if turn else max(args.rounds // 4, 1)),
        input_len=args.input_len,
        output_len=args.output_len,
        seed=1_000_000 * turn + 10_000_000 * place,
    )
    before, cpu_s = _counters(port), _cpu_s(pid)
    result = measure(config, num_processes=min(args.concurrency, args.processes))
    after, cpu_s = _counters(port), _cpu_s(pid) - cpu_s
    names = ["output_throughput_tok_per_s", "duration_s", "num_completed", "num_failed", "num_cached_tokens"]
    names += ["median_itl_ms", "p99_itl_ms", "median_ttft_ms", "p99_ttft_ms"]
    counts = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: result.get(name, 0) for name in names} | {"cpu_s": cpu_s} | counts


def _counters(port: int) -> dict[str, float]:
    """Return the counters of host memory by their names and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:  # nosec B310
        lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if line.startswith(_COUNTERS)]
    return {re.sub(r'quire_kv_host_|,?model_name="[^"]*"|_total', "", name): float(value) for name, value in lines}


def _await_pins(ports: list[int], *, most_s: float) -> None:
    """Wait until host memory no longer grows in any server."""
    end_s, last = time.monotonic() + most_s, [-1.0] * len(ports)
    while time.monotonic() < end_s:
        sizes = []
        for port in ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:  # nosec B310
                lines = reply.read().decode().splitlines()
            found = [line for line in lines if line.startswith("quire_kv_host_bytes{") and 'use="total"' in line]
            sizes.append(sum(float(line.rsplit(" ", 1)[1]) for line in found))
        print("host memory (GiB):", *(f"{size / 2**30:.2f}" for size in sizes), flush=True)
        if sizes == last:
            return
        last = sizes
        time.sleep(1.5)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    ours, added = {pid}, True
    while added:
        more = {child for child, (parent, _) in parents.items() if parent in ours} - ours
        ours, added = ours | more, bool(more)
    return sum(parents[process][1] for process in ours if process in parents)


def _rows(loads: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    first = next(iter(loads.values()))
    rows = [["server", "tok/s", "of the first", "each", "CPU s", "median ITL ms", "p99", "median TTFT ms"]]
    for name, results in loads.items():
        each = [result["output_throughput_tok_per_s"] for result in results]
        pairs = zip(each, first, strict=True)
        ratio = statistics.fmean(value / other["output_throughput_tok_per_s"] for value, other in pairs)
        medians = [
            f"{statistics.median(result[key] for result in results):.2f}"
            for key in ("cpu_s", "median_itl_ms", "p99_itl_ms", "median_ttft_ms")
        ]
        values = " ".join(f"{value:,.0f}" for value in each)
        rows.append([name, f"{statistics.median(each):,.0f}", f"{ratio - 1:+.1%}", values, *medians])
    return rows


def _server(text: str) -> tuple[str, str, list[str]]:
    """Return name, checkout and flags."""
    head, _, flags = text.partition(":")
    name, _, checkout = head.partition("@")
    return name, checkout, flags.split()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online_turns", description=__doc__)
    parser.add_argument("--server", type=_server, action="append", required=True, metavar="NAME[@CHECKOUT]: FLAGS")
    parser.add_argument("--flags", default="", help="of all servers")
    parser.add_argument("--shape", default="qwen3-0.6b", help="folder of benchmarks/shapes, or a path (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8, help="requests per concurrent client (default: 8)")
    parser.add_argument("--turns", type=int, default=3, help="loads of each server (default: 3)")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds at most for the pinning (default: 20)")
    parser.add_argument("--start-s", type=float, default=60.0, help="seconds at most until all are ready (default: 60)")
    parser.add_argument("--port", type=int, default=8440)
    parser.add_argument("--json", default="")
    return parser


if __name__ == "__main__":
    main()
