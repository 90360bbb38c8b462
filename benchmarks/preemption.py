"""Preempted requests swapped to host memory or computed anew: python -m benchmarks.preemption [--shape NAME].

[--pool 6GiB] [--host-memory 16GiB] [--workload mixed256] [--runs 2] [--device cpu] [--json FILE]

The engine's loop without HTTP, random weights, a KV pool too small for the workload, so that requests are preempted.
The same requests without host memory behind the pool, and with it. No prompt repeats another, so the prefix cache,
which is on, finds the blocks of preempted requests alone.
"""

import argparse
import contextlib
import sys
import time

import msgspec

from benchmarks.offline import Requests, versions
from benchmarks.online import SHAPES
from benchmarks.report import BenchError, Report, check_outputs, format_table, host_facts, now, write_report
from benchmarks.workloads import AGENT, NAMES, workload
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.load import load_engine
from engine.startup.loaded_engine import LoadedEngine
from server.config.value_types import integer, size

_WARM_UP_TOKENS = 8
_MAX_MODEL_LEN = 2048  # of the prompts and answers of these workloads


def measure(config: EngineConfig, name: str, *, runs: int) -> Report:
    """Run a workload after a short warm-up; return the best of the runs. Raises BenchError if a request fails."""
    with contextlib.closing(load_engine(config, lambda stage: None)) as loaded:
        vocab_size = loaded.model_config.vocab_size
        requests = [([token % vocab_size for token in prompt], count) for prompt, count in workload(name)]
        _run(loaded, [(prompt, min(count, _WARM_UP_TOKENS)) for prompt, count in requests])
        results = [_run(loaded, requests) for _ in range(runs)]
        facts = loaded.facts
    best = min(results, key=lambda result: float(result["seconds"]))
    return best | {"all_seconds": [result["seconds"] for result in results], "facts": facts}


def _run(loaded: LoadedEngine, requests: Requests) -> Report:
    offline = OfflineEngine(loaded)  # with an empty prefix cache
    params = [SamplingParams(max_tokens=count, min_tokens=count, temperature=0.0) for _, count in requests]
    started_s = time.perf_counter()
    generations = offline.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - started_s
    failed = [generation.error.message for generation in generations if generation.error is not None]
    if failed:
        raise BenchError(f"{len(failed)} of {len(requests)} requests failed: {failed[0]}")
    num_tokens = sum(len(generation.token_ids) for generation in generations)
    scheduler = offline.engine.scheduler
    return {
        "seconds": seconds,
        "output_tok_per_s": num_tokens / seconds,
        "num_preemptions": scheduler.num_preemptions,
        "num_resumed": dict(scheduler.kv.tiers.num_resumed),
        "num_resumed_tokens": dict(scheduler.kv.tiers.num_resumed_tokens),
    }


def main() -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args()
    try:
        check_outputs(json_path=args.json, plot_path=None, html_path=None)
        rows = _measure_both(args)
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(_format(rows))
    if args.json:
        report: Report = {"benchmark": "preemption", "date": now(), "host": host_facts(), "versions": versions()}
        sizes = {"pool_bytes": args.pool, "host_memory_bytes": args.host_memory, "workload": args.workload}
        write_report(args.json, report | {"model": args.shape} | sizes | {"rows": rows})
    return 0


def _measure_both(args: argparse.Namespace) -> dict[str, Report]:
    """Return the results without host memory and with it, by what the table says of them."""
    config = EngineConfig(
        model=str(SHAPES / args.shape),
        load_format="dummy",
        device=args.device,
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_memory_bytes=args.pool,
        enable_prefix_caching=True,
        is_offline=True,
        overlap_depth=1 if args.device == "cpu" else 2,
    )
    swapping = msgspec.structs.replace(config, kv_host_memory_bytes=args.host_memory)
    return {
        "computed": measure(config, args.workload, runs=args.runs),
        "swapped or computed": measure(swapping, args.workload, runs=args.runs),
    }


def _format(rows: dict[str, Report]) -> str:
    table = [["preempted requests are", "s", "tok/s out", "preempted", "swapped", "computed", "their tokens from"]]
    for name, row in rows.items():
        ways, tokens = row["num_resumed"], row["num_resumed_tokens"]
        counts = [str(row["num_preemptions"]), *(str(ways.get(way, 0)) for way in ("swapped", "computed"))]
        sources = ", ".join(f"{source} {count:,}" for source, count in tokens.items())
        table.append([name, f"{row['seconds']:.2f}", f"{row['output_tok_per_s']:,.0f}", *counts, sources])
    return format_table(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemption", description=__doc__)
    shapes = sorted(path.name for path in SHAPES.iterdir())
    parser.add_argument("--shape", default="llama-3.1-8b", choices=shapes, help="sizes of the model (llama-3.1-8b)")
    names = [name for name in NAMES if name != AGENT]
    parser.add_argument("--workload", default="mixed256", choices=names, help="of quire bench offline (mixed256)")
    parser.add_argument("--pool", type=size, default=6 << 30, help="of the KV cache (6GiB)")
    parser.add_argument("--host-memory", type=size, default=16 << 30, help="behind it (16GiB)")
    parser.add_argument("--runs", type=integer(1, 100), default=2, help="the best counts (2)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", help="file for the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
