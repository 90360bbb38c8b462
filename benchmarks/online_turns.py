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
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.load import LoadConfig
from benchmarks.online import (
    SHAPES,
    add_load_flags,
    host_bytes,
    launch_server,
    metrics_page,
    model_name,
    stop_server,
    wait_until_ready,
    write_model_folder,
)
from benchmarks.report import format_table, host_facts, now
from benchmarks.serve import measure

_COUNTERS = ("quire_kv_host_blocks_total", "quire_kv_host_copied_bytes_total", "quire_kv_host_hit_tokens_total")
_CPU_S = re.compile(r"^quire_process_cpu_seconds_total\{.*\} ([\d.e+-]+)$", re.MULTILINE)


def main() -> None:
    """Start all, load them in turns, print and write what was measured."""
    args = _parser().parse_args()
    loads: dict[str, list[dict[str, Any]]] = {}
    servers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
        try:
            for port, (name, checkout, flags) in enumerate(args.server, args.port):
                server = launch_server(folder, port, [*flags, *args.flags.split()], checkout=checkout or None)
                servers[name] = server, port
            for server, port in servers.values():
                wait_until_ready(server, port, timeout_s=args.start_s)
            print(f"ready: {', '.join(servers)}", flush=True)
            _await_pins([port for _, port in servers.values()], most_s=args.settle)
            for turn in range(args.turns + 1):  # the first one warms up
                for name, (_, port) in servers.items():
                    load = _load(args, port, turn=turn)
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


def _load(args: argparse.Namespace, port: int, *, turn: int) -> dict[str, Any]:
    config = LoadConfig(
        host="127.0.0.1",
        port=port,
        model=model_name(port),
        concurrency=args.concurrency,
        num_requests=args.concurrency * (args.rounds if turn else max(args.rounds // 4, 1)),
        input_len=args.input_len,
        output_len=args.output_len,
        seed=1_000_000 * turn + 10_000_000 * (port - args.port),
    )
    before = _counters(port)
    result = measure(config, num_processes=min(args.concurrency, args.processes))
    names = ["output_throughput_tok_per_s", "duration_s", "num_completed", "num_failed", "num_cached_tokens"]
    names += ["median_itl_ms", "p99_itl_ms", "median_ttft_ms", "p99_ttft_ms"]
    counts = {name: value - before.get(name, 0.0) for name, value in _counters(port).items()}
    return {name: result.get(name, 0) for name in names} | counts


def _counters(port: int) -> dict[str, float]:
    """Return the counters of host memory by their names and labels, and the CPU seconds of all processes."""
    page = metrics_page(port)
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith(_COUNTERS)]
    found = {re.sub(r'quire_kv_host_|,?model_name="[^"]*"|_total', "", name): float(value) for name, value in lines}
    return {"cpu_s": sum(map(float, _CPU_S.findall(page)))} | found


def _await_pins(ports: list[int], *, most_s: float) -> None:
    """Wait until host memory no longer grows in any server."""
    end_s, last = time.monotonic() + most_s, [-1] * len(ports)
    while time.monotonic() < end_s:
        sizes = [host_bytes(port)["total"] for port in ports]
        print("host memory (GiB):", *(f"{size / 2**30:.2f}" for size in sizes), flush=True)
        if sizes == last:
            return
        last = sizes
        time.sleep(1.5)


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
    add_load_flags(parser)
    parser.add_argument("--turns", type=int, default=3, help="loads of each server (default: 3)")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds at most for the pinning (default: 20)")
    parser.add_argument("--start-s", type=float, default=60.0, help="seconds at most until all are ready (default: 60)")
    parser.add_argument("--port", type=int, default=8440)
    parser.add_argument("--json", default="")
    return parser


if __name__ == "__main__":
    main()
