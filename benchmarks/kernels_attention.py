"""Attention cases: paged decode and ragged prefill, each checked against float64 before it is timed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.attention_problem import Heads, Problem, make_problem, relative_error
from benchmarks.kernel_timing import num_copies, time_graph
from kernels.attention.gluon_prefill import HopperConfig, hopper_prefill_attention, new_tickets
from kernels.attention.triton_decode import DecodeConfig, decode_attention, decode_config
from kernels.attention.triton_prefill import PrefillConfig, prefill_attention, prefill_config
from kernels.attention.triton_splits import DecodeScratch

HEAD_DIM = 128
DECODE_CONFIGS = [
    DecodeConfig(64, 2, 3), DecodeConfig(64, 2, 5), DecodeConfig(128, 4, 3), DecodeConfig(128, 4, 5),
    DecodeConfig(128, 2, 3),
]  # fmt: skip
PREFILL_CONFIGS = [
    PrefillConfig(128, 64, 8, 5), PrefillConfig(128, 128, 8, 3), PrefillConfig(64, 64, 4, 2),
    *(PrefillConfig(m, n, w, s, maxnreg=128) for m, n, w, s in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 32, 8, 3), (64, 32, 4, 3))),
    PrefillConfig(64, 64, 4, 3, maxnreg=168), PrefillConfig(64, 32, 4, 3, maxnreg=160),
]  # fmt: skip
HOPPER_CONFIGS = [HopperConfig(1, 64, 2, 2), HopperConfig(2, 64, 4, 1), HopperConfig(2, 128, 2, 1)]
_PrefillVariant = tuple[Callable[..., torch.Tensor], PrefillConfig | HopperConfig | None]  # None: as is served


def make_paged(
    *, rows: int, query_len: int, seq_len: int, num_heads: int, num_kv_heads: int,
    block_size: int, copies: int, is_fp8: bool = False,
) -> Problem:  # fmt: skip
    """Rows of query_len queries over seq_len keys, blocks shuffled, and `copies` pairs of caches (a model's layers)."""
    heads = Heads(num_heads, num_kv_heads, HEAD_DIM, torch.bfloat16, torch.device("cuda"))
    return make_problem(
        heads, num_rows=rows, query_len=query_len, seq_len=seq_len, block_size=block_size, num_layers=copies,
        is_fp8=is_fp8,
    )  # fmt: skip


def decode_call(
    problem: Problem, layer: int, *, config: DecodeConfig | None = None, num_splits: int | None = None, pdl: bool = True
) -> torch.Tensor:
    """One decode launch over that layer's cache."""
    out = torch.full_like(problem.q, float("nan")) if layer < 0 else torch.empty_like(problem.q)
    decode_attention(
        problem.q, *problem.caches[layer], problem.block_table, problem.seq_lens, out, _scratch(problem.heads),
        scale=HEAD_DIM**-0.5, max_seq_len=16384, config=config, num_splits=num_splits, pdl=pdl,
    )  # fmt: skip
    return out


def prefill_call(
    problem: Problem, layer: int, *, config: PrefillConfig | None = None, pdl: bool = True
) -> torch.Tensor:
    """One prefill launch over that layer's cache."""
    out = torch.full_like(problem.q, float("nan")) if layer < 0 else torch.empty_like(problem.q)
    prefill_attention(
        problem.q, *problem.caches[layer], problem.block_table, problem.query_start_loc, problem.seq_lens, out,
        scale=HEAD_DIM**-0.5, max_query_len=problem.q.shape[0] // problem.seq_lens.shape[0], config=config, pdl=pdl,
    )  # fmt: skip
    return out


def hopper_prefill_call(problem: Problem, layer: int, *, config: HopperConfig | None = None) -> torch.Tensor:
    """One launch of the Hopper prefill kernel over that layer's cache."""
    out = torch.full_like(problem.q, float("nan")) if layer < 0 else torch.empty_like(problem.q)
    hopper_prefill_attention(
        problem.q, *problem.caches[layer], problem.block_table, problem.query_start_loc, problem.seq_lens, out,
        _tickets(problem.q.device), scale=HEAD_DIM**-0.5, max_seq_len=problem.seq_len, config=config, pdl=True,
    )  # fmt: skip
    return out


def check(problem: Problem, out: torch.Tensor) -> float:
    """Assert and return the relative error against float64; see relative_error."""
    error = relative_error(problem, out)
    assert error < 6e-3, f"wrong, or an element was not written: {error}"
    return error


def bench_decode(*, sweep: bool) -> list[dict[str, object]]:
    """Measure µs and TB/s of one layer's decode, at Qwen3-0.6B's and Llama-3.1-8B's heads, over bf16 and fp8."""
    results: list[dict[str, object]] = []
    cases = [(1, 128), (1, 512), (1, 4096), (1, 16384), (8, 1024), (64, 1024), (64, 4096), (256, 1024)]
    for num_heads, (rows, seq_len), is_fp8 in itertools.product((16, 32), cases, (False, True)):
        num_bytes = rows * seq_len * 8 * HEAD_DIM * (2 if is_fp8 else 4)
        problem = make_paged(
            rows=rows, query_len=1, seq_len=seq_len, num_heads=num_heads, num_kv_heads=8, block_size=16,
            copies=num_copies(num_bytes), is_fp8=is_fp8,
        )  # fmt: skip
        default_splits = _scratch(problem.heads).num_splits(num_pairs=rows * 8)
        variants: list[tuple[DecodeConfig, int, bool]] = [
            (_default_decode(rows), default_splits, pdl) for pdl in (True, False)
        ]
        if sweep:
            splits = sorted({max(1, default_splits * f // 4) for f in (1, 2, 4, 6, 8)} | {1 if rows > 8 else 16})
            variants += [(c, s, True) for c in DECODE_CONFIGS for s in splits if rows * 8 * s <= 4 * 132]
        for config, num_splits, pdl in variants:
            call = functools.partial(decode_call, problem, config=config, num_splits=num_splits, pdl=pdl)
            error = check(problem, call(-1))
            us = time_graph([functools.partial(call, i) for i in range(len(problem.caches))])
            results.append({"kind": "decode", "case": f"H{num_heads}/8 B{rows} ctx{seq_len}{' fp8' * is_fp8}",
                            "splits": num_splits,
                            "config": str(config), "pdl": pdl, "us": us, "tb_s": num_bytes / us * 1e-6,
                            "error": error})  # fmt: skip
    return results


def bench_prefill(*, sweep: bool) -> list[dict[str, object]]:
    """Measure µs and TFLOP/s of one layer's prefill; without a prefix also torch's SDPA over contiguous keys."""
    results: list[dict[str, object]] = []
    cases = [(1, 512, 512), (1, 4096, 4096), (4, 4096, 4096), (1, 16384, 16384), (32, 512, 512), (1, 2048, 16384)]
    shapes = itertools.product(((16, 16), (32, 16), (16, 64), (32, 64)), cases, (False, True))
    for (num_heads, block_size), (rows, query_len, seq_len), is_fp8 in shapes:
        problem = make_paged(
            rows=rows, query_len=query_len, seq_len=seq_len, num_heads=num_heads, num_kv_heads=8,
            block_size=block_size, copies=2, is_fp8=is_fp8,
        )  # fmt: skip
        pairs = rows * query_len * (seq_len - query_len + (query_len + 1) / 2)
        flops = 4 * num_heads * HEAD_DIM * pairs
        default = _default_prefill(num_heads, rows * query_len, query_len)
        # The Hopper kernel does not support fp8
        variants: list[_PrefillVariant] = [] if is_fp8 else [(hopper_prefill_call, None)]
        variants.append((prefill_call, default))
        if sweep and num_heads == 32:
            variants += [] if is_fp8 else [(hopper_prefill_call, c) for c in HOPPER_CONFIGS]
            variants += [(prefill_call, c) for c in PREFILL_CONFIGS]
        first = len(results)
        for call, config in variants:
            error = check(problem, call(problem, -1, config=config))
            us = time_graph([functools.partial(call, problem, layer, config=config) for layer in (0, 1)])
            results.append({"kind": "prefill",
                            "case": f"H{num_heads}/8 {rows}x{query_len}/{seq_len} bs{block_size}{' fp8' * is_fp8}",
                            "kernel": "Triton" if call is prefill_call else "Gluon", "config": str(config), "us": us,
                            "tflop_s": flops / us * 1e-6, "error": error})  # fmt: skip
        if is_fp8:
            continue
        results[first]["triton_us"] = results[first + 1]["us"]
        if query_len == seq_len and block_size == 16:
            results[first]["sdpa_us"] = _time_sdpa(rows, seq_len, num_heads)
    return results


def compile_jobs(*, sweep: bool) -> list[Callable[[], object]]:
    """Launch every configuration that the two benchmarks time, on tiny inputs."""

    def run(
        call: Callable[..., torch.Tensor], num_heads: int, block_size: int, query_len: int, **options: object
    ) -> None:
        for is_fp8 in (False, True) if call is not hopper_prefill_call else (False,):
            problem = make_paged(
                rows=2, query_len=query_len, seq_len=256, num_heads=num_heads, num_kv_heads=8, block_size=block_size,
                copies=1, is_fp8=is_fp8,
            )  # fmt: skip
            call(problem, 0, **options)

    jobs: list[Callable[[], object]] = []
    for config in {*(_default_decode(rows) for rows in (1, 8, 256)), *(DECODE_CONFIGS if sweep else [])}:
        for num_heads, splits, pdl in [(h, s, p) for h in (16, 32) for s in (1, 4) for p in (True, False)]:
            jobs.append(
                functools.partial(run, decode_call, num_heads, 16, 1, config=config, num_splits=splits, pdl=pdl)
            )
    defaults = {_default_prefill(16, tokens, tokens) for tokens in (512, 4096)}
    prefills: list[_PrefillVariant] = [(prefill_call, c) for c in {*defaults, *(PREFILL_CONFIGS if sweep else [])}]
    prefills += [(hopper_prefill_call, c) for c in HOPPER_CONFIGS]
    for call, cut in prefills:
        for num_heads, block_size in ((16, 16), (32, 16), (16, 64), (32, 64)):
            jobs.append(functools.partial(run, call, num_heads, block_size, 256, config=cut))
    return jobs


@functools.cache
def _scratch(heads: Heads) -> DecodeScratch:
    """Return the backend's buffers for splits: one set for all calls of a shape."""
    return DecodeScratch.allocate(
        num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, device=heads.device
    )


@functools.cache
def _tickets(device: torch.device) -> torch.Tensor:
    return new_tickets(device)


def _default_decode(rows: int) -> DecodeConfig:
    return decode_config(HEAD_DIM, torch.bfloat16, num_pairs=rows * 8, is_split=rows < 50)


def _default_prefill(num_heads: int, num_tokens: int, query_len: int) -> PrefillConfig:
    return prefill_config(
        HEAD_DIM,
        torch.bfloat16,
        max_rows=query_len * num_heads // 8,
        total_rows=num_tokens * num_heads,
    )


def _time_sdpa(rows: int, seq_len: int, num_heads: int) -> float:
    q, k, v = (
        torch.randn(rows, heads, seq_len, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for heads in (num_heads, 8, 8)
    )
    call = functools.partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    return time_graph([call, call])
