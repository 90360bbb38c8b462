"""Offline throughput: the workloads of benchmarks/workloads.py through the engine's own loop, without HTTP.

    python -m benchmarks.offline single batch8 mixed256 --shape qwen3-0.6b --json out.json
Random weights of the real shapes (benchmarks/shapes), no prefix cache, no end-of-sequence. A workload runs --runs
times after one warm-up of the same kind, and the best is reported beside all.
"""

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.workloads import workload
from engine.config import EngineConfig
from engine.load import LoadedEngine, load_engine
from engine.offline import OfflineEngine
from engine.protocol import SamplingParams

_SHAPES = Path(__file__).parent / "shapes"


def main() -> int:
    """Run the workloads; print one line each."""
    args = _parser().parse_args()
    started_s = time.perf_counter()
    config = EngineConfig(
        model=args.model or str(_SHAPES / args.shape),
        load_format="auto" if args.model else "dummy",
        device=args.device,
        attention_backend=args.attention_backend,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
        enforce_eager=args.enforce_eager,
        depth=args.depth,
    )
    loaded = load_engine(config, lambda stage: None)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": args.model or args.shape,
        "versions": versions(),
        "facts": loaded.facts,
        "load_s": time.perf_counter() - started_s,
        "args": {name: value for name, value in vars(args).items() if name != "json"},
        "workloads": {},
    }
    print(f"loaded {report['model']} in {report['load_s']:.1f} s")
    for name in args.workloads:
        report["workloads"][name] = result = measure(loaded, name, runs=args.runs)
        print(
            f"{name:10} {result['output_tok_per_s']:>10,.0f} tok/s out {result['input_tok_per_s']:>10,.0f} tok/s in"
            f" {result['ms_per_step']:>8.3f} ms/step, {result['num_steps']} steps,"
            f" {result['num_preemptions']} preempted, {[round(s, 2) for s in result['all_seconds']]} s"
        )
    if torch.cuda.is_available():
        report["peak_memory_gib"] = torch.cuda.max_memory_reserved() / 1024**3
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(loaded: LoadedEngine, name: str, *, runs: int) -> dict:
    """Run one workload `runs` times after a short warm-up; return the best run."""
    requests = workload(name)
    _run(loaded, [(prompt, min(num_tokens, 8)) for prompt, num_tokens in requests])
    results = [_run(loaded, requests) for _ in range(runs)]
    best = min(results, key=lambda result: result["seconds"])
    return best | {"all_seconds": [result["seconds"] for result in results]}


def versions() -> dict[str, str]:
    """The hardware and software a figure belongs to."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.machine()}
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return facts


def _run(loaded: LoadedEngine, requests: list[tuple[list[int], int]]) -> dict:
    offline = OfflineEngine(loaded)
    scheduler = offline.engine.scheduler
    params = [SamplingParams(max_tokens=num_tokens, temperature=0.0) for _, num_tokens in requests]
    started_s = time.perf_counter()
    generations = offline.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - started_s
    num_output = sum(len(generation.token_ids) for generation in generations)
    assert num_output == sum(num_tokens for _, num_tokens in requests), "a request ended early"
    num_steps = scheduler.committed_step_id + 1
    return {
        "seconds": seconds,
        "num_input_tokens": sum(len(prompt) for prompt, _ in requests),
        "num_output_tokens": num_output,
        "input_tok_per_s": sum(len(prompt) for prompt, _ in requests) / seconds,
        "output_tok_per_s": num_output / seconds,
        "ms_per_step": 1e3 * seconds / num_steps,
        "num_steps": num_steps,
        "num_preemptions": scheduler.num_preemptions,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workloads", nargs="+", help="single, batch8, mixed256, mixed64, seed64, prefill")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(path.name for path in _SHAPES.iterdir()))
    parser.add_argument("--model", default="", help="a checkpoint folder instead of a shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--depth", type=int, default=None, choices=(1, 2))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", default="", help="write the report here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
