"""Two GPUs under long prompts and streams: one prefill and one decode engine, one split server, and two servers.

    python -m benchmarks.disaggregation --shape llama-3.1-8b --json out.json        on two GPUs, under four minutes
    python -m benchmarks.disaggregation --ranks 2 --json out.json                   on four, each engine over two
    python -m benchmarks.disaggregation --dry                                       small sizes, on the CPU
Every arrangement gets the same arrivals: short requests with long answers (the streams, whose time between tokens
counts) and long prompts with short answers (whose time to the first token counts), as two Poisson processes. Two
servers get half of each; no router runs, so none is measured. Weights are random, and no prompt repeats another. An
arrangement that does not fit into --max-seconds any more is named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import latency
from benchmarks.client_processes import run_shares, split
from benchmarks.load_client import LoadConfig, LoadResult
from benchmarks.online import SHAPES, metrics_page, model_name, start_server, stop_server, write_model_folder
from benchmarks.report import Report, format_table, host_facts, now

_STREAM_SEED, _LONG_SEED, _WARM_UP_SEED = 0, 10_000_000, 20_000_000
_LEAST_START_S = 30.0
_HAND_OVER = re.compile(r"^quire_(kv_handover_\w+|prefill_fallbacks_total)(\{[^}]*\})? (\S+)$", re.MULTILINE)
_COLUMNS = (
    ("ITL p50 ms", "median_itl_ms"),
    ("ITL p99 ms", "p99_itl_ms"),
    ("ITL max ms", "max_itl_ms"),
    ("stream TTFT p50 ms", "median_ttft_ms"),
    ("stream TTFT p99 ms", "p99_ttft_ms"),
)
_LONG_COLUMNS = (
    ("long TTFT p50 ms", "median_ttft_ms"),
    ("long TTFT p99 ms", "p99_ttft_ms"),
    ("long 2nd token p50 ms", "median_second_ms"),
)


@dataclass(frozen=True)
class Arrangement:
    """A way to use the GPUs: the flags of each server, and its GPUs."""

    name: str
    servers: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]


def arrangements(num_ranks: int) -> tuple[Arrangement, ...]:
    """Return what is compared on 2 * num_ranks GPUs, of which each engine but that of the split server has half."""
    gpus = tuple(range(2 * num_ranks))
    split = ("--tensor-parallel-size", str(num_ranks)) if num_ranks > 1 else ()
    return (
        Arrangement("1p1d", ((("--disaggregate", "1p1d", *split), gpus),)),
        Arrangement("two servers", ((split, gpus[:num_ranks]), (split, gpus[num_ranks:]))),
        Arrangement(f"TP {len(gpus)}", ((("--tensor-parallel-size", str(len(gpus))), gpus),)),
    )


def main() -> int:
    """Measure; return 1 if a request failed or an arrangement was left out."""
    parser = _parser()
    args, server_flags = parser.parse_known_args()
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks} must be at least 1")
    compared = arrangements(args.ranks)
    names = [arrangement.name for arrangement in compared]
    if unknown := [name for name in args.only or () if name not in names]:
        parser.error(f"--only {unknown[0]}: with --ranks {args.ranks} there are {', '.join(names)}")
    if args.dry:
        _make_dry(args)
        server_flags += ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB"]
    chosen = [arrangement for arrangement in compared if args.only is None or arrangement.name in args.only]
    started_s = time.monotonic()
    report: Report = {"benchmark": "disaggregation", "date": now(), "host": host_facts(), "shape": args.shape}
    report |= {
        "ranks": args.ranks,
        "server_flags": server_flags,
        "load": _describe_load(args),
        "runs": {},
        "left_out": [],
    }
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(2 * args.ranks)))).split(",")
    if len(gpus) < 2 * args.ranks:
        parser.error(f"--ranks {args.ranks} needs {2 * args.ranks} GPUs, and CUDA_VISIBLE_DEVICES names {len(gpus)}")
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
        for arrangement in chosen:
            begun_s = time.monotonic()
            if begun_s - started_s + args.seconds + _LEAST_START_S > args.max_seconds:
                report["left_out"].append(arrangement.name)
                print(f"{arrangement.name}: left out, since --max-seconds {args.max_seconds:g} are over", flush=True)
                continue
            run = report["runs"][arrangement.name] = _measure(arrangement, args, folder, gpus, server_flags)
            print(f"{arrangement.name}: ready after {run['start_to_ready_s']:.1f} s, {run['errors']}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(format_table(_table(report)))
    return int(bool(report["left_out"]) or any(run["num_failed"] for run in report["runs"].values()))


def _measure(
    arrangement: Arrangement, args: argparse.Namespace, folder: str, gpus: Sequence[str], server_flags: list[str]
) -> Report:
    ports = [args.port + i for i in range(len(arrangement.servers))]
    with contextlib.ExitStack() as stack:

        def start(i: int) -> float:
            flags, places = arrangement.servers[i]
            of_peers = ["--kv-host-memory", args.host_memory] if "--disaggregate" in flags else []
            visible = ",".join(gpus[place] for place in places) if not args.dry else None
            server, seconds = start_server(folder, ports[i], [*server_flags, *flags, *of_peers], gpus=visible)
            stack.callback(stop_server, server)
            return seconds

        with ThreadPoolExecutor(len(ports)) as pool:
            ready_s = max(pool.map(start, range(len(ports))))
        streams, longs = _loads(args, model_name(ports[0]))
        warm_up = [
            msgspec.structs.replace(load, num_requests=3 * len(ports), seed=load.seed + _WARM_UP_SEED, rate_per_s=20.0)
            for load in (streams, longs)
        ]
        _send(warm_up, ports, args.processes)
        (of_streams, of_longs), wall_s = _send([streams, longs], ports, args.processes)
        run = {"start_to_ready_s": ready_s, "wall_s": wall_s, **_figures(of_streams, of_longs)}
        run["hand_overs"] = dict(_hand_overs(ports[0])) if arrangement.name == "1p1d" else {}
        return run


def _loads(args: argparse.Namespace, model: str) -> tuple[LoadConfig, LoadConfig]:
    """Return the streams and the long prompts, of all servers together."""
    common = LoadConfig(host="127.0.0.1", port=args.port, model=model, concurrency=1, timeout_s=120.0)
    streams = msgspec.structs.replace(
        common,
        rate_per_s=args.stream_rate,
        num_requests=max(round(args.stream_rate * args.seconds), 1),
        input_len=args.stream_input_len,
        output_len=args.stream_output_len,
        seed=_STREAM_SEED,
    )
    longs = msgspec.structs.replace(
        common,
        rate_per_s=args.long_rate,
        num_requests=max(round(args.long_rate * args.seconds), 1),
        input_len=args.long_input_len,
        output_len=args.long_output_len,
        seed=_LONG_SEED,
    )
    return streams, longs


def _send(
    loads: Sequence[LoadConfig], ports: Sequence[int], num_processes: int
) -> tuple[list[list[LoadResult]], float]:
    """Send the loads at the same time, each server its part; return each load's results, and the seconds of all."""
    shares: list[tuple[int, LoadConfig]] = []
    for place, load in enumerate(loads):
        for i, part in enumerate(split(load, len(ports))):
            of_server = msgspec.structs.replace(part, port=ports[i], seed=load.seed + 100_000 * (i + 1))
            shares += [(place, share) for share in split(of_server, num_processes)]
    started_s = time.monotonic()
    results, _ = run_shares([share for _, share in shares])
    wall_s = time.monotonic() - started_s
    grouped: list[list[LoadResult]] = [[] for _ in loads]
    for (place, _), result in zip(shares, results, strict=True):
        grouped[place].append(result)
    return grouped, wall_s


def _figures(of_streams: Sequence[LoadResult], of_longs: Sequence[LoadResult]) -> Report:
    timings = [[timing for result in results for timing in result.timings] for results in (of_streams, of_longs)]
    good = [[timing for timing in of_load if timing.end_s > 0] for of_load in timings]
    errors = sorted({timing.error_kind for of_load in timings for timing in of_load if timing.error_kind})
    duration_s = max(result.wall_s for result in (*of_streams, *of_longs))
    both = [timing for of_load in good for timing in of_load]
    figures: Report = {"num_failed": sum(map(len, timings)) - len(both), "errors": ", ".join(errors) or "no errors"}
    figures["duration_s"] = duration_s
    figures["output_tok_per_s"] = sum(timing.num_tokens for timing in both) / duration_s
    figures["total_tok_per_s"] = sum(timing.num_tokens + timing.num_input_tokens for timing in both) / duration_s
    for name, of_load in zip(("streams", "longs"), good, strict=True):
        samples = latency.samples(of_load)
        samples["second_ms"] = sorted(1e3 * timing.itl_s[0] for timing in of_load if timing.itl_s)
        figures[name] = {"num_completed": len(of_load)}
        for metric, ordered in samples.items():
            figures[name] |= latency.summarise(metric, ordered)
            if ordered:
                figures[name][f"max_{metric}"] = ordered[-1]
    return figures


def _hand_overs(port: int) -> Iterator[tuple[str, float]]:
    """Yield what the server counted of blocks between its engines."""
    for name, labels, value in _HAND_OVER.findall(metrics_page(port)):
        label = ",".join(part for part in labels.strip("{}").split(",") if part and not part.startswith("model_name"))
        yield f"{name}{{{label}}}" if label else name, float(value)


def _table(report: Report) -> list[list[str]]:
    rows = [["", *(title for title, _ in (*_COLUMNS, *_LONG_COLUMNS)), "output tok/s", "all tok/s"]]
    for name, run in report["runs"].items():
        cells = [_cell(run["streams"].get(key)) for _, key in _COLUMNS]
        cells += [_cell(run["longs"].get(key)) for _, key in _LONG_COLUMNS]
        rows.append([name, *cells, _cell(run["output_tok_per_s"]), _cell(run["total_tok_per_s"])])
    return rows


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _describe_load(args: argparse.Namespace) -> Report:
    streams, longs = ["stream_rate", "stream_input_len", "stream_output_len"], ["long_rate", "long_input_len"]
    names = ["seconds", *streams, *longs, "long_output_len", "host_memory"]
    return {name: getattr(args, name) for name in names}


def _make_dry(args: argparse.Namespace) -> None:
    """Shrink the load to what a CPU does in seconds."""
    args.shape, args.seconds, args.processes, args.host_memory = "tiny", 4.0, 1, "16MiB"
    args.stream_rate, args.stream_input_len, args.stream_output_len = 3.0, 16, 24
    args.long_rate, args.long_input_len, args.long_output_len = 1.0, 600, 8


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation", description="Other flags go to every `quire serve` as they are."
    )
    add = parser.add_argument
    add("--shape", default="llama-3.1-8b", choices=sorted(path.name for path in SHAPES.iterdir()))
    add("--ranks", type=int, default=1, help="GPUs of each engine of 1p1d, and of each of the two servers")
    add("--only", action="append", metavar="NAME", help="1p1d, two servers, or the split one: TP 2; repeatable")
    add("--seconds", type=float, default=20.0, help="during which requests arrive")
    add("--stream-rate", type=float, default=10.0, help="streams per second")
    add("--stream-input-len", type=int, default=128)
    add("--stream-output-len", type=int, default=192)
    add("--long-rate", type=float, default=1.5, help="long prompts per second")
    add("--long-input-len", type=int, default=8000)
    add("--long-output-len", type=int, default=32)
    add("--host-memory", default="8GiB", help="of each engine of 1p1d")
    add("--processes", type=int, default=2, help="client processes of each server and load")
    add("--port", type=int, default=8600)
    add("--max-seconds", type=float, default=235.0)
    add("--dry", action="store_true", help="small sizes on the CPU, to try the script")
    add("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
