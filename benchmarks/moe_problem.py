"""Inputs of benchmarks/moe.py: shapes, random tensors, the device's lower bound, and torch's implementations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.elementwise.reference import silu_and_mul
from kernels.moe import reference as moe

H100_TB_S, H100_TFLOP_S = 3.35, 989.0  # SXM: device memory, dense bf16


@dataclass(frozen=True)
class MoeShape:
    """The sizes of one layer's experts."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    round_weights: bool


SHAPES = {
    "qwen3-30b-a3b": MoeShape(128, 8, 2048, 768, round_weights=True),
    "mixtral-8x7b": MoeShape(8, 2, 4096, 14336, round_weights=False),
}


@dataclass(frozen=True)
class MoeWeights:
    """[E, 2 * I, H] and [E, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class MoeInputs:
    """One step's tokens: [T, H] and [T, E]."""

    x: torch.Tensor
    logits: torch.Tensor


def make_weights(shape: MoeShape, *, dtype: torch.dtype, device: torch.device) -> MoeWeights:
    """Make random weights that keep the magnitude of activations."""
    count, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype, device=device).normal_(0, hidden**-0.5)
    return MoeWeights(gate_up, torch.empty(count, hidden, inner, dtype=dtype, device=device).normal_(0, inner**-0.5))


def make_inputs(shape: MoeShape, num_tokens: int, *, dtype: torch.dtype, device: torch.device) -> MoeInputs:
    """Make tokens that choose their experts uniformly and independently."""
    x = torch.randn(num_tokens, shape.hidden_size, dtype=dtype, device=device)
    return MoeInputs(x, torch.randn(num_tokens, shape.num_experts, dtype=dtype, device=device))


def floor_us(shape: MoeShape, num_tokens: int, num_hit: float, *, tb_s: float, tflop_s: float) -> tuple[float, str]:
    """Return the lower bound in µs of reading each chosen expert once, or of multiplying, and which one limits."""
    per_expert = 3 * shape.hidden_size * shape.intermediate_size
    num_bytes = 2 * (num_hit * per_expert + 2 * num_tokens * shape.hidden_size)
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
        inner = silu_and_mul(inputs.x[tokens].float() @ weights.gate_up[expert].float().T)
        values = inner @ weights.down[expert].float().T
        out.index_add_(0, tokens, values * routed[tokens, places, None])
    return out


def torch_grouped(shape: MoeShape, weights: MoeWeights, inputs: MoeInputs) -> torch.Tensor:
    """Run torch's implementation without a sync: a sort, its grouped GEMM twice, and the sum in the pairs' order."""
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
