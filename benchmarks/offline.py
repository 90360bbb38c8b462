"""`quire bench offline`: the workloads of benchmarks/workloads.py through the engine's own loop, without HTTP.

The prefix cache and end-of-sequence are off, but the workloads `shared` and `agent` have the cache. Each workload runs
after one warm-up of the same kind; the report has its best run and the times of all runs.
"""

import argparse
import contextlib
import gc
import math
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.agents import LONGEST, agents, run_agents
from benchmarks.report import (
    BenchError,
    Report,
    check_outputs,
    command_line,
    format_table,
    host_facts,
    now,
    write_report,
)
from benchmarks.report_cli import read_old, show
from benchmarks.workloads import AGENT, NAMES, WITH_PREFIX_CACHE, workload
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.load import LoadedEngine, load_engine
from models.config.model_config import ModelConfig
from models.errors import ModelError
from server.config.model_source import resolve_model
from server.config.serve_flags import is_expert_parallel, num_steps_in_flight, speculative_of

_SHAPES = Path(__file__).parent / "shapes"
_DEFAULT_SHAPE = "qwen3-0.6b"
_DEFAULT_MODEL_LEN = 8192
_WARM_UP_TOKENS = 8
_NOT_SAVED = ("json", "html", "plot", "run")  # flags that change no figure

Requests = list[tuple[list[int], int]]


def run(arguments: argparse.Namespace) -> int:
    """Run `quire bench offline` and return its exit code. Raises BenchError, StartupError."""
    check_outputs(json_path=arguments.json, plot_path=arguments.plot, html_path=arguments.html)
    old = read_old(arguments.compare, "offline") if arguments.compare else None
    workloads = {name: _requests(name) for name in arguments.workloads if name != AGENT}
    longest = max((len(prompt) + n for requests in workloads.values() for prompt, n in requests), default=0)
    name, config = engine_config(arguments, longest=longest)
    config = msgspec.structs.replace(
        config,
        is_offline=True,
        enable_prefix_caching=_needs_prefix_cache(arguments.workloads),
        groups_rows=not arguments.no_row_groups,
    )
    started_s = time.perf_counter()
    with contextlib.closing(load_engine(config, lambda stage: None)) as loaded:
        report: Report = {
            "benchmark": "offline",
            "date": now(),
            "command": command_line(sys.argv[1:]),
            "host": host_facts(),
            "model": name,
            "versions": versions(),
            "facts": loaded.facts,
            "load_s": time.perf_counter() - started_s,
            "args": {flag: value for flag, value in vars(arguments).items() if flag not in _NOT_SAVED}
            | {"max_model_len": loaded.scheduler_config.max_model_len},
            "workloads": {},
            "peak_vram_gib": None,
        }
        weights = "random weights" if config.load_format == "dummy" else "its own weights"
        print(f"{name} with {weights}, loaded in {report['load_s']:.1f} s on {loaded.facts['Device']}")
        print(f"attention: {loaded.facts['Attention']}; KV cache: {loaded.facts['KV cache']}")
        if "Decode" in loaded.facts:
            print(f"decode: {loaded.facts['Decode']}")
        fitted = {workload_name: _fit(loaded, workload_name, requests) for workload_name, requests in workloads.items()}
        for workload_name, requests in fitted.items():
            print(f"{workload_name} …", file=sys.stderr, flush=True)
            report["workloads"][workload_name] = measure(loaded, requests, runs=arguments.runs)
            if arguments.json:  # a time limit may end this process before the next one is measured
                write_report(arguments.json, report)
        if AGENT in arguments.workloads:
            print("agent …", file=sys.stderr, flush=True)
            report["workloads"][AGENT] = measure_agents(loaded, runs=arguments.runs)
        is_cuda = loaded.runner.device.type == "cuda"
        report["peak_vram_gib"] = torch.cuda.max_memory_reserved() / 1024**3 if is_cuda else None
    print(format_report(report))
    if arguments.json:
        write_report(arguments.json, report)
    show(report, old, arguments)
    return 0


def measure(loaded: LoadedEngine, requests: Requests, *, runs: int) -> Report:
    """Run one workload `runs` times after a short warm-up; return the best run. Raises BenchError.

    The warm-up has all requests with short answers; if their answers are as short as that, a quarter of them.
    """
    short = [(prompt, min(num_tokens, _WARM_UP_TOKENS)) for prompt, num_tokens in requests]
    _run(loaded, short if short != requests else short[: math.ceil(len(short) / 4)])
    results = [_run(loaded, requests) for _ in range(runs)]
    best = min(results, key=lambda result: result["seconds"])
    return best | {"all_seconds": [result["seconds"] for result in results]}


def measure_agents(loaded: LoadedEngine, *, runs: int) -> Report:
    """Run the workload `agent` `runs` times, with other tokens each time; return the best run. Raises BenchError.

    The first run is also the warm-up.
    """
    limit = loaded.scheduler_config.max_model_len
    if limit < LONGEST:
        raise _too_long(AGENT, LONGEST, loaded)
    results = []
    for seed in range(runs):
        offline = OfflineEngine(loaded)
        started_s = time.perf_counter()
        try:
            totals = run_agents(offline, agents(seed, loaded.model_config.vocab_size))
        except RuntimeError as error:
            raise BenchError(f"Workload agent: {error}") from error
        counts = (totals.num_requests, totals.num_input_tokens, totals.num_output_tokens)
        result = _result(offline, time.perf_counter() - started_s, *counts)
        results.append(result | {"num_cached_tokens": totals.num_cached_tokens})
    best = min(results, key=lambda result: result["seconds"])
    return best | {"all_seconds": [result["seconds"] for result in results]}


def format_report(report: Report) -> str:
    """Return a row per workload, and the peak of memory."""
    rows = [["workload", "tok/s out", "tok/s in", "ms/step", "best, s", "requests", "tokens in", "out", "preempted"]]
    drafted: list[str] = []
    for name, result in report["workloads"].items():
        counts = (result["num_requests"], result["num_input_tokens"], result["num_output_tokens"])
        rates = [f"{rate:,.0f}" for rate in (result["output_tok_per_s"], result["input_tok_per_s"])]
        times = [f"{result['ms_per_step']:.3f}", f"{result['seconds']:.2f}"]
        numbers = [f"{count:,}" for count in counts]
        rows.append([name, *rates, *times, *numbers, str(result["num_preemptions"])])
        if result["num_draft_tokens"]:
            drafted.append(
                f"{name}: {result['num_accepted_tokens']:,} of {result['num_draft_tokens']:,} drafts accepted"
            )
    peak = report["peak_vram_gib"]
    lines = [format_table(rows), *drafted]
    for name, result in report["workloads"].items():
        if "num_cached_tokens" in result:
            share = result["num_cached_tokens"] / result["num_input_tokens"]
            lines.append(f"{name}: {share:.1%} of the prompts' tokens came from the prefix cache")
    if not drafted and any(result["num_requests"] == 1 for result in report["workloads"].values()):
        lines.append("With one request, ms/step is ms per token.")
    lines.append(f"peak VRAM {'not available: no CUDA device' if peak is None else f'{peak:.1f} GiB'}")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Return the hardware and software of a measurement."""
    gpu, cuda = "none", "none"
    if torch.cuda.is_available():
        gpu, cuda = torch.cuda.get_device_name(), str(torch.version.cuda)
    software = {"python": platform.python_version(), "torch": torch.__version__, "cuda": cuda}
    return software | {"cpu": platform.machine(), "gpu": gpu}


def _requests(name: str) -> Requests:
    try:
        return workload(name)
    except KeyError:
        raise BenchError(f"There is no workload {name!r}: choose from {', '.join(NAMES)}.", exit_code=2) from None


def _needs_prefix_cache(names: Sequence[str]) -> bool:
    kinds = {name in WITH_PREFIX_CACHE for name in names}
    if len(kinds) > 1:
        alone = ", ".join(name for name in names if name in WITH_PREFIX_CACHE)
        raise BenchError(
            f"Run {alone} without other workloads: it needs the prefix cache, the others none.", exit_code=2
        )
    return kinds == {True}


def _fit(loaded: LoadedEngine, name: str, requests: Requests) -> Requests:
    """Fit the requests to this model: prompts are drawn below 10,000, and a smaller vocabulary folds the ids."""
    longest, limit = max(len(prompt) + n for prompt, n in requests), loaded.scheduler_config.max_model_len
    if longest > limit:
        raise _too_long(name, longest, loaded)
    vocab_size = loaded.model_config.vocab_size
    return [([token % vocab_size for token in prompt], num_tokens) for prompt, num_tokens in requests]


def _too_long(name: str, longest: int, loaded: LoadedEngine) -> BenchError:
    limit, most = loaded.scheduler_config.max_model_len, loaded.model_config.max_context_len
    remedy = f"give it --max-model-len {longest}" if most >= longest else "choose a model with a longer one"
    return BenchError(
        f"Workload {name} needs a context of {longest:,} tokens, and this model has {limit:,} here: {remedy}."
    )


def engine_config(arguments: argparse.Namespace, *, longest: int = 0) -> tuple[str, EngineConfig]:
    """Return the measured model's name and configuration.

    longest: tokens of the longest request, for which the default context has room if the model does.
    """
    has_whole_experts = is_expert_parallel(arguments)  # before a model is downloaded
    shape = arguments.shape
    if shape is None and arguments.model is None and arguments.device != "cpu" and torch.cuda.is_available():
        shape = _DEFAULT_SHAPE
    if shape is not None:
        folder, name = _SHAPES / shape, shape
        if not (folder / "config.json").is_file():
            names = ", ".join(sorted(path.parent.name for path in _SHAPES.glob("*/config.json")))
            raise BenchError(f"There is no --shape {shape!r}: choose from {names}.", exit_code=2)
    else:
        folder, name = resolve_model(arguments.model)
    return name, EngineConfig(
        model=str(folder),
        load_format="auto" if shape is None else "dummy",
        device=arguments.device,
        tensor_parallel_size=arguments.tensor_parallel_size,
        is_expert_parallel=has_whole_experts,
        quantization=arguments.quantization,
        dtype=arguments.dtype,
        attention_backend=arguments.attention_backend,
        max_model_len=arguments.max_model_len or _model_len(folder, max(_DEFAULT_MODEL_LEN, longest)),
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kv_cache_memory_bytes=arguments.kv_cache_memory,
        kv_cache_dtype=arguments.kv_cache_dtype,
        enable_prefix_caching=False,
        enforce_eager=arguments.enforce_eager,
        overlap_depth=num_steps_in_flight(arguments.overlap),
        speculative=speculative_of(arguments),
    )


def _model_len(folder: Path, wanted: int) -> int | None:
    """Return the context that the workloads need, if the model supports it. None: loading will report the problem."""
    try:
        return min(wanted, ModelConfig.from_folder(folder).max_context_len)
    except ModelError:
        return None


def _run(loaded: LoadedEngine, requests: Requests) -> Report:
    offline = OfflineEngine(loaded)
    params = [SamplingParams(max_tokens=num_tokens, temperature=0.0) for _, num_tokens in requests]
    gc.collect()  # the engine of the run before, which would take up to 12 ms of this one
    started_s = time.perf_counter()
    generations = offline.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - started_s
    failed = [generation.error for generation in generations if generation.error is not None]
    if failed:
        raise BenchError(f"{len(failed)} of {len(requests)} requests failed: {failed[0].message}")
    num_input = sum(len(prompt) for prompt, _ in requests)
    num_output = sum(len(generation.token_ids) for generation in generations)
    assert num_output == sum(num_tokens for _, num_tokens in requests), "a request ended early"
    return _result(offline, seconds, len(requests), num_input, num_output)


def _result(offline: OfflineEngine, seconds: float, num_requests: int, num_input: int, num_output: int) -> Report:
    """Return a run's counts and rates."""
    scheduler = offline.engine.scheduler
    num_steps = scheduler.committed_step_id + 1
    return {
        "seconds": seconds,
        "num_requests": num_requests,
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "input_tok_per_s": num_input / seconds,
        "output_tok_per_s": num_output / seconds,
        "ms_per_step": 1e3 * seconds / num_steps,
        "num_steps": num_steps,
        "num_preemptions": scheduler.num_preemptions,
        "num_draft_tokens": scheduler.drafts.num_tokens,
        "num_accepted_tokens": scheduler.drafts.num_accepted,
    }
