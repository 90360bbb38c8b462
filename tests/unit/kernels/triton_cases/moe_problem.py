"""Random mixtures of experts, shared by the interpreter's cases and the GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks.moe_problem import MoeWeights, share_of_experts
from kernels.e2m1 import MXFP4_BLOCK, NVFP4_BLOCK
from kernels.linear.reference import BLOCK as LUT4_BLOCK
from kernels.moe import reference as moe
from kernels.moe.storage import ExpertMatrix, Fp8Matrix, Mxfp4Matrix
from kernels.moe.storage_lut4 import Lut4Matrix
from kernels.moe.storage_nvfp4 import Nvfp4Matrix


@dataclass(frozen=True)
class Problem:
    """The tensors of kernels.moe.reference.fused_moe, and how it routes."""

    x: torch.Tensor
    logits: torch.Tensor
    gate_up: ExpertMatrix
    down: ExpertMatrix
    shared: torch.Tensor | None
    top_k: int
    renormalize: bool
    round_weights: bool
    gate: moe.Gate = moe.SILU
    biases: moe.ExpertBiases | None = None
    expert_scales: torch.Tensor | None = None
    given: torch.Tensor | None = None
    floor: float = 0.0
    added: float = 0.0
    factor: float = 1.0
    first_expert: int = 0
    choice: moe.Choice | None = None

    def call(self, function, **options):
        """function: kernels.moe.reference.fused_moe or its twin."""
        return function(
            self.x, self.logits, self.gate_up, self.down, top_k=self.top_k, renormalize=self.renormalize,
            round_weights=self.round_weights, shared=self.shared, given=self.given, floor=self.floor, added=self.added,
            factor=self.factor, gate=self.gate, biases=self.biases, expert_scales=self.expert_scales,
            first_expert=self.first_expert, choice=self.choice, **options,
        )  # fmt: skip

    def of_experts(self, here: range):
        """The share of a rank that has these experts alone. `shared` stays: it is a part of the sum of each rank."""
        weights = share_of_experts(MoeWeights(self.gate_up, self.down), here)
        biases, part = self.biases, slice(here.start, here.stop)
        if biases is not None:
            biases = moe.ExpertBiases(biases.gate_up[part], biases.down[part])
        return replace(self, gate_up=weights.gate_up, down=weights.down, biases=biases, first_expert=here.start)

    def exact(self):
        """The same in float64, by the experts that the specification chooses: [T, H]."""
        num_experts = self.gate_up.shape[0]
        weights, experts = moe.route(
            self.logits[:, :num_experts], top_k=self.top_k, renormalize=self.renormalize, given=self.given,
            floor=self.floor, added=self.added, factor=self.factor, expert_scales=self.expert_scales,
        )  # fmt: skip
        inner = torch.einsum("th,eih->tei", self.x.double(), self.gate_up.double())
        if self.biases is not None:
            inner += self.biases.gate_up.double()
        joined = moe.gate_and_mul(inner.flatten(0, 1), self.gate).unflatten(0, inner.shape[:2])
        out = torch.einsum("tei,ehi->teh", joined, self.down.double())
        if self.biases is not None:
            out += self.biases.down.double()
        out = out.gather(1, experts[..., None].expand(-1, -1, out.shape[-1]))
        mixed = (out * weights[..., None]).sum(1)
        if self.shared is None:
            return mixed
        return mixed + self.logits[:, num_experts:].double().sigmoid() * self.shared.double()


def make_problem(
    *,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    has_shared: bool = False,
    gate: moe.Gate = moe.SILU,
    has_biases: bool = False,
    has_scales: bool = False,
    renormalize: bool = True,
    round_weights: bool = True,
    skew: float = 1.0,  # the larger, the more tokens share their experts
    seed: int = 0,
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    biases = None
    if has_biases:
        up_bias, down_bias = randn(num_experts, gate.num_halves * intermediate_size), randn(num_experts, hidden_size)
        biases = moe.ExpertBiases(up_bias.to(dtype), down_bias.to(dtype))
    logits = randn(num_tokens, num_experts + has_shared) + skew * randn(num_experts + has_shared)
    return Problem(
        x=randn(num_tokens, hidden_size).to(dtype),
        logits=logits.to(dtype),
        gate_up=(randn(num_experts, gate.num_halves * intermediate_size, hidden_size) / hidden_size**0.5).to(dtype),
        down=(randn(num_experts, hidden_size, intermediate_size) / intermediate_size**0.5).to(dtype),
        shared=randn(num_tokens, hidden_size).to(dtype) if has_shared else None,
        top_k=top_k,
        renormalize=renormalize,
        round_weights=round_weights,
        gate=gate,
        biases=biases,
        expert_scales=randn(num_experts) if has_scales else None,
    )


def pack_experts(problem: Problem, storage: str, *, block: int = 32, seed: int = 0) -> Problem:
    """Give a problem random experts in a storage, one of PACKS. block: sides of the squares of "fp8"."""
    pack = PACKS[storage]
    generator = torch.Generator(problem.x.device).manual_seed(seed)
    return replace(
        problem,
        gate_up=pack(problem.gate_up, problem.gate.num_halves, block, generator),
        down=pack(problem.down, 1, block, generator),
    )


def _random_mxfp4(like: torch.Tensor, num_halves: int, block: int, generator: torch.Generator) -> Mxfp4Matrix:
    """Weights of about `like`'s size: the codes' mean square is 9, and an exponent is 2 below like's, 3 or 4."""
    num_experts, n, k = like.shape
    exponent = round(float(torch.log2(like.float().std()))) - 1 + 127
    options = {"generator": generator, "device": like.device, "dtype": torch.uint8}
    return Mxfp4Matrix(
        torch.randint(0, 256, (num_experts, n, k // 2), **options),
        torch.randint(exponent - 2, exponent + 1, (num_experts, n, k // MXFP4_BLOCK), **options),
    )


def _random_fp8(like: torch.Tensor, num_halves: int, block: int, generator: torch.Generator) -> Fp8Matrix:
    num_experts, n, k = like.shape
    rows, columns = -(-n // num_halves // block), -(-k // block)
    scales = torch.rand(num_experts, num_halves, rows, columns, generator=generator, device=like.device) + 0.5
    return Fp8Matrix(like.to(torch.float8_e4m3fn), scales, block, block)


def _random_fp8_rows(like: torch.Tensor, num_halves: int, block: int, generator: torch.Generator) -> Fp8Matrix:
    num_experts, n, k = like.shape
    scales = torch.rand(num_experts, num_halves, n // num_halves, 1, generator=generator, device=like.device) + 0.5
    return Fp8Matrix(like.to(torch.float8_e4m3fn), scales, 1, k)


def _random_nvfp4(like: torch.Tensor, num_halves: int, block: int, generator: torch.Generator) -> Nvfp4Matrix:
    """Weights of about `like`'s size: the codes' mean square is 9, and scales are 0.5 to 1.5 times some factor."""
    num_experts, n, k = like.shape
    packed = torch.randint(0, 256, (num_experts, n, k // 2), generator=generator, device=like.device, dtype=torch.uint8)
    scales = torch.rand(num_experts, n, k // NVFP4_BLOCK, generator=generator, device=like.device) + 0.5
    factors = torch.rand(num_experts, num_halves, generator=generator, device=like.device) + 0.5
    return Nvfp4Matrix(packed, (100 * scales).to(torch.float8_e4m3fn), factors * like.float().std() / 300)


def _random_lut4(kind: Literal["nf4", "fp4"], like: torch.Tensor, generator: torch.Generator) -> Lut4Matrix:
    num_experts, n, k = like.shape
    packed = torch.randint(0, 256, (num_experts, n, k // 2), generator=generator, device=like.device, dtype=torch.uint8)
    scales = torch.rand(num_experts, n, k // LUT4_BLOCK, generator=generator, device=like.device) + 0.5
    return Lut4Matrix(packed, 2 * like.float().std() * scales, kind)


# storage → random experts of the size of others: (those, halves, sides of a block, generator)
PACKS: dict[str, Callable[[torch.Tensor, int, int, torch.Generator], ExpertMatrix]] = {
    "mxfp4": _random_mxfp4,
    "fp8": _random_fp8,
    "fp8_rows": _random_fp8_rows,
    "nvfp4": _random_nvfp4,
    "nf4": lambda like, num_halves, block, generator: _random_lut4("nf4", like, generator),
    "fp4": lambda like, num_halves, block, generator: _random_lut4("fp4", like, generator),
}
