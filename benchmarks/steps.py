"""`quire bench steps`: measures step times on this machine, for `quire bench plan`. Imports torch.

Uses the engine's own loop, without HTTP: decoding rows at two lengths of context, then prompts beside one row. Each
point is the median of its steps. Points are measured in the order of their cost, while the next one is expected to fit
into the time.
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
from engine.interface.protocol import AddRequest, ClientGone, SamplingParams, pack_token_ids
from engine.offline import OfflineEngine
from engine.startup.load import LoadedEngine, load_engine

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
_STEP_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_NUM_WARM_UP = 4
_CONTEXTS_APART = 4  # ratio of the second context to the first
_DECODE_SHARE, _FAR_SHARE = 0.55, 0.25  # shares of the time; the rest is for prompts
_GROWTH = 1.25  # expected growth of a point's cost, relative to its growth in size
_FAR_GROWTH = 9.0  # four times the prompts, each with twice the attention


class _Point(NamedTuple):
    num_rows: int
    num_context_tokens: int  # of all rows together
    seconds: float
    cost_s: float  # seconds for measuring it, prompts included


def run(arguments: argparse.Namespace) -> int:
    """Run `quire bench steps` and return its exit code. Raises BenchError, StartupError."""
    check_outputs(json_path=arguments.json, plot_path=None, html_path=None)
    name, config = engine_config(arguments)
    with contextlib.closing(load_engine(config, lambda stage: None)) as loaded:
        print(f"{name} on {loaded.facts['Device']}; KV cache: {loaded.facts['KV cache']}", file=sys.stderr)
        times = measure(
            loaded, name, context=arguments.context, num_steps=arguments.num_steps, max_s=arguments.max_seconds
        )
    print(format_times(times))
    if arguments.json:
        write_report(arguments.json, msgspec.to_builtins(times))
    return 0


def measure(loaded: LoadedEngine, name: str, *, context: int, num_steps: int, max_s: float) -> StepTimes:
    """Measure every point that fits into the time. Blocks. Raises BenchError if the context does not fit."""
    config = loaded.scheduler_config
    room = min(config.max_model_len, (config.num_pages - 1) * config.block_size) - _NUM_WARM_UP - 4 * num_steps
    if not 1 <= context < room:
        raise BenchError(f"--context {context} with {num_steps} steps: this model has room for {room}.", exit_code=2)
    started_s = time.monotonic()
    decode = _decode_points(loaded, context, num_steps, end_s=started_s + _DECODE_SHARE * max_s)
    slope = _context_slope(loaded, decode, min(context * _CONTEXTS_APART, room - 1), num_steps, _FAR_SHARE * max_s)
    alone = _decode(loaded, 1, 1, num_steps) or decode[0]
    return StepTimes(
        model=name,
        device=loaded.facts["Device"],
        date=now(),
        context=context,
        decode_s=[(p.num_rows, _at_context(p, context, slope)) for p in decode],
        context_s_per_token=slope,
        prompt_s=[
            (n, max(seconds - alone.seconds, 0.0))
            for n, seconds in _prompt_points(loaded, room, num_steps, end_s=started_s + max_s)
        ],
        scheduler=config,
        depth=loaded.overlap_depth,
    )


def format_times(times: StepTimes) -> str:
    """Format two tables, and the cost of context."""
    decode = [["decoding rows", "ms", "tok/s"]]
    decode += [[str(n), f"{1e3 * s:.3f}", f"{n / s:,.0f}"] for n, s in times.decode_s]
    prompts = [["prompt tokens more", "ms more", "tok/s"]]
    prompts += [[str(n), f"{1e3 * s:.3f}", f"{n / s:,.0f}" if s else "-"] for n, s in times.prompt_s]
    context = (
        f"context {times.context}; 1,000 tokens more of it, over all rows: {1e6 * times.context_s_per_token:.3f} ms"
    )
    return f"{format_table(decode)}\n{context}\n\n{format_table(prompts)}"


def _at_context(point: _Point, context: int, slope: float) -> float:
    """Return the step's time if every row had just this context."""
    further_s = slope * (point.num_context_tokens - point.num_rows * context)
    return max(point.seconds - further_s, point.seconds / 2)


def _decode_points(loaded: LoadedEngine, context: int, num_steps: int, *, end_s: float) -> list[_Point]:
    points: list[_Point] = []
    for num_rows in _rows(loaded.scheduler_config.max_num_seqs):
        expected_s = _GROWTH * points[-1].cost_s * num_rows / points[-1].num_rows if points else 0.0
        if time.monotonic() + expected_s > end_s and points:
            _say(f"left out, for want of --max-seconds: {num_rows} decoding rows and more")
            break
        if point := _decode(loaded, num_rows, context, num_steps):
            points.append(point)
    return points


def _context_slope(loaded: LoadedEngine, decode: list[_Point], far_context: int, num_steps: int, max_s: float) -> float:
    """Return seconds per token of context, by the widest batch with room and time for a several times longer one."""
    for near in reversed(decode):
        if near.cost_s * _FAR_GROWTH > max_s:
            continue
        far = _decode(loaded, near.num_rows, far_context, num_steps)
        if far and far.num_context_tokens > near.num_context_tokens:
            return max((far.seconds - near.seconds) / (far.num_context_tokens - near.num_context_tokens), 0.0)
    _say("what context costs was not measured and counts as nothing, for want of KV cache or --max-seconds")
    return 0.0


def _prompt_points(loaded: LoadedEngine, room: int, num_steps: int, *, end_s: float) -> list[tuple[int, float]]:
    """Measure steps with prompts of increasing length: (tokens, seconds)."""
    most = max(min(loaded.scheduler_config.max_num_batched_tokens, room), 2)
    points: list[tuple[int, float]] = []
    expected_s = 0.0
    # one less, since a row decodes beside them: steps are as long as those that a GPU has graphs for
    for num_tokens in [n - 1 for n in sorted({n for n in _STEP_TOKENS if n < most} | {most})]:
        began_s = time.monotonic()
        if points and began_s + expected_s * num_tokens / points[-1][0] > end_s:
            _say(f"left out, for want of --max-seconds: steps of {num_tokens} prompt tokens and more")
            break
        points.append((num_tokens, _prompt_s(loaded, num_tokens, num_steps)))
        expected_s = _GROWTH * (time.monotonic() - began_s)
    return points


def _rows(most: int) -> list[int]:
    return sorted({n for n in _ROWS if n <= most} | {most})


def _decode(loaded: LoadedEngine, num_rows: int, context: int, num_steps: int) -> _Point | None:
    """Measure steps of decoding rows alone; None if the KV cache does not hold them all."""
    _say(f"decoding rows: {num_rows}, context {context} …")
    began_s = time.monotonic()
    offline = OfflineEngine(loaded)
    scheduler = offline.engine.scheduler
    config = loaded.scheduler_config
    for number in range(num_rows):
        _add(offline, f"d{number}", context, max_tokens=config.max_model_len - context)
    while len(scheduler.running) < num_rows or any(not request.is_decoding for request in scheduler.running):
        offline.engine.run_once()
        if scheduler.num_preemptions or (scheduler.waiting.requests and scheduler.kv.pool.num_free < num_rows):
            _end(offline)
            return None
    # rows whose prompts came first have decoded since; half of the timed steps come before the middle
    num_tokens = sum(request.num_tokens + _NUM_WARM_UP + num_steps // 2 for request in scheduler.running)
    seconds = _timed(offline, num_steps, lambda: None)
    return _Point(num_rows, num_tokens, seconds, cost_s=time.monotonic() - began_s)


def _prompt_s(loaded: LoadedEngine, num_tokens: int, num_steps: int) -> float:
    """Measure a step of one decoding row and one whole prompt."""
    _say(f"prompt tokens beside a decoding row: {num_tokens} …")
    limits = {"min_decode_step_tokens": num_tokens + 1, "max_decode_step_tokens": num_tokens + 1, "step_sizes": []}
    config = msgspec.structs.replace(loaded.scheduler_config, **limits)
    offline = OfflineEngine(replace(loaded, scheduler_config=config))
    _add(offline, "d", 1, max_tokens=_NUM_WARM_UP + 4 * num_steps)
    while not offline.engine.scheduler.running or not offline.engine.scheduler.running[0].is_decoding:
        offline.engine.run_once()
    numbers = itertools.count()
    return _timed(offline, num_steps, lambda: _add(offline, f"p{next(numbers)}", num_tokens, max_tokens=1))


def _timed(offline: OfflineEngine, num_steps: int, before_each: Callable[[], None]) -> float:
    """Return the median of num_steps turns of the loop, then end all requests."""
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
    offline.transport.inbox.append((0, ClientGone()))
    while not offline.engine.is_idle:
        offline.engine.run_once()


def _add(offline: OfflineEngine, request_id: str, num_tokens: int, *, max_tokens: int) -> None:
    vocab_size = offline.loaded.model_config.vocab_size
    prompt = [(len(request_id) * 31 + 7 * i) % vocab_size for i in range(num_tokens)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    offline.transport.inbox.append((0, AddRequest(request_id, pack_token_ids(prompt), params, 0.0)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
