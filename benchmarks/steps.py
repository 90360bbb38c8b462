"""`quire bench steps`: how long steps take on this machine, for `quire bench plan`. Imports torch.

Through the engine's own loop, without HTTP: decoding rows at two lengths of context, then prompts beside one row. Each
point is the median of its steps.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from benchmarks.offline import engine_config
from benchmarks.report import BenchError, check_outputs, format_table, now, write_report
from benchmarks.step_times import StepTimes
from engine.load import LoadedEngine, load_engine
from engine.offline import OfflineEngine
from engine.protocol import AddRequest, SamplingParams

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
_STEP_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_NUM_WARM_UP = 4
_CONTEXTS_APART = 4  # how many times as long the second context is


class _Point(NamedTuple):
    num_rows: int
    num_context_tokens: int  # of all rows together
    seconds: float


def run(arguments: argparse.Namespace) -> int:
    """Run `quire bench steps` and return its exit code. Raises BenchError, StartupError."""
    check_outputs(json_path=arguments.json, plot_path=None, html_path=None)
    name, config = engine_config(arguments)
    with contextlib.closing(load_engine(config, lambda stage: None)) as loaded:
        print(f"{name} on {loaded.facts['Device']}; KV cache: {loaded.facts['KV cache']}", file=sys.stderr)
        times = measure(loaded, name, context=arguments.context, num_steps=arguments.num_steps)
    print(format_times(times))
    if arguments.json:
        write_report(arguments.json, msgspec.to_builtins(times))
    return 0


def measure(loaded: LoadedEngine, name: str, *, context: int, num_steps: int) -> StepTimes:
    """Measure every point. Blocks. Raises BenchError where the context does not fit."""
    config = loaded.scheduler_config
    room = min(config.max_model_len, (config.num_blocks - 1) * config.block_size) - _NUM_WARM_UP - 4 * num_steps
    if not 1 <= context < room:
        raise BenchError(f"--context {context} with {num_steps} steps: this model has room for {room}.", exit_code=2)
    decode = [point for n in _rows(config.max_num_seqs) if (point := _decode(loaded, n, context, num_steps))]
    # the slope of the context from the widest batch that still has room for one several times as long
    near, far = decode[0], None
    for near in reversed(decode):
        if far := _decode(loaded, near.num_rows, min(context * _CONTEXTS_APART, room - 1), num_steps):
            break
    slope = 0.0
    if far and far.num_context_tokens > near.num_context_tokens:
        slope = max((far.seconds - near.seconds) / (far.num_context_tokens - near.num_context_tokens), 0.0)
    most_tokens = min(config.max_num_batched_tokens, room)
    # one less, since a row decodes beside them: steps are as long as those that a GPU has graphs for
    chunks = [n - 1 for n in sorted({n for n in _STEP_TOKENS if n < most_tokens} | {max(most_tokens, 2)})]
    alone = _decode(loaded, 1, 1, num_steps) or near
    return StepTimes(
        model=name,
        device=loaded.facts["Device"],
        date=now(),
        context=context,
        decode_s=[(p.num_rows, _at_context(p, context, slope)) for p in decode],
        context_s_per_token=slope,
        prompt_s=[(n, max(_prompt_s(loaded, n, num_steps) - alone.seconds, 0.0)) for n in chunks],
        scheduler=config,
        depth=loaded.depth,
    )


def format_times(times: StepTimes) -> str:
    """Two tables, and what context costs."""
    decode = [["decoding rows", "ms", "tok/s"]]
    decode += [[str(n), f"{1e3 * s:.3f}", f"{n / s:,.0f}"] for n, s in times.decode_s]
    prompts = [["prompt tokens more", "ms more", "tok/s"]]
    prompts += [[str(n), f"{1e3 * s:.3f}", f"{n / s:,.0f}" if s else "-"] for n, s in times.prompt_s]
    context = (
        f"context {times.context}; 1,000 tokens more of it, over all rows: {1e6 * times.context_s_per_token:.3f} ms"
    )
    return f"{format_table(decode)}\n{context}\n\n{format_table(prompts)}"


def _at_context(point: _Point, context: int, slope: float) -> float:
    """What the step would have taken had every row just this context."""
    further_s = slope * (point.num_context_tokens - point.num_rows * context)
    return max(point.seconds - further_s, point.seconds / 2)


def _rows(most: int) -> list[int]:
    return sorted({n for n in _ROWS if n <= most} | {most})


def _decode(loaded: LoadedEngine, num_rows: int, context: int, num_steps: int) -> _Point | None:
    """Steps of decoding rows alone; None if the KV cache does not hold them all."""
    offline = OfflineEngine(loaded)
    scheduler = offline.engine.scheduler
    config = loaded.scheduler_config
    for number in range(num_rows):
        _add(offline, f"d{number}", context, max_tokens=config.max_model_len - context)
    while len(scheduler.running) < num_rows or any(not request.is_decoding for request in scheduler.running):
        offline.engine.run_once()
        if scheduler.num_preemptions or (scheduler.waiting and scheduler.blocks.num_free < num_rows):
            _end(offline)
            return None
    # those whose prompts came first have decoded since; half of what is timed lies before the middle
    num_tokens = sum(request.num_tokens + _NUM_WARM_UP + num_steps // 2 for request in scheduler.running)
    return _Point(num_rows, num_tokens, _timed(offline, num_steps, lambda: None))


def _prompt_s(loaded: LoadedEngine, num_tokens: int, num_steps: int) -> float:
    """A step of one decoding row and one whole prompt."""
    limits = {"min_num_mixed_tokens": num_tokens + 1, "max_num_mixed_tokens": num_tokens + 1, "step_sizes": []}
    config = msgspec.structs.replace(loaded.scheduler_config, **limits)
    offline = OfflineEngine(replace(loaded, scheduler_config=config))
    _add(offline, "d", 1, max_tokens=_NUM_WARM_UP + 4 * num_steps)
    while not offline.engine.scheduler.running or not offline.engine.scheduler.running[0].is_decoding:
        offline.engine.run_once()
    numbers = itertools.count()
    return _timed(offline, num_steps, lambda: _add(offline, f"p{next(numbers)}", num_tokens, max_tokens=1))


def _timed(offline: OfflineEngine, num_steps: int, before_each: Callable[[], None]) -> float:
    """The median of num_steps turns of the loop; then end whatever runs."""
    engine, seconds = offline.engine, []
    for number in range(_NUM_WARM_UP + num_steps):
        before_each()
        started_s = time.perf_counter()
        engine.run_once()
        if number >= _NUM_WARM_UP:
            seconds.append(time.perf_counter() - started_s)
    _end(offline)
    return statistics.median(seconds)


def _end(offline: OfflineEngine) -> None:
    offline.engine.abort_all()
    while not offline.engine.is_idle:
        offline.engine.run_once()


def _add(offline: OfflineEngine, request_id: str, num_tokens: int, *, max_tokens: int) -> None:
    vocab_size = offline.loaded.vocab_size
    prompt = [(len(request_id) * 31 + 7 * i) % vocab_size for i in range(num_tokens)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    offline.transport.inbox.append((0, AddRequest(request_id, prompt, params, 0.0)))
