"""Row ops and the skinny GEMM: each checked, then timed beside torch and cuBLAS."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from benchmarks.kernel_timing import BF16_CUDA, num_copies, time_graph
from kernels.elementwise import reference as elementwise
from kernels.elementwise import triton as elementwise_triton
from kernels.elementwise import triton_write_kv
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_gemv import MAX_ROWS, GemvConfig, allocate_scratch, gemv, gemv_config

# name → (N, K)
GEMV_SHAPES = {
    "0.6B qkv": (4096, 1024), "0.6B o": (1024, 2048), "0.6B gate_up": (6144, 1024), "0.6B down": (1024, 3072),
    "0.6B lm_head": (151936, 1024), "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336), "8B lm_head": (128256, 4096),
}  # fmt: skip
GEMV_ROWS = (1, 2, 4, 8, 16, 32, 64)
MANY_ROWS = (128, 192, 256)  # more rows than gemv accepts by itself: with --sweep


def gemv_candidates(num_rows: int, n: int, k: int) -> list[GemvConfig]:
    """Return the configs worth timing for a shape."""
    if num_rows > 64:
        return _many_rows_candidates(num_rows, n, k)
    dots = [(64, 128, 4, 6), (64, 256, 4, 3), (32, 256, 4, 4), (32, 512, 4, 3), (32, 256, 4, 6), (64, 128, 4, 4),
            (16, 512, 4, 4)]  # fmt: skip
    if num_rows > 32:
        dots = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (64, 64, 4, 8), (32, 128, 4, 5), (64, 128, 8, 4),
                (128, 64, 8, 5), (128, 128, 8, 3), (128, 128, 8, 4)]  # fmt: skip
    cuts = [(bn, bk, s, warps, stages) for bn, bk, warps, stages in dots for s in (1, 2, 4)]
    found = [
        GemvConfig(*cut, prefetch=prefetch)
        for cut in cuts
        for prefetch in (0, 256, 512)
        if k % (cut[2] * cut[1]) == 0 and (cut[2] == 1 or n // cut[0] * cut[2] <= 600) and n // cut[0] * cut[2] >= 60
    ]
    if num_rows > 1:
        return found
    fmas = [(8, 512, 1, 4, 4), (8, 512, 1, 4, 6), (8, 1024, 1, 4, 1), (4, 1024, 1, 4, 1), (16, 512, 1, 4, 4),
            (4, 512, 1, 2, 6), (4, 1024, 1, 4, 3), (16, 256, 1, 4, 6), (8, 256, 1, 2, 8)]  # fmt: skip
    return [
        GemvConfig(*cut, uses_dot=False, prefetch=prefetch)
        for cut in fmas
        for prefetch in (0, 512, 1024, 2048, 4096)
        if k % cut[1] == 0 and prefetch <= k
    ]


def _many_rows_candidates(num_rows: int, n: int, k: int) -> list[GemvConfig]:
    """Return tiles of rows x features with splits of K that fill the device about once."""
    tiles = [(64, 64, 4, 6), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)]  # n, k, warps, stages
    found = []
    for block_m in (64, 128, 256):
        for block_n, block_k, warps, stages in tiles:
            for splits in (1, 2, 4, 8):
                shared = (block_m + block_n) * block_k * 2 * stages
                programs = -(-num_rows // block_m) * (n // block_n) * splits
                fits = shared <= 224 * 1024 and block_m * block_n <= 64 * 256 * (warps // 4)
                if fits and block_m <= max(128, num_rows) and k % (splits * block_k) == 0 and 60 <= programs <= 800:
                    found += [GemvConfig(block_n, block_k, splits, warps, stages, prefetch=p, block_m=block_m)
                              for p in (0, 256)]  # fmt: skip
    return found


def bench_gemv(*, sweep: bool) -> list[dict[str, object]]:
    """Measure µs of x @ w.T per shape and rows, for the chosen config, cuBLAS, and with `sweep` every candidate."""
    results: list[dict[str, object]] = []
    scratch = SplitKScratch.allocate(torch.device("cuda"), capacity=1 << 22)
    pool = torch.randn(128256 * 4096 * 2, **BF16_CUDA) * 0.05
    for name, (n, k) in GEMV_SHAPES.items():
        copies = num_copies(n * k * 2)
        weights = pool[: copies * n * k].view(copies, n, k).unbind()
        for num_rows in (*GEMV_ROWS, *MANY_ROWS) if sweep else GEMV_ROWS:
            x = torch.randn(num_rows, k, **BF16_CUDA)
            expected = x.double() @ weights[-1].double().T if n < 100_000 else (x @ weights[-1].T).double()
            cublas_us = time_graph([functools.partial(functional.linear, x, w) for w in weights])
            default = gemv_config(num_rows=num_rows, n=n, k=k)
            candidates = gemv_candidates(num_rows, n, k) if sweep else []
            chosen = [(default, True), (default, False)] if num_rows <= MAX_ROWS else []
            for config, pdl in [*chosen, *((c, True) for c in candidates)]:
                try:
                    out = gemv(x, weights[-1], None, scratch, config=config, pdl=pdl)
                except Exception as failure:  # this config does not fit the device
                    print("gemv", name, num_rows, config, type(failure).__name__, flush=True)
                    continue
                error = float((out.double() - expected).norm() / expected.norm())
                assert error < 6e-3, (name, num_rows, config, error)
                us = time_graph([functools.partial(gemv, x, w, None, scratch, config=config, pdl=pdl) for w in weights])
                results.append({"kind": "gemv", "case": f"{name} M{num_rows}", "config": str(config), "pdl": pdl,
                                "us": us, "tb_s": n * k * 2 / us * 1e-6, "cublas_us": cublas_us, "error": error,
                                "is_default": config == default})  # fmt: skip
    return results


def bench_elementwise() -> list[dict[str, object]]:
    """Measure µs and TB/s of each row op at hidden sizes of both models; torch_us is the specification's time."""
    results: list[dict[str, object]] = []
    for tokens in (1, 64, 4096):
        for hidden, heads, inner in ((1024, 16, 3072), (4096, 32, 14336)):
            for name, num_bytes, ours, spec in _elementwise_cases(tokens, hidden, heads, inner):
                us, torch_us = time_graph(ours), time_graph(spec[:8])
                results.append({"kind": "elementwise", "case": f"{name} T{tokens} hidden{hidden}", "us": us,
                                "tb_s": num_bytes / us * 1e-6, "torch_us": torch_us})  # fmt: skip
    return results


def compile_jobs(*, sweep: bool) -> list[Callable[[], object]]:
    """Launch every config that bench_gemv times, on tiny inputs."""

    def run(config: GemvConfig, num_rows: int, pdl: bool) -> None:
        k = config.block_k * config.splits * 2
        scratch = allocate_scratch(torch.device("cuda"))
        x, w = torch.randn(num_rows, k, **BF16_CUDA), torch.randn(256, k, **BF16_CUDA)
        gemv(x, w, None, scratch, config=config, pdl=pdl)

    wanted: dict[tuple[GemvConfig, int, bool], None] = {}
    for n, k in GEMV_SHAPES.values():
        for num_rows in (*GEMV_ROWS, *MANY_ROWS) if sweep else GEMV_ROWS:
            padded = num_rows if num_rows == 1 else max(8, num_rows)
            default = gemv_config(num_rows=num_rows, n=n, k=k)
            if num_rows <= MAX_ROWS:
                wanted |= {(default, padded, True): None, (default, padded, False): None}
            wanted |= {(c, padded, True): None for c in (gemv_candidates(num_rows, n, k) if sweep else [])}
    return [functools.partial(run, *job) for job in wanted]


def _elementwise_cases(
    tokens: int, hidden: int, heads: int, inner: int
) -> list[tuple[str, int, list[Callable[[], object]], list[Callable[[], object]]]]:
    """(name, bytes moved, our calls, the specification's calls), inputs rotated."""
    copies = num_copies(tokens * hidden * 4)
    xs, residuals = ([torch.randn(tokens, hidden, **BF16_CUDA) for _ in range(copies)] for _ in range(2))
    weight, head_weight = torch.randn(hidden, **BF16_CUDA), torch.randn(128, **BF16_CUDA)
    gates = [torch.randn(tokens, 2 * inner, **BF16_CUDA) for _ in range(num_copies(tokens * inner * 4))]
    width = (heads + 16) * 128
    qkvs = [torch.randn(tokens, width, **BF16_CUDA) for _ in range(num_copies(tokens * width * 2))]
    caches = (torch.zeros(512, 16, 8, 128, **BF16_CUDA), torch.zeros(512, 16, 8, 128, **BF16_CUDA))
    positions, angles = torch.arange(tokens, device="cuda"), torch.randn(8192, 128, **BF16_CUDA)
    slots = torch.randperm(512 * 16, device="cuda")[:tokens]

    def fused(qkv: torch.Tensor) -> torch.Tensor:
        return triton_write_kv.norm_rope_write_kv(
            qkv, head_weight, head_weight, 1e-6, positions, angles, *caches, slots, num_heads=heads, pdl=True
        )

    def composed(qkv: torch.Tensor) -> None:
        q, k, v = qkv.view(tokens, -1, 128).split([heads, 8, 8], dim=1)
        q, k = (elementwise.rms_norm(part, head_weight, 1e-6) for part in (q, k))
        elementwise.apply_rope(q, k, positions, angles)
        caches[0].view(-1, 8, 128).index_copy_(0, slots, k)
        caches[1].view(-1, 8, 128).index_copy_(0, slots, v)

    def calls(
        function: Callable[..., object], *columns: Sequence[object], **options: bool
    ) -> list[Callable[[], object]]:
        return [functools.partial(function, *row, **options) for row in zip(*columns, strict=True)]

    weights, eps = [weight] * copies, [1e-6] * copies
    twin = elementwise_triton
    return [
        ("add_rms_norm", tokens * hidden * 8, calls(twin.add_rms_norm, xs, residuals, weights, eps, pdl=True),
         calls(elementwise.add_rms_norm, xs, residuals, weights, eps)),
        ("silu_and_mul", tokens * inner * 6, calls(twin.silu_and_mul, gates, pdl=True),
         calls(elementwise.silu_and_mul, gates)),
        ("norm_rope_write_kv", tokens * width * 4, calls(fused, qkvs), calls(composed, qkvs)),
    ]  # fmt: skip
