"""Online load against any OpenAI-compatible server, from several client processes, reported in the field's names.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --concurrency 64 --num-requests 512 --json out.json
TTFT: request sent to first token; TPOT: (last - first token) / (tokens - 1); ITL: between arrivals; E2EL: whole.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from benchmarks.load_client import LoadConfig, LoadResult, RequestTiming, run_load


def main() -> int:
    """Run the load; print a table; return 1 if any request failed."""
    args = _parser().parse_args()
    url = urlsplit(args.url)
    model = args.model or _first_model(args.url, args.api_key)
    config = LoadConfig(
        host=url.hostname or "127.0.0.1",
        port=url.port or 80,
        model=model,
        api_key=args.api_key,
        num_requests=args.num_requests,
        concurrency=args.concurrency,
        rate_per_s=args.rate,
        input_len=args.input_len,
        output_len=args.output_len,
        vocab_size=args.vocab_size,
        seed=args.seed,
    )
    report = measure(config, num_processes=args.processes)
    print(format_report(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["num_failed"] else 0


def measure(config: LoadConfig, *, num_processes: int) -> dict:
    """Spread the load over processes and return the report. Blocks."""
    shares = [config] if num_processes <= 1 else _split(config, num_processes)
    with ProcessPoolExecutor(len(shares), mp_context=get_context("spawn")) as pool:
        list(pool.map(abs, range(len(shares))))  # every process is up before the first request
        results = list(pool.map(run_load, shares))
    return _report(config, results)


def _split(config: LoadConfig, num_processes: int) -> list[LoadConfig]:
    count = min(num_processes, config.concurrency if config.rate_per_s == 0 else num_processes)
    return [
        msgspec.structs.replace(
            config,
            num_requests=config.num_requests // count + (i < config.num_requests % count),
            concurrency=max(config.concurrency // count + (i < config.concurrency % count), 1),
            rate_per_s=config.rate_per_s / count,
            seed=config.seed + i,
        )
        for i in range(count)
    ]


def _report(config: LoadConfig, results: list[LoadResult]) -> dict:
    timings = [timing for result in results for timing in result.timings]
    good = [timing for timing in timings if not timing.error]
    wall_s = max(result.wall_s for result in results)
    if good:  # perf_counter is one clock for all processes of a host
        wall_s = max(t.end_s for t in good) - min(t.start_s for t in good)
    num_tokens = sum(timing.num_tokens for timing in good)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"cpu_count": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "load": msgspec.to_builtins(msgspec.structs.replace(config, api_key="")),
        "num_client_processes": len(results),
        "num_completed": len(good),
        "num_failed": len(timings) - len(good),
        "errors": sorted({timing.error for timing in timings if timing.error})[:5],
        "duration_s": wall_s,
        "request_throughput_per_s": len(good) / wall_s,
        "output_throughput_tok_per_s": num_tokens / wall_s,
        "client_cpu_share_max": max(result.cpu_s / result.wall_s for result in results),
        **_summary("ttft_ms", [1e3 * (t.first_s - t.start_s) for t in good]),
        **_summary("tpot_ms", [1e3 * _tpot_s(t) for t in good if t.num_tokens > 1]),
        **_summary("itl_ms", [1e3 * itl for t in good for itl in t.itl_s]),
        **_summary("e2el_ms", [1e3 * (t.end_s - t.start_s) for t in good]),
    }


def format_report(report: dict) -> str:
    """One short table."""
    lines = [
        f"{report['num_completed']} completed, {report['num_failed']} failed in {report['duration_s']:.2f} s; "
        f"{report['output_throughput_tok_per_s']:,.0f} tok/s, {report['request_throughput_per_s']:.2f} req/s; "
        f"busiest client process {report['client_cpu_share_max']:.0%} of a core",
        *report["errors"],
        f"{'':8}{'mean':>10}{'median':>10}{'p99':>10}",
    ]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        values = [report[f"{statistic}_{name}"] for statistic in ("mean", "median", "p99")]
        lines.append(f"{name:8}" + "".join(f"{value:>10.2f}" for value in values))
    return "\n".join(lines)


def _tpot_s(timing: RequestTiming) -> float:
    return (timing.end_s - timing.first_s) / (timing.num_tokens - 1)


def _summary(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {f"{statistic}_{name}": 0.0 for statistic in ("mean", "median", "p99")}
    ordered = sorted(values)
    return {
        f"mean_{name}": statistics.fmean(ordered),
        f"median_{name}": statistics.median(ordered),
        f"p99_{name}": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)],
    }


def _first_model(url: str, api_key: str) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)["data"][0]["id"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once (closed loop)")
    parser.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals per second instead")
    parser.add_argument("--input-len", type=int, default=512, help="tokens")
    parser.add_argument("--output-len", type=int, default=128, help="tokens")
    parser.add_argument("--vocab-size", type=int, default=10_000, help="prompt token ids are drawn below it")
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="write the report here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
