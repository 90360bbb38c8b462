"""Where the time of one step goes: a table per kernel of a decode step, and of a full prompt step.

    python -m benchmarks.profile_step --shape qwen3-0.6b --batch 1 64 256 --context 512 --json out.json
Runs the engine's own loop, profiles some steady steps with torch's profiler (CUPTI), and prints per kernel name: calls,
µs per step, share. wall: time between commits; gpu: sum of kernel times; what is between is idle device.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.offline import versions
from engine.config import EngineConfig
from engine.engine import Engine
from engine.load import LoadedEngine, load_engine
from engine.offline import OfflineEngine
from engine.protocol import AddRequest, SamplingParams

_SHAPES = Path(__file__).parent / "shapes"
_STEPS = 20


def main() -> int:
    """Profile each batch size, then a prompt step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_step")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt-len", type=int, default=4096, help="of the prompt step; 0: none")
    parser.add_argument("--rows", type=int, default=14, help="kernels shown")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    config = EngineConfig(
        model=str(_SHAPES / args.shape), load_format="dummy", max_model_len=8192, enable_prefix_caching=False
    )
    loaded = load_engine(config, lambda stage: None)
    report: dict = {"shape": args.shape, "context": args.context, "versions": versions(), "steps": {}}
    for batch in args.batch:
        report["steps"][f"decode B{batch}"] = _decode(loaded, batch, args.context)
    if args.prompt_len:
        report["steps"][f"prompt {args.prompt_len}"] = _prompt(loaded, args.prompt_len)
    for name, step in report["steps"].items():
        _print(name, step, args.rows)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _decode(loaded: LoadedEngine, batch: int, context: int) -> dict:
    offline = OfflineEngine(loaded)
    engine, transport = offline.engine, offline.transport
    params = SamplingParams(max_tokens=10_000, temperature=0.0)
    for i in range(batch):
        prompt = [(i * 31 + j) % 9000 for j in range(context)]
        transport.inbox.append((0, AddRequest(str(i), prompt, params, 0.0)))
    while len(engine.scheduler.running) < batch or any(not r.is_decoding for r in engine.scheduler.running):
        engine.run_once()
    for _ in range(10):
        engine.run_once()
    result = _profile(engine)
    engine.abort_all()
    while not engine.is_idle:
        engine.run_once()
    return result


def _prompt(loaded: LoadedEngine, prompt_len: int) -> dict:
    offline = OfflineEngine(loaded)
    engine, transport = offline.engine, offline.transport
    per_step = max(loaded.scheduler_config.max_num_batched_tokens // prompt_len, 1)
    for i in range(per_step * (_STEPS * 2 + 8)):
        prompt = [(i * 31 + j) % 9000 for j in range(prompt_len)]
        transport.inbox.append((0, AddRequest(str(i), prompt, SamplingParams(max_tokens=1, temperature=0.0), 0.0)))
    for _ in range(4):
        engine.run_once()
    result = _profile(engine)
    while not engine.is_idle:
        engine.run_once()
    return result


def _profile(engine: Engine) -> dict:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(_STEPS):
        engine.run_once()
    wall_ms = 1e3 * (time.perf_counter() - started_s) / _STEPS
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            engine.run_once()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name][0] += 1
            totals[event.name][1] += event.device_time
    kernels = [
        {"name": name, "calls_per_step": calls / _STEPS, "us_per_step": us / _STEPS}
        for name, (calls, us) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]
    return {"wall_ms": wall_ms, "gpu_ms": sum(k["us_per_step"] for k in kernels) / 1e3, "kernels": kernels}


def _print(name: str, step: dict, rows: int) -> None:
    print(f"{name}: wall {step['wall_ms']:.3f} ms, gpu {step['gpu_ms']:.3f} ms")
    for kernel in step["kernels"][:rows]:
        print(f"  {kernel['us_per_step']:>9.1f} µs {kernel['calls_per_step']:>6.1f} × {kernel['name'][:80]}")


if __name__ == "__main__":
    sys.exit(main())
