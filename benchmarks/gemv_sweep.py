"""Which tiles make skinny products fastest, over shapes that no table names: python -m benchmarks.gemv_sweep.

[--part I/N] [--rows 8 16 32 64] [--seconds S] [--json FILE]

Each product stands behind a norm in a CUDA graph with early launches and weights that L2 does not have; us are of both.
served: what gemv_config chooses. Each candidate is first compared with float32. Needs a Hopper GPU and Triton.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from triton.errors import TritonError

from benchmarks.kernel_timing import BF16_CUDA, machine_facts, num_copies, time_graph
from kernels.elementwise.triton import add_rms_norm
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_gemv import GemvConfig, allocate_scratch, gemv, gemv_config
from kernels.precompile import Compilation, collect_kernels

if TYPE_CHECKING:
    from benchmarks.report import Report

# (outputs, inputs) of QKV or a mixer, its output, gates and ups, and down
SHAPES = {
    "Llama-3.2-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "Qwen3.5-35B-A3B": ((12352, 2048), (9216, 2048), (2048, 4096)),
    "Qwen3-4B": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "Qwen3.5-4B": ((12352, 2560), (10240, 2560), (18432, 2560), (2560, 9216)),
    "Llama-3.2-3B": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Gemma-2-9B": ((8192, 3584), (3584, 4096), (28672, 3584), (3584, 14336)),
    "Qwen3-14B": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
    "Mistral-Small-24B": ((6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768)),
}
_SHARED_BYTES = 224 * 1024
_MAX_STAGES = 8


def main() -> None:
    """Time every candidate of this part's shapes; print the served and the best ones, write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="I/N: every N-th shape from the I-th on")
    parser.add_argument("--sizes", nargs="+", metavar="NxK", default=[], help="outputs x inputs, instead of all shapes")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no case after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gemv_sweep needs a CUDA device.")
    torch.manual_seed(0)
    end_s = time.monotonic() + options.seconds
    part, num_parts = map(int, options.part.split("/"))
    shapes = list(dict.fromkeys(shape for shapes in SHAPES.values() for shape in shapes))[part::num_parts]
    if options.sizes:
        shapes = [(int(size.split("x")[0]), int(size.split("x")[1])) for size in options.sizes]
    scratch = allocate_scratch(BF16_CUDA["device"])
    results: list[Report] = []
    with collect_kernels() as kernels:
        for n, k in shapes:
            for rows in options.rows:
                for calls in _candidates(n, k, rows, scratch, copies=1).values():
                    calls[0]()
    if kernels:
        Compilation(list(kernels)).wait(lambda done, total: None)
    print(f"# {len(kernels)} kernels compiled, {end_s - time.monotonic():.0f} s left", flush=True)
    for result in _time_all(shapes, options.rows, scratch, end_s):
        results.append(result)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
        us = result["us"]
        best = min(us, key=us.__getitem__)
        floor = result["floor_us"]
        cells = [f"{name} {us[name]:6.2f} ({100 * floor / us[name]:3.0f} %)" for name in ("served", "cublas", best)]
        print(f"{result['n']:6} x {result['k']:6}, {result['rows']:2} rows: {' · '.join(cells)}", flush=True)


def _time_all(
    shapes: list[tuple[int, int]], all_rows: list[int], scratch: SplitKScratch, end_s: float
) -> Iterator[Report]:
    for n, k in shapes:
        for rows in all_rows:
            if time.monotonic() > end_s:
                print("# out of time")
                return
            candidates = _candidates(n, k, rows, scratch, copies=num_copies(2 * n * k))
            us = {name: time_graph(calls, replays=7) for name, calls in candidates.items()}
            yield {"n": n, "k": k, "rows": rows, "floor_us": 2 * n * k / 3.35e6, "us": us}


def _candidates(
    n: int, k: int, rows: int, scratch: SplitKScratch, *, copies: int
) -> dict[str, list[Callable[[], object]]]:
    """Return each candidate's calls, one for each copy of the weights; those that a device cannot run are left out."""
    weights = [torch.randn(n, k, **BF16_CUDA) * k**-0.5 for _ in range(copies)]
    x, residual, norm = (torch.randn(*size, **BF16_CUDA) for size in ((rows, k), (rows, k), (k,)))
    exact = functional.linear(x.float(), weights[0].float())

    def by_gemv(config: GemvConfig | None, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return gemv(x, w, None, scratch, config=config, pdl=True)

    found: dict[str, list[Callable[[], object]]] = {}
    products: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"cublas": functional.linear}
    products["served"] = functools.partial(by_gemv, None)
    for config in _configs(n, k, rows):
        name = f"{config.block_n}x{config.block_k}/{config.splits} s{config.num_stages} w{config.num_warps}"
        products[f"{name} p{config.prefetch}"] = functools.partial(by_gemv, config)
    for name, product in products.items():
        if copies > 1 and not _is_right(f"{n} x {k}, {rows} rows, {name}", product, x, weights[0], exact):
            continue

        def call(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], w: torch.Tensor) -> torch.Tensor:
            return product(add_rms_norm(x, residual, norm, 1e-6, pdl=True)[0], w)

        found[name] = [functools.partial(call, product, w) for w in weights]
    return found


def _is_right(
    case: str,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    w: torch.Tensor,
    exact: torch.Tensor,
) -> bool:
    """Return True if the candidate runs and gives the product; say so if it gives another one."""
    try:
        error = float((product(x, w).float() - exact).abs().max() / exact.abs().max())
    except TritonError:  # its tiles do not fit the device
        return False
    if not error < 1e-2:
        print(f"WRONG {case}: {error:.1e}", flush=True)
    return error < 1e-2


def _configs(n: int, k: int, rows: int) -> list[GemvConfig]:
    """Return tiles that leave no multiprocessor far behind, and what is served."""
    m_pad = max(8, 1 << (rows - 1).bit_length())
    found = [gemv_config(num_rows=rows, n=n, k=k)]
    if rows == 1:
        for block_n, block_k, num_warps in (
            (2, 1024, 4),
            (4, 512, 2),
            (4, 1024, 4),
            (8, 512, 4),
            (8, 1024, 4),
            (16, 512, 4),
        ):
            if k % block_k == 0 or k % 512 != 0:
                found += [
                    GemvConfig(block_n, block_k, 1, num_warps, stages, uses_dot=False, prefetch=prefetch)
                    for stages in (1, 3, 6)
                    for prefetch in (512, 1024, 2048)
                    if prefetch <= k and n <= 65535 * block_n and block_n * block_k * stages * 2 <= _SHARED_BYTES // 2
                ]
        return list(dict.fromkeys(found))
    for block_n in (16, 32, 64, 128):
        for block_k in (64, 128, 256, 512):
            for splits in (1, 2, 4):
                programs = -(-n // block_n) * splits
                if programs < 100 or (splits > 1 and programs > 600) or programs > 2400 or k / splits < 2 * block_k:
                    continue
                if splits > 1 and programs * block_n * m_pad > 1 << 20:
                    continue
                stage = 2 * block_k * (block_n + m_pad)
                for share in (1, 2):  # of a multiprocessor's memory
                    stages = min(_MAX_STAGES, _SHARED_BYTES // share // stage, -(-k // splits // block_k))
                    if stages >= 2:
                        num_warps = 8 if block_n * m_pad >= 128 * 64 else 4
                        found.append(GemvConfig(block_n, block_k, splits, num_warps, stages))
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    main()
