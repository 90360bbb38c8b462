"""Inputs of benchmarks/moe.py: shapes, random tensors, the device's lower bound, and torch's implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn import functional

from kernels.e2m1 import MXFP4_BLOCK, NVFP4_BLOCK, quantize_nvfp4
from kernels.elementwise.reference import silu_and_mul
from kernels.linear.reference import BLOCK as LUT4_BLOCK
from kernels.linear.reference import FP8, quantize_nf4, quantize_rows
from kernels.moe import reference as moe
from kernels.moe.planes import PlanesMatrix, to_planes
from kernels.moe.storage import ExpertMatrix, Fp8Matrix, Mxfp4Matrix, dense_matrix
from kernels.moe.storage_int import IntMatrix, int_matrix_bytes, pack_codes, pack_groups
from kernels.moe.storage_lut4 import Lut4Matrix
from kernels.moe.storage_nvfp4 import Nvfp4Matrix

FP8_BLOCK = 128
# Of experts: "fp8" has scales by block, "fp8-rows" by output, as quantisation on load makes them
Storage = Literal["dense", "mxfp4", "fp8", "fp8-rows", "nvfp4", "nf4", "int"]


@dataclass(frozen=True)
class IntStorage:
    """How integers are stored: AWQ, for example, has 4 bits in groups of 128 with zero points."""

    bits: int
    group_size: int
    has_zeros: bool

    def matrix_bytes(self, n: int, k: int) -> int:
        """Return the bytes of one expert's matrix."""
        return int_matrix_bytes(
            n, k, bits=self.bits, num_groups=k // self.group_size, has_zeros=self.has_zeros
        )  # fmt: skip


@dataclass(frozen=True)
class MoeShape:
    """The sizes of one layer's experts."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    round_weights: bool
    storage: Storage = "dense"
    integers: IntStorage | None = None  # of storage "int"

    @property
    def bytes_per_weight(self) -> float:
        """Of 16-bit weights, or of packed ones with their scales."""
        if self.integers is not None:
            return self.integers.matrix_bytes(1, self.hidden_size) / self.hidden_size
        return {
            "dense": 2.0,
            "mxfp4": 0.5 + 1 / MXFP4_BLOCK,
            "fp8": 1 + 4 / FP8_BLOCK**2,
            "fp8-rows": 1 + 4 * (1 / self.hidden_size * 2 + 1 / self.intermediate_size) / 3,
            "nvfp4": 0.5 + 1 / NVFP4_BLOCK,
            "nf4": 0.5 + 4 / LUT4_BLOCK,
        }[self.storage]


_AWQ = IntStorage(4, 128, has_zeros=True)
_GPTQ = IntStorage(4, 128, has_zeros=False)
_GPTQ_8BIT = IntStorage(8, 128, has_zeros=False)
_INT4_BY_32 = IntStorage(4, 32, has_zeros=False)
SHAPES = {
    "qwen3-30b-a3b": MoeShape(128, 8, 2048, 768, round_weights=True),
    "mixtral-8x7b": MoeShape(8, 2, 4096, 14336, round_weights=False),
    "qwen3-30b-a3b-fp8": MoeShape(128, 8, 2048, 768, round_weights=True, storage="fp8"),
    "qwen3-30b-a3b-awq": MoeShape(128, 8, 2048, 768, round_weights=True, storage="int", integers=_AWQ),
    "qwen3-30b-a3b-gptq-8bit": MoeShape(128, 8, 2048, 768, round_weights=True, storage="int", integers=_GPTQ_8BIT),
    "glm-4.5-air-int4": MoeShape(128, 8, 4096, 1408, round_weights=False, storage="int", integers=_INT4_BY_32),
    "qwen3-30b-a3b-fp8-rows": MoeShape(128, 8, 2048, 768, round_weights=True, storage="fp8-rows"),
    "qwen3-30b-a3b-nvfp4": MoeShape(128, 8, 2048, 768, round_weights=True, storage="nvfp4"),
    "qwen3-30b-a3b-nf4": MoeShape(128, 8, 2048, 768, round_weights=True, storage="nf4"),
    "gpt-oss-20b-mxfp4": MoeShape(32, 4, 2880, 2880, round_weights=True, storage="mxfp4"),
    "gpt-oss-120b-mxfp4": MoeShape(128, 4, 2880, 2880, round_weights=True, storage="mxfp4"),
    "qwen3-30b-a3b-mxfp4": MoeShape(128, 8, 2048, 768, round_weights=True, storage="mxfp4"),
    "qwen3-next-80b-a3b-mxfp4": MoeShape(512, 10, 2048, 512, round_weights=True, storage="mxfp4"),
    "qwen3-next-80b-a3b-awq": MoeShape(512, 10, 2048, 512, round_weights=True, storage="int", integers=_AWQ),
    "glm-4.5-air-mxfp4": MoeShape(128, 8, 4096, 1408, round_weights=False, storage="mxfp4"),
    "glm-4.5-air-gptq": MoeShape(128, 8, 4096, 1408, round_weights=False, storage="int", integers=_GPTQ),
    "mixtral-8x7b-mxfp4": MoeShape(8, 2, 4096, 14336, round_weights=False, storage="mxfp4"),
    "deepseek-v3-mxfp4": MoeShape(256, 8, 7168, 2048, round_weights=False, storage="mxfp4"),
    "minimax-m2-mxfp4": MoeShape(256, 8, 3072, 1536, round_weights=False, storage="mxfp4"),
    "deepseek-v2-lite-mxfp4": MoeShape(64, 6, 2048, 1408, round_weights=False, storage="mxfp4"),
    "glm-4.7-flash-awq": MoeShape(64, 4, 2048, 1536, round_weights=False, storage="int", integers=_AWQ),
    "qwen3.5-35b-a3b": MoeShape(256, 8, 2048, 512, round_weights=True),
    "qwen3.5-35b-a3b-fp8": MoeShape(256, 8, 2048, 512, round_weights=True, storage="fp8"),
    "qwen3-next-80b-a3b": MoeShape(512, 10, 2048, 512, round_weights=True),
    "deepseek-v2-lite": MoeShape(64, 6, 2048, 1408, round_weights=False),
    "glm-4.7-flash": MoeShape(64, 4, 2048, 1536, round_weights=False),
    "lfm2-8b-a1b": MoeShape(32, 4, 2048, 1792, round_weights=False),
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


def make_weights(shape: MoeShape, *, dtype: torch.dtype, device: torch.device, is_arranged: bool = True) -> MoeWeights:
    """Make random weights that keep the magnitude of activations, arranged as a Hopper GPU serves them.

    is_arranged: False: as the row kernels take them.
    """
    arrange = to_planes if is_arranged else _keep
    count, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    sizes = ((2 * inner, hidden), (hidden, inner))
    if shape.storage == "mxfp4":
        return MoeWeights(*(arrange(_random_mxfp4(count, *size, device=device)) for size in sizes))
    if shape.integers is not None:
        integers = (_random_integers(shape.integers, count, *size, device=device) for size in sizes)
        return MoeWeights(*map(arrange, integers))
    gate_up, down = (
        torch.empty(count, *size, dtype=dtype, device=device).normal_(0, size[1] ** -0.5) for size in sizes
    )
    if shape.storage == "dense":
        return MoeWeights(gate_up, down)
    matrices = _packed(gate_up, shape.storage, num_halves=2), _packed(down, shape.storage, num_halves=1)
    return MoeWeights(*map(arrange, matrices))


def _keep(matrix: ExpertMatrix) -> ExpertMatrix:
    return matrix


def _packed(dense: torch.Tensor, storage: Storage, *, num_halves: int) -> ExpertMatrix:
    """Round each expert as quantisation on load does, or all alike to FP8 with scales by block."""
    if storage == "fp8":
        return _with_block_scales(dense, num_halves=num_halves)
    count, n, k = dense.shape
    if storage == "fp8-rows":
        values, scales = zip(*map(quantize_rows, dense), strict=True)
        octets = torch.stack([each.view(torch.uint8) for each in values])  # not every device stacks e4m3
        return Fp8Matrix(octets.view(FP8), torch.stack(scales).view(count, num_halves, n // num_halves, 1), 1, k)
    if storage == "nf4":
        values, scales = zip(*map(quantize_nf4, dense), strict=True)
        return Lut4Matrix(torch.stack(values), torch.stack(scales), "nf4")
    halves = dense.unflatten(1, (num_halves, -1)).flatten(0, 1)
    blocks, scales, factors = zip(*map(quantize_nvfp4, halves), strict=True)
    octets = torch.stack([each.view(torch.uint8) for each in scales]).view(count, n, -1)
    return Nvfp4Matrix(
        torch.stack(blocks).view(count, n, -1), octets.view(FP8), torch.stack(factors).view(count, num_halves)
    )


def share_of_experts(weights: MoeWeights, here: range) -> MoeWeights:
    """Return the weights of these experts alone, in the same memory."""

    def cut(matrix: ExpertMatrix) -> ExpertMatrix:
        part = slice(here.start, here.stop)
        if isinstance(matrix, Mxfp4Matrix):
            return Mxfp4Matrix(matrix.blocks[part], matrix.scales[part])
        if isinstance(matrix, Fp8Matrix):
            return Fp8Matrix(matrix.values[part], matrix.scales[part], matrix.rows, matrix.columns)
        if isinstance(matrix, PlanesMatrix):
            factors = None if matrix.factors is None else matrix.factors[part]
            return replace(matrix, words=matrix.words[part], scales=matrix.scales[part], factors=factors)
        if isinstance(matrix, IntMatrix):
            return replace(matrix, words=matrix.words[part], groups=matrix.groups[part])
        if isinstance(matrix, Nvfp4Matrix):
            return Nvfp4Matrix(matrix.blocks[part], matrix.scales[part], matrix.factors[part])
        if isinstance(matrix, Lut4Matrix):
            return replace(matrix, packed=matrix.packed[part], scales=matrix.scales[part])
        assert isinstance(matrix, torch.Tensor)
        return matrix[part]

    return MoeWeights(cut(weights.gate_up), cut(weights.down))


def _random_mxfp4(count: int, n: int, k: int, *, device: torch.device) -> Mxfp4Matrix:
    """Make weights whose width is a power of two near that of dense ones: codes have a root mean square of 3."""
    blocks = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, device=device)
    exponent = 127 + round(math.log2(k**-0.5 / 3))
    return Mxfp4Matrix(blocks, torch.full((count, n, k // MXFP4_BLOCK), exponent, dtype=torch.uint8, device=device))


def _random_integers(kind: IntStorage, count: int, n: int, k: int, *, device: torch.device) -> IntMatrix:
    """Make weights as wide as dense ones: integers less their zero points have a root mean square near top / 3."""
    shape = (count, n, k // kind.group_size)
    codes = torch.randint(0, 1 << kind.bits, (count, n, k), dtype=torch.uint8, device=device)
    scales = torch.full(shape, 3 * k**-0.5 / (1 << kind.bits), dtype=torch.float16, device=device)
    middle = 1 << (kind.bits - 1)
    zeros = torch.randint(middle - 2, middle + 3, shape, dtype=torch.uint8, device=device) if kind.has_zeros else None
    return IntMatrix(
        pack_codes(codes, kind.bits), pack_groups(scales, zeros), k, shape[2], kind.bits, torch.float16,
        has_zeros=kind.has_zeros,
    )  # fmt: skip


def _with_block_scales(dense: torch.Tensor, *, num_halves: int) -> Fp8Matrix:
    count, n, k = dense.shape
    shape = (count, num_halves, -(-n // num_halves // FP8_BLOCK), -(-k // FP8_BLOCK))
    scales = torch.full(shape, 2.0**-8, dtype=torch.float32, device=dense.device)
    return Fp8Matrix((dense * 2.0**8).clamp(-448, 448).to(torch.float8_e4m3fn), scales, FP8_BLOCK, FP8_BLOCK)


def make_inputs(shape: MoeShape, num_tokens: int, *, dtype: torch.dtype, device: torch.device) -> MoeInputs:
    """Make tokens that choose their experts uniformly and independently."""
    x = torch.randn(num_tokens, shape.hidden_size, dtype=dtype, device=device)
    return MoeInputs(x, torch.randn(num_tokens, shape.num_experts, dtype=dtype, device=device))


def floor_us(shape: MoeShape, num_tokens: int, num_hit: float, *, bytes_s: float, flops_s: float) -> tuple[float, str]:
    """Return the lower bound in µs of reading each chosen expert once, or of multiplying, and which one limits."""
    per_expert = 3 * shape.hidden_size * shape.intermediate_size
    num_bytes = shape.bytes_per_weight * num_hit * per_expert + 4 * num_tokens * shape.hidden_size
    memory_us = num_bytes / bytes_s * 1e6
    compute_us = 2 * num_tokens * shape.top_k * per_expert / flops_s * 1e6
    return (memory_us, "memory") if memory_us >= compute_us else (compute_us, "compute")


def count_hit(shape: MoeShape, inputs: MoeInputs) -> int:
    """Count the experts that any token chooses."""
    return moe.route(inputs.logits, top_k=shape.top_k, renormalize=True)[1].unique().numel()


def specification(shape: MoeShape, weights: MoeWeights, inputs: MoeInputs) -> torch.Tensor:
    """Run kernels.moe.reference.fused_moe: expert by expert, waiting for the device."""
    out = moe.fused_moe(
        inputs.x, inputs.logits, weights.gate_up, weights.down,
        top_k=shape.top_k, renormalize=True, round_weights=shape.round_weights,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


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
