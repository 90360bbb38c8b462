"""Checks, then times, attention of layers of many kinds: head sizes, sliding windows, sinks, and candidate tiles.

python -m benchmarks.attention_kinds [--seconds N] [--json FILE]

A cell is one launch as the backend makes it, or with a candidate's tiles. Each is checked against float64 on the
inputs it is timed on, printed at once, and written to the JSON file at once. % of floor: the larger of bytes over
bandwidth and operations over rate, over the time. No cell begins after N seconds; those that decide tiles come first.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.attention_problem import Heads, Problem, make_problem, relative_error
from benchmarks.kernel_timing import ROTATION_BYTES, machine_facts, nominal_rates, time_calls, time_graph
from kernels.attention.gluon_prefill import HopperConfig, hopper_prefill_attention, new_tickets
from kernels.attention.triton_backend import TritonAttention
from kernels.attention.triton_cut_rows import cut_rows
from kernels.attention.triton_decode import DecodeConfig, decode_attention
from kernels.attention.triton_prefill import PrefillConfig, prefill_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.precompile import Compilation, collect_kernels

_TOLERANCE = 1e-2
_POOL_BYTES = 9e9  # of all caches of a problem
_MAX_LAYERS = 32
_TIMED_US = 20_000  # of a cell
_MAX_REPLAYS = 15
_HEADS = {64: (64, 8), 128: (32, 8), 256: (32, 16), 512: (32, 4)}  # head_dim → query and KV heads
_PREFILL_CONFIGS: dict[int, list[HopperConfig | PrefillConfig]] = {
    64: [HopperConfig(1, 64, 2, 2), HopperConfig(2, 64, 4, 1), HopperConfig(2, 128, 2, 1)],
    128: [HopperConfig(1, 64, 2, 2), HopperConfig(2, 64, 4, 1), HopperConfig(2, 128, 2, 1)],
    256: [HopperConfig(2, 64, 2, 1), HopperConfig(1, 64, 2, 1), PrefillConfig(128, 64, 8, 2)],
    512: [HopperConfig(1, 64, 1, 1), PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 16, 8, 3)],
}
_DECODE_CONFIGS = {
    256: [DecodeConfig(n, w, s) for n, w, s in ((32, 2, 3), (32, 2, 5), (32, 4, 5), (64, 4, 3))],
    512: [DecodeConfig(n, w, s) for n, w, s in ((16, 4, 3), (16, 4, 5), (32, 4, 3), (32, 4, 5), (32, 8, 5))],
}
_Config = HopperConfig | PrefillConfig | DecodeConfig


@dataclass(frozen=True)
class Cell:
    """One measurement; the figures are zero until it is made."""

    part: str
    rows: int
    tokens: int  # of each row
    head_dim: int
    window: int | None
    has_sinks: bool
    config: str = "served"
    us: float = 0.0
    error: float = 0.0
    gbytes: float = 0.0
    gflops: float = 0.0
    floor_percent: float = 0.0
    trouble: str = ""


_Attend = Callable[[int], torch.Tensor]  # layer → output
_Row = tuple[Cell, _Attend, Problem]


def main() -> None:
    """Compile each group's kernels in parallel, then check, time and print its cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no cell after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    started_s = time.monotonic()
    torch.manual_seed(0)
    results: list[Cell] = []
    for group in _groups():
        rows = list(group())
        with torch.inference_mode():
            with collect_kernels() as kernels:
                for _, attend, _ in rows:
                    attend(0)
            if kernels:
                Compilation(list(kernels)).wait(lambda done, total: None)
            print(f"# {time.monotonic() - started_s:.0f} s, {len(kernels)} kernels compiled", flush=True)
            for row in rows:
                if time.monotonic() - started_s > options.seconds:
                    return
                results.append(_measure(*row))
                print(_line(results[-1]), flush=True)
                if options.json:
                    report = {"machine": machine_facts(), "results": [asdict(result) for result in results]}
                    options.json.write_text(json.dumps(report, indent=1))
        del rows
        torch.cuda.empty_cache()


def _groups() -> Iterator[Callable[[], Iterator[_Row]]]:
    """Return the groups in the order of their use."""
    for head_dim in (256, 512):
        yield functools.partial(_prefill_candidates, head_dim, (1024, None))
    for head_dim in (512, 256):
        yield functools.partial(_decode_candidates, head_dim, (8, 64))
    for head_dim in (64, 128):
        yield functools.partial(_prefill_candidates, head_dim, (128, 1024))
    for head_dim, window in ((256, 1024), (512, None), (64, 128), (128, 128), (128, 1024)):
        yield functools.partial(_served, "decode", ((1, 8192), (8, 8192), (64, 8192)), head_dim, (window,))
    for head_dim in (256, 512, 64, 128):
        yield functools.partial(_served, "prefill", ((16, 4096),), head_dim, (128, 1024, None))
    for head_dim in (256, 512, 128):
        yield functools.partial(_served, "decode", ((1, 2048), (8, 2048), (64, 2048)), head_dim, (None,))
        yield functools.partial(_served, "decode", ((1, 32768), (8, 32768)), head_dim, (None, 1024))
        yield functools.partial(_served, "prefill", ((4, 16384),), head_dim, (1024, None))


def _served(
    part: str, sizes: tuple[tuple[int, int], ...], head_dim: int, windows: tuple[int | None, ...]
) -> Iterator[_Row]:
    """Each window, without sinks and with, as the backend launches it."""
    for rows, tokens in sizes:
        problem = _problem(part, rows, tokens, head_dim)
        for window, has_sinks in itertools.product(windows, (False, True)):
            backend, metadata = TritonAttention(), problem.metadata()
            sinks = _sinks(problem) if has_sinks else None
            attend = functools.partial(_through, backend, problem, metadata, sliding_window=window, sinks=sinks)
            yield Cell(part, rows, tokens, head_dim, window, has_sinks), attend, problem


def _prefill_candidates(head_dim: int, windows: tuple[int | None, ...]) -> Iterator[_Row]:
    problem = _problem("prefill", 4, 4096, head_dim)
    tickets = new_tickets(problem.q.device)
    for window, config in itertools.product(windows, _PREFILL_CONFIGS[head_dim]):
        attend = functools.partial(_prefill_with, problem, tickets, config, window)
        yield Cell("prefill", 4, 4096, head_dim, window, False, _short(config)), attend, problem


def _decode_candidates(head_dim: int, batches: tuple[int, ...]) -> Iterator[_Row]:
    for rows in batches:
        problem = _problem("decode", rows, 8192, head_dim)
        num_kv_heads = problem.heads.num_kv_heads
        scratch = DecodeScratch.allocate(
            num_heads=problem.heads.num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=problem.q.device
        )
        pieces = cut_rows(
            problem.seq_lens, num_pieces=scratch.num_pieces(num_rows=rows, num_kv_heads=num_kv_heads)
        )  # launched before kernels are collected
        for window, config in itertools.product((1024, None), _DECODE_CONFIGS[head_dim]):
            attend = functools.partial(_decode_with, problem, scratch, None if window else pieces, config, window)
            yield Cell("decode", rows, 8192, head_dim, window, False, _short(config)), attend, problem


def _problem(part: str, rows: int, tokens: int, head_dim: int) -> Problem:
    num_heads, num_kv_heads = _HEADS[head_dim]
    heads = Heads(num_heads, num_kv_heads, head_dim, torch.bfloat16, torch.device("cuda"))
    whole = 4 * rows * tokens * num_kv_heads * head_dim
    read = whole if part == "prefill" else whole * min(1024, tokens) // tokens
    copies = max(1, min(-(-ROTATION_BYTES // read), int(_POOL_BYTES / whole), _MAX_LAYERS))
    return make_problem(
        heads, num_rows=rows, query_len=1 if part == "decode" else tokens, seq_len=tokens, block_size=16,
        num_layers=copies,
    )  # fmt: skip


def _sinks(problem: Problem) -> torch.Tensor:
    return torch.randn(problem.heads.num_heads, device=problem.q.device)


def _through(
    backend: TritonAttention, problem: Problem, metadata: object, layer: int, **options: object
) -> torch.Tensor:
    return backend.forward(problem.q, *problem.caches[layer], metadata, scale=problem.heads.scale, **options)  # type: ignore[arg-type]


def _prefill_with(
    problem: Problem, tickets: torch.Tensor, config: HopperConfig | PrefillConfig, window: int | None, layer: int
) -> torch.Tensor:
    out = torch.empty_like(problem.q)
    shared = (problem.q, *problem.caches[layer], problem.block_table, problem.query_start_loc, problem.seq_lens, out)
    scale = problem.heads.scale
    if isinstance(config, HopperConfig):
        hopper_prefill_attention(
            *shared, tickets, scale=scale, max_seq_len=problem.seq_len, sliding_window=window, config=config, pdl=True
        )
    else:
        prefill_attention(
            *shared, scale=scale, max_query_len=problem.query_len, sliding_window=window, config=config, pdl=True
        )
    return out


def _decode_with(
    problem: Problem, scratch: DecodeScratch, pieces: torch.Tensor | None, config: DecodeConfig, window: int | None,
    layer: int,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty_like(problem.q)
    decode_attention(
        problem.q, *problem.caches[layer], problem.block_table, problem.seq_lens, out, scratch,
        scale=problem.heads.scale, max_seq_len=problem.seq_len, sliding_window=window, pieces=pieces, config=config,
        pdl=True,
    )  # fmt: skip
    return out


def _measure(cell: Cell, attend: _Attend, problem: Problem) -> Cell:
    """Check and time one cell."""
    torch.full_like(problem.q, float("nan"))  # fills memory that the output may reuse: unwritten parts show
    sinks = attend.keywords.get("sinks") if isinstance(attend, functools.partial) else None
    try:
        error = relative_error(problem, attend(-1), sliding_window=cell.window, sinks=sinks)
        if not error <= _TOLERANCE:
            return replace(cell, error=error, trouble=f"wrong: {error:.1e}")
        calls = [functools.partial(attend, layer) for layer in range(len(problem.caches))]
        once_us, _ = time_calls(calls[:1], is_capturable=False, device=problem.q.device)
        us = time_graph(calls, replays=max(1, min(_MAX_REPLAYS, int(_TIMED_US / (once_us * len(calls))))))
    except Exception as problem_of_it:  # a candidate that does not fit the device is a result
        return replace(cell, trouble=f"{type(problem_of_it).__name__}: {str(problem_of_it)[:80]}")
    num_bytes, num_flops = _work(cell, problem)
    bytes_s, flops_s = nominal_rates()
    floor_us = max(num_bytes / bytes_s, num_flops / flops_s) * 1e6
    return replace(
        cell, us=us, error=error, gbytes=num_bytes / 1e9, gflops=num_flops / 1e9, floor_percent=100 * floor_us / us
    )


def _work(cell: Cell, problem: Problem) -> tuple[float, float]:
    """Return the bytes that must move and the operations that must be done."""
    heads, window = problem.heads, cell.window or cell.tokens
    first = cell.tokens - problem.query_len  # position of the first query
    pairs = sum(min(position + 1, window) for position in range(first, cell.tokens))
    num_keys = min(cell.tokens, window + problem.query_len - 1)
    num_bytes = 4 * (problem.q.numel() + cell.rows * num_keys * heads.num_kv_heads * heads.head_dim)
    return num_bytes, 4.0 * cell.rows * pairs * heads.num_heads * heads.head_dim


def _short(config: _Config) -> str:
    name = {HopperConfig: "gluon", PrefillConfig: "triton", DecodeConfig: "decode"}[type(config)]
    return f"{name} " + "-".join(str(value) for value in asdict(config).values() if value is not None)


def _line(cell: Cell) -> str:
    figures = f"{cell.us:9.1f} us {cell.floor_percent:3.0f} % of floor"
    if cell.us > 0:
        figures += f" {cell.gflops / cell.us * 1e3:6.1f} TFLOP/s {cell.gbytes / cell.us * 1e3:5.2f} TB/s"
    kind = f"{cell.part:7s} D{cell.head_dim:<3d} {cell.rows:2d} x {cell.tokens:5d} w{cell.window or '-':<4}"
    return f"{kind} {'sinks' if cell.has_sinks else '     '} {cell.config:18s} {cell.trouble or figures}"


if __name__ == "__main__":
    main()
