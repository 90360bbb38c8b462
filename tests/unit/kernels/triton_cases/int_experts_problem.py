"""Mixtures whose experts are random integers, for the interpreter's cases and the GPU tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.moe.storage_int import IntMatrix, pack_codes, pack_groups
from tests.unit.kernels.triton_cases.moe_problem import Problem


@dataclass(frozen=True)
class Integers:
    """How experts are stored. group_size -1: one scale for each output."""

    bits: int = 4
    group_size: int = 32
    has_zeros: bool = True
    scale_dtype: torch.dtype = torch.float16


# What published checkpoints have, and odd ones
STORAGES = {
    "awq": Integers(group_size=128),
    "gptq": Integers(group_size=128, has_zeros=False),
    "gptq_8bit": Integers(bits=8, group_size=128, has_zeros=False),
    "packed": Integers(has_zeros=False, scale_dtype=torch.bfloat16),
    "packed_asymmetric": Integers(group_size=64, scale_dtype=torch.bfloat16),
    "packed_channel": Integers(group_size=-1, has_zeros=False, scale_dtype=torch.bfloat16),
    "packed_8bit": Integers(bits=8, group_size=-1, has_zeros=False, scale_dtype=torch.bfloat16),
    "8bit_zeros": Integers(bits=8),
    "channel_zeros": Integers(group_size=-1),
    "odd_groups": Integers(group_size=24),
    "odd_groups_8bit": Integers(bits=8, group_size=12, has_zeros=False),
}


def random_integers(num_experts: int, n: int, k: int, kind: Integers, generator: torch.Generator) -> IntMatrix:
    """Weights of about the width 1 / sqrt(k)."""
    num_groups = 1 if kind.group_size == -1 else k // kind.group_size
    assert kind.group_size == -1 or k % kind.group_size == 0
    drawn = {"generator": generator, "device": generator.device}
    codes = torch.randint(0, 1 << kind.bits, (num_experts, n, k), dtype=torch.uint8, **drawn)
    shape = (num_experts, n, num_groups)
    zeros = torch.randint(0, 1 << kind.bits, shape, dtype=torch.uint8, **drawn) if kind.has_zeros else None
    scales = (torch.rand(shape, **drawn) + 0.5).mul(3.0 / ((1 << kind.bits) * k**0.5)).to(kind.scale_dtype)
    return IntMatrix(
        pack_codes(codes, kind.bits), pack_groups(scales, zeros), k, num_groups, kind.bits, kind.scale_dtype,
        has_zeros=kind.has_zeros,
    )  # fmt: skip


def pack_integers(problem: Problem, kind: Integers, *, seed: int = 0) -> Problem:
    """Give a problem random experts in integers."""
    generator = torch.Generator(problem.x.device).manual_seed(seed)
    return replace(
        problem,
        gate_up=random_integers(*problem.gate_up.shape, kind, generator),
        down=random_integers(*problem.down.shape, kind, generator),
    )
