"""Two GPUs under long prompts and streams: one prefill and one decode engine, one split server, and two servers.

    python -m benchmarks.disaggregation --shape llama-3.1-8b --json out.json        on two GPUs, under five minutes
    python -m benchmarks.disaggregation --ranks 2 --json out.json                   on four, each engine over two
    python -m benchmarks.disaggregation --dry                                       small sizes, on the CPU
Every arrangement gets the same requests at the same times: short prompts with long answers (the streams, whose time
between tokens counts) and long prompts with short answers (whose time to the first token counts), as Poisson processes.
Of two servers each gets half of both; no router runs, so none is measured. Weights are random, and no prompt repeats
another. Each arrangement has two loads: `steady`, at the rates of the flags, and `full`, which comes --full times as
fast and is more than it can take, so that its tokens per second are its throughput. Goodput: requests per second that
met their limits. Arrangements are started one after the other, each when the one before has ended; one that does not
start, or does not fit into --max-seconds any more, is named, and the others are measured.
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
from typing import IO

import msgspec

from benchmarks import latency
from benchmarks.client_processes import run_shares, split
from benchmarks.gpu_memory import gpu_names
from benchmarks.load_client import LoadConfig, LoadResult
from benchmarks.online import SHAPES, metrics_page, model_name, start_server, stop_server, write_model_folder
from benchmarks.report import BenchError, Report, format_table, host_facts, now

_LOADS = ("steady", "full")
_STREAM_SEED, _LONG_SEED = 0, 10_000_000
_WARM_UP_SEED, _FULL_SEED = 20_000_000, 40_000_000  # added
_LEAST_START_S = 20.0
_REQUEST_S = 60.0  # at most, of one request
_OTHER_S = 10.0  # of an arrangement: warm-up, client processes, its end
_LOG_LINES = 40
_HAND_OVER = re.compile(r"^quire_(kv_handover_\w+|prefill_fallbacks_total)(\{[^}]*\})? (\S+)$", re.MULTILINE)
_COLUMNS = (  # title, load, figure
    ("ITL p50 ms", "streams", "median_itl_ms"),
    ("ITL p99 ms", "streams", "p99_itl_ms"),
    ("ITL max ms", "streams", "max_itl_ms"),
    ("stream TTFT p50 ms", "streams", "median_ttft_ms"),
    ("stream TTFT p99 ms", "streams", "p99_ttft_ms"),
    ("long TTFT p50 ms", "longs", "median_ttft_ms"),
    ("long TTFT p99 ms", "longs", "p99_ttft_ms"),
    ("long 2nd token p50 ms", "longs", "median_second_ms"),
    ("good streams/s", "streams", "good_per_s"),
    ("good longs/s", "longs", "good_per_s"),
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
        Arrangement(f"TP {len(gpus)}", ((("--tensor-parallel-size", str(len(gpus))), gpus),)),
        Arrangement("two servers", ((split, gpus[:num_ranks]), (split, gpus[num_ranks:]))),
    )


def main() -> int:
    """Measure; return 1 if a request failed, or an arrangement did not start or was left out."""
    args, server_flags = _read_arguments()
    chosen = [each for each in arrangements(args.ranks) if args.only is None or each.name in args.only]
    end_s = time.monotonic() + args.max_seconds
    report: Report = {"benchmark": "disaggregation", "date": now(), "host": host_facts(), "shape": args.shape}
    report["gpus"] = gpu_names()
    report |= {"ranks": args.ranks, "server_flags": server_flags, "load": _describe_load(args)}
    report |= {"runs": {}, "failed": {}, "left_out": []}
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
        for arrangement in chosen:
            start_s = min(args.start_seconds, end_s - time.monotonic() - _least_load_s(args))
            if start_s < min(_LEAST_START_S, args.start_seconds):
                report["left_out"].append(arrangement.name)
                print(f"{arrangement.name}: left out, since --max-seconds {args.max_seconds:g} are over", flush=True)
                continue
            try:
                for run in _measure(arrangement, args, folder, server_flags, start_s):
                    report["runs"][arrangement.name] = run
                    _save(args.json, report)
            except (BenchError, OSError) as error:
                report["failed"][arrangement.name] = str(error)
                print(f"{arrangement.name}: {error}", flush=True)
    _save(args.json, report)
    for load in ("steady", "full"):
        print(f"\n{load}\n{format_table(_table(report, load))}", flush=True)
    num_failed = sum(run[load]["num_failed"] for run in report["runs"].values() for load in run if load in _LOADS)
    return int(bool(report["left_out"] or report["failed"] or num_failed))


def _read_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of the benchmark and those of the servers."""
    parser = _parser()
    args, server_flags = parser.parse_known_args()
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks} must be at least 1")
    if args.processes < 2 or args.processes % 2:
        parser.error(f"--processes {args.processes} must be even, so that two servers get half each")
    names = [arrangement.name for arrangement in arrangements(args.ranks)]
    if unknown := [name for name in args.only or () if name not in names]:
        parser.error(f"--only {unknown[0]}: with --ranks {args.ranks} there are {', '.join(names)}")
    args.gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(2 * args.ranks)))).split(",")
    if len(args.gpus) < 2 * args.ranks:
        parser.error(
            f"--ranks {args.ranks} needs {2 * args.ranks} GPUs, and CUDA_VISIBLE_DEVICES names {len(args.gpus)}"
        )
    if args.dry:
        _make_dry(args)
        server_flags += ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB"]
    return args, server_flags


def _save(path: Path | None, report: Report) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _least_load_s(args: argparse.Namespace) -> float:
    """Return the seconds that the loads of one arrangement take at least."""
    return args.settle + args.seconds + 3 * args.full_seconds + _OTHER_S


def _measure(
    arrangement: Arrangement, args: argparse.Namespace, folder: str, server_flags: list[str], start_s: float
) -> Iterator[Report]:
    """Start an arrangement within start_s, load it and stop it; yield the run after each load.

    Raises BenchError if a server does not start; the end of its log is printed.
    """
    ports = [args.port + i for i in range(len(arrangement.servers))]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in ports]
        stack.callback(_print_ends, arrangement.name, logs)

        def start(i: int) -> float:
            flags, places = arrangement.servers[i]
            of_peers = ["--kv-host-memory", args.host_memory] if "--disaggregate" in flags else []
            visible = None if args.dry else ",".join(args.gpus[place] for place in places)
            flags = (*server_flags, *flags, *of_peers)
            server, seconds = start_server(folder, ports[i], [*flags], gpus=visible, log=logs[i], timeout_s=start_s)
            stack.callback(stop_server, server)
            return seconds

        with ThreadPoolExecutor(len(ports)) as pool:
            run: Report = {"start_to_ready_s": max(pool.map(start, range(len(ports))))}
        print(f"{arrangement.name}: ready after {run['start_to_ready_s']:.1f} s", flush=True)
        time.sleep(args.settle)
        loads = _loads(args, model_name(ports[0]))
        _send(loads["warm-up"], ports, args.processes)
        for name in _LOADS:
            results, wall_s = _send(loads[name], ports, args.processes)
            run[name] = {"wall_s": wall_s, **_figures(args, *results)}
            if arrangement.name == "1p1d":
                run[name]["hand_overs"] = dict(_hand_overs(ports[0]))  # since the start
            print(f"{arrangement.name}: {name}, {wall_s:.1f} s, {run[name]['errors']}", flush=True)
            yield run


def _print_ends(name: str, logs: Sequence[IO[bytes]]) -> None:
    """Print the last lines of the servers' logs, which have warnings and errors alone."""
    for i, log in enumerate(logs):
        log.seek(0)
        for line in log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]:
            print(f"{name}, server {i}: {line}", flush=True)


def _loads(args: argparse.Namespace, model: str) -> dict[str, tuple[LoadConfig, LoadConfig]]:
    """Return the streams and the long prompts of each load, those of all servers together."""
    common = LoadConfig(host="127.0.0.1", port=args.port, model=model, concurrency=1, timeout_s=_REQUEST_S)
    kinds = (
        (_STREAM_SEED, args.stream_rate, args.stream_input_len, args.stream_output_len),
        (_LONG_SEED, args.long_rate, args.long_input_len, args.long_output_len),
    )

    def of(rate_factor: float, seconds: float, seed: int) -> tuple[LoadConfig, LoadConfig]:
        streams, longs = (
            msgspec.structs.replace(
                common,
                rate_per_s=rate * rate_factor,
                num_requests=max(round(rate * rate_factor * seconds), 2),
                input_len=input_len,
                output_len=output_len,
                seed=own_seed + seed,
            )
            for own_seed, rate, input_len, output_len in kinds
        )
        return streams, longs

    streams, longs = of(1.0, 1.0, _WARM_UP_SEED)
    warm_up = tuple(msgspec.structs.replace(load, num_requests=8, rate_per_s=20.0) for load in (streams, longs))
    return {
        "warm-up": (warm_up[0], warm_up[1]),
        "steady": of(1.0, args.seconds, 0),
        "full": of(args.full, args.full_seconds, _FULL_SEED),
    }


def _send(
    loads: Sequence[LoadConfig], ports: Sequence[int], num_processes: int
) -> tuple[list[list[LoadResult]], float]:
    """Send the loads at the same time; return each load's results, and the seconds of all.

    The client processes, their prompts and their times are the same for any number of servers, which have equally
    many of them.
    """
    shares = [
        (place, msgspec.structs.replace(share, port=ports[i % len(ports)]))
        for place, load in enumerate(loads)
        for i, share in enumerate(split(load, num_processes))
    ]
    started_s = time.monotonic()
    results, _ = run_shares([share for _, share in shares])
    wall_s = time.monotonic() - started_s
    grouped: list[list[LoadResult]] = [[] for _ in loads]
    for (place, _), result in zip(shares, results, strict=True):
        grouped[place].append(result)
    return grouped, wall_s


def _figures(args: argparse.Namespace, of_streams: Sequence[LoadResult], of_longs: Sequence[LoadResult]) -> Report:
    timings = [[timing for result in results for timing in result.timings] for results in (of_streams, of_longs)]
    done = [[timing for timing in of_load if timing.end_s > 0] for of_load in timings]
    errors = sorted({timing.error_kind for of_load in timings for timing in of_load if timing.error_kind})
    duration_s = max(result.wall_s for result in (*of_streams, *of_longs))
    both = [timing for of_load in done for timing in of_load]
    figures: Report = {"num_failed": sum(map(len, timings)) - len(both), "errors": ", ".join(errors) or "no errors"}
    figures["duration_s"] = duration_s
    figures["output_tok_per_s"] = sum(timing.num_tokens for timing in both) / duration_s
    figures["total_tok_per_s"] = sum(timing.num_tokens + timing.num_input_tokens for timing in both) / duration_s
    limits = (args.stream_goodput, args.long_goodput)
    for name, of_load, limit in zip(("streams", "longs"), done, limits, strict=True):
        good = latency.num_good(of_load, latency.parse_goodput(limit))
        samples = latency.samples(of_load)
        samples["second_ms"] = sorted(1e3 * timing.itl_s[0] for timing in of_load if timing.itl_s)
        samples["longest_itl_ms"] = sorted(1e3 * max(timing.itl_s) for timing in of_load if timing.itl_s)
        figures[name] = {"num_completed": len(of_load), "num_good": good, "good_per_s": good / duration_s}
        for metric, ordered in samples.items():
            figures[name] |= latency.summarise(metric, ordered)
            if ordered:
                figures[name][f"p90_{metric}"] = latency.percentile(ordered, 90)
                figures[name][f"max_{metric}"] = ordered[-1]
    return figures


def _hand_overs(port: int) -> Iterator[tuple[str, float]]:
    """Yield what the server counted of blocks between its engines."""
    for name, labels, value in _HAND_OVER.findall(metrics_page(port)):
        label = ",".join(part for part in labels.strip("{}").split(",") if part and not part.startswith("model_name"))
        yield f"{name}{{{label}}}" if label else name, float(value)


def _table(report: Report, load: str) -> list[list[str]]:
    rows = [["", *(title for title, _, _ in _COLUMNS), "output tok/s", "all tok/s"]]
    for name, run in report["runs"].items():
        if load in run:
            cells = [_cell(run[load][of_load].get(figure)) for _, of_load, figure in _COLUMNS]
            rows.append([name, *cells, _cell(run[load]["output_tok_per_s"]), _cell(run[load]["total_tok_per_s"])])
    return rows


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _describe_load(args: argparse.Namespace) -> Report:
    streams, longs = ["stream_rate", "stream_input_len", "stream_output_len"], ["long_rate", "long_input_len"]
    names = ["seconds", *streams, *longs, "long_output_len", "full", "full_seconds", "stream_goodput", "long_goodput"]
    return {name: getattr(args, name) for name in [*names, "settle", "processes", "host_memory"]}


def _make_dry(args: argparse.Namespace) -> None:
    """Shrink the load to what a CPU does in seconds."""
    args.shape, args.seconds, args.processes, args.host_memory = "tiny", 4.0, 2, "16MiB"
    args.full, args.full_seconds, args.settle = 4.0, 2.0, 0.0
    args.stream_rate, args.stream_input_len, args.stream_output_len = 3.0, 16, 24
    args.long_rate, args.long_input_len, args.long_output_len = 1.0, 600, 8


def _goodput(text: str) -> str:
    try:
        latency.parse_goodput(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation", description="Other flags go to every `quire serve` as they are."
    )
    add = parser.add_argument
    add("--shape", default="llama-3.1-8b", choices=sorted(path.name for path in SHAPES.iterdir()))
    add("--ranks", type=int, default=1, help="GPUs of each engine of 1p1d, and of each of the two servers")
    add("--only", action="append", metavar="NAME", help="1p1d, the split one: TP 2, or two servers; repeatable")
    add("--seconds", type=float, default=20.0, help="during which requests arrive")
    add("--stream-rate", type=float, default=10.0, help="streams per second")
    add("--stream-input-len", type=int, default=128)
    add("--stream-output-len", type=int, default=192)
    add("--long-rate", type=float, default=1.5, help="long prompts per second")
    add("--long-input-len", type=int, default=8000)
    add("--long-output-len", type=int, default=32)
    add("--full", type=float, default=8.0, metavar="FACTOR", help="of the rates under the full load")
    add("--full-seconds", type=float, default=6.0, help="during which the full load arrives")
    add("--stream-goodput", type=_goodput, default="ttft:500,tpot:30", help="limits of a good stream, in ms")
    add("--long-goodput", type=_goodput, default="ttft:2000,tpot:30", help="limits of a good long prompt, in ms")
    add("--settle", type=float, default=4.0, help="seconds between ready and the first request: memory is pinned")
    add("--host-memory", default="16GiB", help="of each engine of 1p1d")
    add("--processes", type=int, default=4, help="client processes of each kind of request: an even number")
    add("--port", type=int, default=8600)
    add("--start-seconds", type=float, default=75.0, help="in which an arrangement must be ready")
    add("--max-seconds", type=float, default=280.0, help="of the whole run, from its begin")
    add("--dry", action="store_true", help="small sizes on the CPU, to try the script")
    add("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
