"""Routed experts in integers: what awq.py, gptq.py and compressed_tensors.py have in common for them.

Each expert's tensors are read as those of a linear layer are (IntScheme.read), and repacked once to one IntMatrix for
all experts of a layer (kernels/moe/storage_int.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.linear.reference import to_half
from kernels.moe.planes import int_planes_bytes
from kernels.moe.storage_int import IntMatrix, int_matrix_bytes, pack_codes, pack_groups
from models.errors import ModelError
from models.quantization.integers import INT_SCALES, IntPart, IntScheme, round_dense
from models.quantization.linear_method import LinearPart
from models.quantization.shards import StoredPart, check_scales, part_of_expert, read_dense
from models.weights.weights import Weights


def load_int_experts(scheme: IntScheme, w: Weights, experts: range, parts: Sequence[LinearPart]) -> IntMatrix:
    """See EachExpert.load_each."""
    n, k = parts[0].outputs, parts[0].inputs
    words: torch.Tensor | None = None
    scales: list[torch.Tensor] = []
    zeros: list[torch.Tensor | None] = []
    for row, expert in enumerate(experts):
        for place, part in enumerate(parts):
            read = _read(scheme, w / f"experts.{expert}", part)
            packed = pack_codes(read.codes, scheme.bits)
            if words is None:
                shape = (len(experts), len(parts), *packed.shape)
                words = torch.empty(shape, dtype=packed.dtype, device=packed.device)
            words[row, place] = packed
            scales.append(read.scales)
            zeros.append(read.zeros)
    assert words is not None
    common = scales if len({each.dtype for each in scales}) == 1 else [each.float() for each in scales]
    stacked = torch.stack(common)
    if not w.is_random:
        check_scales(stacked, part_of_expert(w, experts, parts), *INT_SCALES, is_signed=True)
    # [E * parts, G, n] → [E, parts * n, G]
    grouped = to_half(stacked).transpose(1, 2).reshape(len(experts), len(parts) * n, -1)
    points = _merge_zeros(zeros, scheme.bits, is_random=w.is_random)
    if points is not None:
        points = points.transpose(1, 2).reshape(grouped.shape)
    return IntMatrix(
        words=words.flatten(1, 2),
        groups=pack_groups(grouped, points),
        in_features=k,
        num_groups=grouped.shape[2],
        bits=scheme.bits,
        scale_dtype=grouped.dtype,
        has_zeros=points is not None,
    )


def int_experts_limit(scheme: IntScheme) -> str | None:
    """See PackedExperts.experts_limit."""
    if scheme.has_order and scheme.group_size is not None:
        return "desc_act (or actorder) with groups is not supported for experts: each would order its inputs by itself"
    per_word = 32 // scheme.bits
    if scheme.group_size is not None and scheme.group_size % per_word != 0:
        return f"group_size {scheme.group_size} of experts must be a multiple of {per_word}"
    return None


def int_experts_bytes(scheme: IntScheme, out_features: int, in_features: int) -> int:
    """See PackedExperts.expert_bytes."""
    num_groups, has_zeros = _num_groups(scheme, in_features), not scheme.is_symmetric
    return int_matrix_bytes(out_features, in_features, bits=scheme.bits, num_groups=num_groups, has_zeros=has_zeros)


def int_experts_planes_bytes(scheme: IntScheme, out_features: int, in_features: int) -> int | None:
    """See ArrangedExperts.planes_bytes."""
    num_groups, has_zeros = _num_groups(scheme, in_features), not scheme.is_symmetric
    return int_planes_bytes(out_features, in_features, bits=scheme.bits, num_groups=num_groups, has_zeros=has_zeros)


def _num_groups(scheme: IntScheme, in_features: int) -> int:
    return 1 if scheme.group_size is None else -(-in_features // scheme.group_size)


def _read(scheme: IntScheme, w: Weights, part: LinearPart) -> IntPart:
    """Read this rank's part of one expert. Raises ModelError, also for what linear layers have and experts do not."""
    stored = StoredPart.locate(w, part)
    if w.is_random:
        return round_dense(read_dense(w, part), stored, scheme)
    read = scheme.read(stored)
    if read.group_of is not None:
        raise ModelError(f"{stored.name}: its inputs are ordered by group (g_idx), which is not supported for experts")
    if read.bias is not None:
        raise ModelError(f"{stored.name}: the quantiser's bias is not zero, which is not supported for experts")
    return read


def _merge_zeros(zeros: Sequence[torch.Tensor | None], bits: int, *, is_random: bool) -> torch.Tensor | None:
    """Stack zero points [G, n]; None if each is in the middle of the range, as symmetric checkpoints may store them."""
    stored = [each for each in zeros if each is not None]
    if not stored:
        return None
    middle = torch.full_like(stored[0], 1 << (bits - 1))
    merged = torch.stack([middle if each is None else each for each in zeros])
    return merged if is_random or bool((merged != middle).any()) else None
