"""Profiles steps: a table of time per kernel for a decode step, a full prompt step, and mixed steps.

    python -m benchmarks.profile_step --shape qwen3-0.6b --batch 1 64 256 --context 512 --json out.json
Runs the engine's own loop, profiles some steady steps with torch's profiler (CUPTI), and prints per kernel name: calls,
µs per step, share. wall: time between commits; gpu: sum of kernel times; the difference is idle device time.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.offline import versions
from engine.core.engine import Engine
from engine.interface.config import EngineConfig
from engine.interface.protocol import AddRequest, ClientGone, SamplingParams, pack_token_ids
from engine.offline import OfflineEngine
from engine.startup.load import load_engine
from engine.startup.loaded_engine import LoadedEngine

_SHAPES = Path(__file__).parent / "shapes"
_STEPS = 20
_MIXED_PROMPT_LEN = 512


def main() -> int:
    """Profile each batch size, then a prompt step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_step")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt-len", type=int, default=4096, help="of the prompt step; 0: none")
    parser.add_argument("--mixed", type=int, nargs="*", default=[], help="tokens of steps with 512-token prompts too")
    parser.add_argument("--mixed-rows", type=int, default=240, help="requests that decode in them")
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
    for num_tokens in args.mixed:
        name = f"mixed {num_tokens} tokens, {args.mixed_rows} decoding"
        report["steps"][name] = _mixed(loaded, num_tokens, args.mixed_rows, args.context)
    for name, step in report["steps"].items():
        _print(name, step, args.rows)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _decode(loaded: LoadedEngine, batch: int, context: int) -> dict:
    offline = _decoding(loaded, batch, context)
    return _finish(offline, _profile(offline.engine))


def _mixed(loaded: LoadedEngine, num_tokens: int, batch: int, context: int) -> dict:
    """Steps of num_tokens: `batch` decoding requests and, for the rest, prompts of 512 tokens that end at once."""
    scheduler_config = msgspec.structs.replace(
        loaded.scheduler_config, min_decode_step_tokens=num_tokens, max_decode_step_tokens=num_tokens
    )
    offline = _decoding(replace(loaded, scheduler_config=scheduler_config), batch, context)
    for i in range(num_tokens * (_STEPS * 2 + 8) // _MIXED_PROMPT_LEN):
        prompt = [(i * 37 + j) % 9000 for j in range(_MIXED_PROMPT_LEN)]
        request = AddRequest(f"p{i}", pack_token_ids(prompt), SamplingParams(max_tokens=1, temperature=0.0), 0.0)
        offline.transport.inbox.append((0, request))
    for _ in range(4):
        offline.engine.run_once()
    return _finish(offline, _profile(offline.engine))


def _decoding(loaded: LoadedEngine, batch: int, context: int) -> OfflineEngine:
    """Return an engine in which `batch` requests have decoded for some steps."""
    offline = OfflineEngine(loaded)
    engine, params = offline.engine, SamplingParams(max_tokens=10_000, temperature=0.0)
    for i in range(batch):
        prompt = [(i * 31 + j) % 9000 for j in range(context)]
        offline.transport.inbox.append((0, AddRequest(str(i), pack_token_ids(prompt), params, 0.0)))
    while len(engine.scheduler.running) < batch or any(not r.is_decoding for r in engine.scheduler.running):
        engine.run_once()
        if len(engine.scheduler.running) == loaded.scheduler_config.max_num_seqs < batch:
            raise SystemExit(f"--batch: {batch} requests do not fit, {loaded.scheduler_config.max_num_seqs} do")
    for _ in range(10):
        engine.run_once()
    return offline


def _finish(offline: OfflineEngine, result: dict) -> dict:
    """Let the client leave, which ends all requests; return `result`."""
    offline.transport.inbox.append((0, ClientGone()))
    while not offline.engine.is_idle:
        offline.engine.run_once()
    return result


def _prompt(loaded: LoadedEngine, prompt_len: int) -> dict:
    offline = OfflineEngine(loaded)
    engine, transport = offline.engine, offline.transport
    per_step = max(loaded.scheduler_config.max_num_batched_tokens // prompt_len, 1)
    for i in range(per_step * (_STEPS * 2 + 8)):
        prompt = [(i * 31 + j) % 9000 for j in range(prompt_len)]
        transport.inbox.append(
            (0, AddRequest(str(i), pack_token_ids(prompt), SamplingParams(max_tokens=1, temperature=0.0), 0.0))
        )
    for _ in range(4):
        engine.run_once()
    if engine.is_idle:
        raise SystemExit(f"--prompt-len: {prompt_len} tokens do not fit a request")
    return _finish(offline, _profile(engine))


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
    kernels: list[dict[str, Any]] = [
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
