"""Inputs of benchmarks/moe.py: shapes, random tensors, the device's lower bound, and torch's implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from kernels.elementwise.reference import silu_and_mul
from kernels.moe import reference as moe
from kernels.moe.storage import MXFP4_BLOCK, ExpertMatrix, Fp8Matrix, Mxfp4Matrix, dense_matrix

FP8_BLOCK = 128
H100_TB_S, H100_TFLOP_S = 3.35, 989.0  # SXM: device memory, dense bf16


@dataclass(frozen=True)
class MoeShape:
    """The sizes of one layer's experts."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    round_weights: bool
    storage: Literal["dense", "mxfp4", "fp8"] = "dense"

    @property
    def bytes_per_weight(self) -> float:
        """Of 16-bit weights, or of packed ones with their scales."""
        return {"dense": 2.0, "mxfp4": 0.5 + 1 / MXFP4_BLOCK, "fp8": 1 + 4 / FP8_BLOCK**2}[self.storage]


SHAPES = {
    "qwen3-30b-a3b": MoeShape(128, 8, 2048, 768, round_weights=True),
    "mixtral-8x7b": MoeShape(8, 2, 4096, 14336, round_weights=False),
    "qwen3-30b-a3b-fp8": MoeShape(128, 8, 2048, 768, round_weights=True, storage="fp8"),
    "gpt-oss-20b-mxfp4": MoeShape(32, 4, 2880, 2880, round_weights=True, storage="mxfp4"),
    "gpt-oss-120b-mxfp4": MoeShape(128, 4, 2880, 2880, round_weights=True, storage="mxfp4"),
}


@dataclass(frozen=True)
class MoeWeights:
    """[E, 2 * I, H] and [E, H, I]."""

    gate_up: ExpertMatrix
    down: ExpertMatrix


@dataclass(frozen=True)
class MoeInputs:
    """One step's tokens: [T, H] and [T, E]."""

    x: torch.Tensor
    logits: torch.Tensor


def make_weights(shape: MoeShape, *, dtype: torch.dtype, device: torch.device) -> MoeWeights:
    """Make random weights that keep the magnitude of activations."""
    count, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    sizes = ((2 * inner, hidden), (hidden, inner))
    if shape.storage == "mxfp4":
        return MoeWeights(*(_random_mxfp4(count, *size, device=device) for size in sizes))
    gate_up, down = (
        torch.empty(count, *size, dtype=dtype, device=device).normal_(0, size[1] ** -0.5) for size in sizes
    )
    if shape.storage == "fp8":
        return MoeWeights(_with_block_scales(gate_up, num_halves=2), _with_block_scales(down, num_halves=1))
    return MoeWeights(gate_up, down)


def _random_mxfp4(count: int, n: int, k: int, *, device: torch.device) -> Mxfp4Matrix:
    """Make weights whose width is a power of two near that of dense ones: codes have a root mean square of 3."""
    blocks = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, device=device)
    exponent = 127 + round(math.log2(k**-0.5 / 3))
    return Mxfp4Matrix(blocks, torch.full((count, n, k // MXFP4_BLOCK), exponent, dtype=torch.uint8, device=device))


def _with_block_scales(dense: torch.Tensor, *, num_halves: int) -> Fp8Matrix:
    count, n, k = dense.shape
    shape = (count, num_halves, -(-n // num_halves // FP8_BLOCK), -(-k // FP8_BLOCK))
    scales = torch.full(shape, 2.0**-8, dtype=torch.float32, device=dense.device)
    return Fp8Matrix((dense * 2.0**8).clamp(-448, 448).to(torch.float8_e4m3fn), scales, FP8_BLOCK, FP8_BLOCK)


def make_inputs(shape: MoeShape, num_tokens: int, *, dtype: torch.dtype, device: torch.device) -> MoeInputs:
    """Make tokens that choose their experts uniformly and independently."""
    x = torch.randn(num_tokens, shape.hidden_size, dtype=dtype, device=device)
    return MoeInputs(x, torch.randn(num_tokens, shape.num_experts, dtype=dtype, device=device))


def floor_us(shape: MoeShape, num_tokens: int, num_hit: float, *, tb_s: float, tflop_s: float) -> tuple[float, str]:
    """Return the lower bound in µs of reading each chosen expert once, or of multiplying, and which one limits."""
    per_expert = 3 * shape.hidden_size * shape.intermediate_size
    num_bytes = shape.bytes_per_weight * num_hit * per_expert + 4 * num_tokens * shape.hidden_size
    memory_us = num_bytes / tb_s * 1e-6
    compute_us = 2 * num_tokens * shape.top_k * per_expert / tflop_s * 1e-6
    return (memory_us, "memory") if memory_us >= compute_us else (compute_us, "compute")


def count_hit(shape: MoeShape, inputs: MoeInputs) -> int:
    """Count the experts that any token chooses."""
    return moe.route(inputs.logits, top_k=shape.top_k, renormalize=True)[1].unique().numel()


def specification(shape: MoeShape, weights: MoeWeights, inputs: MoeInputs) -> torch.Tensor:
    """Run kernels.moe.reference.fused_moe: expert by expert, waiting for the device."""
    return moe.fused_moe(
        inputs.x, inputs.logits, weights.gate_up, weights.down,
        top_k=shape.top_k, renormalize=True, round_weights=shape.round_weights,
    )  # fmt: skip


def exact(shape: MoeShape, weights: MoeWeights, inputs: MoeInputs) -> torch.Tensor:
    """Run the same in fp32 from the same tensors: [T, H] fp32."""
    routed, experts = moe.route(inputs.logits, top_k=shape.top_k, renormalize=True)
    out = torch.zeros(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    for expert in range(shape.num_experts):
        tokens, places = torch.where(experts == expert)
        inner = silu_and_mul(inputs.x[tokens].float() @ dense_matrix(weights.gate_up, expert, torch.bfloat16).float().T)
        values = inner @ dense_matrix(weights.down, expert, torch.bfloat16).float().T
        out.index_add_(0, tokens, values * routed[tokens, places, None])
    return out


def torch_grouped(shape: MoeShape, weights: MoeWeights, inputs: MoeInputs) -> torch.Tensor:
    """Run torch's implementation without a sync: a sort, its grouped GEMM twice, and the sum in the pairs' order.

    Only for dense experts.
    """
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    routed, experts = moe.route(inputs.logits, top_k=shape.top_k, renormalize=True)
    routed = routed.to(inputs.x.dtype) if shape.round_weights else routed
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(shape.num_experts, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    inner = functional.grouped_mm(inputs.x[order // shape.top_k], weights.gate_up.transpose(1, 2), offs=ends)
    sorted_out = functional.grouped_mm(silu_and_mul(inner), weights.down.transpose(1, 2), offs=ends)
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    return (out.view(*experts.shape, -1) * routed[..., None]).sum(1).to(inputs.x.dtype)
