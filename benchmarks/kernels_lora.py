"""LoRA kernels on a linear layer: checked, then timed beside the layer's own product."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from benchmarks.kernel_timing import BF16_CUDA, num_copies, time_graph
from kernels.lora.reference import LoraWeights
from kernels.lora.triton import LoraTiles, add_lora, group_tokens

# name → (outputs of each part, K)
_SHAPES = {
    "0.6B qkv": ((2048, 1024, 1024), 1024), "0.6B down": ((1024,), 3072), "8B qkv": ((4096, 1024, 1024), 4096),
    "8B gate_up": ((14336, 14336), 4096), "8B down": ((4096,), 14336),
}  # fmt: skip
_TOKENS = (1, 32, 256, 2048)
_CASES = ((1, 16), (8, 16), (8, 64))  # adapters, rank


def bench_lora() -> list[dict[str, object]]:
    """Measure µs of grouping a step's tokens and of adding one layer's adapters; cublas_us: the layer's own product."""
    results: list[dict[str, object]] = []
    for num_adapters, rank in _CASES:
        for num_tokens in _TOKENS:
            tiles, loras, us = _group(num_tokens, num_adapters)
            case = f"group T{num_tokens} adapters{num_adapters}"
            results.append({"kind": "lora", "case": case, "us": us})
            for name, (part_sizes, k) in _SHAPES.items():
                for pdl in (True, False):
                    us, cublas_us, error = _add(part_sizes, k, rank, tiles, loras, pdl=pdl)
                    case = f"{name} T{num_tokens} adapters{num_adapters} r{rank}"
                    results.append({"kind": "lora", "case": case, "pdl": pdl, "us": us, "cublas_us": cublas_us,
                                    "error": error})  # fmt: skip
    return results


def _group(num_tokens: int, num_adapters: int) -> tuple[LoraTiles, torch.Tensor, float]:
    """Group tokens of all adapters in turn, as in decoding: the tiles, each token's adapter, and the time."""
    loras = (torch.arange(num_tokens, device="cuda") % num_adapters + 1).to(torch.int32)
    rows = torch.arange(num_tokens, device="cuda")
    tiles = LoraTiles.allocate(num_adapters=num_adapters, max_tokens=num_tokens, device=torch.device("cuda"))
    us = time_graph([functools.partial(group_tokens, loras, rows, None, tiles)] * 8)
    return tiles, loras, us


def _add(
    part_sizes: tuple[int, ...], k: int, rank: int, tiles: LoraTiles, loras: torch.Tensor, *, pdl: bool
) -> tuple[float, float, float]:
    """Time of the adapters, time of the product, relative error."""
    num_adapters, num_tokens, num_outputs = tiles.num_adapters, loras.shape[0], sum(part_sizes)
    num_bytes = 2 * (num_adapters * rank * (len(part_sizes) * k + num_outputs) + num_tokens * (k + num_outputs))
    layers = [
        LoraWeights(
            torch.randn(num_adapters, len(part_sizes), rank, k, **BF16_CUDA) * k**-0.5,
            torch.randn(num_adapters, num_outputs, rank, **BF16_CUDA),
            part_sizes,
        )
        for _ in range(num_copies(num_bytes))
    ]
    x, out = torch.randn(num_tokens, k, **BF16_CUDA), torch.zeros(num_tokens, num_outputs, **BF16_CUDA)
    add_lora(out, x, layers[0], tiles, pdl=pdl)
    error = _error(out, x, layers[0], loras)
    assert error < 6e-3, (part_sizes, k, rank, num_tokens, error)
    us = time_graph([functools.partial(add_lora, out, x, layer, tiles, pdl=pdl) for layer in layers])
    weights = [torch.randn(num_outputs, k, **BF16_CUDA) for _ in range(min(8, num_copies(2 * num_outputs * k)))]
    return us, time_graph([functools.partial(functional.linear, x, weight) for weight in weights]), error


def _error(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, loras: torch.Tensor) -> float:
    expected = torch.zeros_like(out, dtype=torch.float64)
    for index in range(weights.a.shape[0]):
        rows = loras == index + 1
        parts = zip(weights.a[index].double(), weights.b[index].double().split(weights.part_sizes), strict=True)
        expected[rows] = torch.cat([x[rows].double() @ a.T @ b.T for a, b in parts], dim=1)
    return float((out.double() - expected).norm() / expected.norm())
