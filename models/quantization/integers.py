"""Common code of the integer formats: 4- or 8-bit weights with scales by group of inputs.

Each format (awq.py, gptq.py, compressed_tensors.py) is a Scheme that reads its tensors as an IntPart. All are repacked
once, on load, to the layout of kernels/linear/reference.py, and multiplied in that layout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch

from kernels.linear.int4_cpu import Int4Matrix, can_pack_int4, pack_int4
from kernels.linear.ops import DenseLinear, IntLinear
from kernels.linear.reference import BITS, IntWeight, int_weight_bytes, make_int_weight
from models.errors import ModelError
from models.fields import Fields
from models.quantization.linear_method import LinearPart
from models.quantization.shards import StoredPart, check_each, expected_dense, read_dense
from models.weights.headers import ExpectedTensor
from models.weights.weights import Weights

logger = logging.getLogger(__name__)

INT32 = (torch.int32,)
INT_SCALES = ("scales", "weight_scale")  # the names of a format's scales
ORDER_DTYPES = (torch.int32, torch.int64)  # of group numbers
_CACHED_NUMBERS = 1 << 17


@dataclass(frozen=True)
class IntPart:
    """This rank's share of a matrix: weight = (value - zero) * scale. N outputs, K inputs, G groups of inputs."""

    # [N, K] uint8
    codes: torch.Tensor
    # [G, N]
    scales: torch.Tensor
    # [G, N] uint8; None: 2^(bits - 1)
    zeros: torch.Tensor | None
    # [K] int64: the group of each input; None: groups of equally many neighbours
    group_of: torch.Tensor | None = None
    # [N] bias written by the quantiser, also for layers whose model has none; None: no bias, or zeros
    bias: torch.Tensor | None = None


@runtime_checkable
class IntScheme(Protocol):
    """A Scheme whose matrices are stored as integers."""

    @property
    def bits(self) -> int:
        """Bits of one weight."""
        ...

    @property
    def group_size(self) -> int | None:
        """Inputs per group; None: one group of all inputs."""
        ...

    @property
    def is_symmetric(self) -> bool:
        """True if every zero point is in the middle of the range, as config.json says."""
        ...

    @property
    def has_order(self) -> bool:
        """True if inputs belong to groups in an order of their own."""
        ...

    @property
    def has_model_scales(self) -> bool:
        """True if scales usually have the model's dtype; otherwise fp16."""
        ...

    def describe(self) -> str:
        """See Scheme.describe."""
        ...

    def read(self, part: StoredPart) -> IntPart:
        """Read the tensors of a part. Raises ModelError."""
        ...


@dataclass(frozen=True)
class IntParams:
    """A layer as blocks of outputs: one block, unless its parts order their inputs differently."""

    # a tensor is an unquantised [N, K] matrix
    blocks: tuple[IntWeight | Int4Matrix | torch.Tensor, ...]
    bias: torch.Tensor | None


class IntMethod:
    """LinearMethod of every IntScheme."""

    def __init__(self, scheme: IntScheme) -> None:
        self._scheme = scheme
        self._linear = IntLinear()
        self._dense_linear = DenseLinear()

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> IntParams:
        """See LinearMethod.load."""
        stored = [StoredPart.locate(w, part) for part in parts]
        if w.is_random or isinstance(self._scheme, Int4OnLoad):
            for share in stored:
                group_band(share, self._scheme.group_size)
            read = [
                round_dense(read_dense(w, part), share, self._scheme) for part, share in zip(parts, stored, strict=True)
            ]
        else:
            read = [self._scheme.read(part) for part in stored]
            check_each([part.scales for part in read], stored, *INT_SCALES, is_signed=True)
        blocks = [[read[0]]]
        for before, part in pairwise(read):
            if _have_one_order(before, part):
                blocks[-1].append(part)
            else:
                blocks.append([part])
        name = ", ".join(part.name for part in stored)
        # The sum over ranks must contain the bias only once
        holds_bias = parts[0].dim == 0 or parts[0].rank == 0
        return IntParams(
            blocks=tuple(_for_cpu(_store(block, self._scheme.bits, w.dtype, name=name), w.dtype) for block in blocks),
            bias=_merge_biases(read, w.dtype) if holds_bias else None,
        )

    def apply(self, params: IntParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply. The model's own bias is in the checkpoint too and replaces the quantiser's."""
        bias = params.bias if bias is None else bias
        if len(params.blocks) == 1:
            return self._multiply(params.blocks[0], x, bias)
        out = torch.cat([self._multiply(block, x, None) for block in params.blocks], dim=-1)
        return out if bias is None else out + bias

    def _multiply(
        self, block: IntWeight | Int4Matrix | torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(block, IntWeight | Int4Matrix):
            return self._linear(x, block, bias)
        return self._dense_linear(x, block, bias)


@dataclass(frozen=True)
class Int4OnLoad:
    """IntScheme and Scheme of --quantization int4: each group of inputs rounded to the nearest of 16 even steps."""

    group_size: int = 32
    bits: int = 4
    is_symmetric: bool = True
    has_order: bool = False
    has_model_scales: bool = False
    output_multiple: int = 1

    @property
    def input_multiple(self) -> int:
        """See Scheme.input_multiple."""
        return self.group_size

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"int4 ({describe_groups(self.bits, self.group_size)})"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return int_matrix_bytes(self, out_features, in_features, itemsize=itemsize)

    def make_method(self) -> IntMethod:
        """See Scheme.make_method."""
        return IntMethod(self)

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        return expected_dense(part)

    def read(self, part: StoredPart) -> IntPart:
        """Raise: no checkpoint has this format."""
        raise AssertionError(f"{part.name} is rounded on load")


def int_matrix_bytes(scheme: IntScheme, out_features: int, in_features: int, *, itemsize: int) -> int:
    """See Scheme.matrix_bytes."""
    num_groups = 1 if scheme.group_size is None else -(-in_features // scheme.group_size)
    return int_weight_bytes(out_features, in_features, bits=scheme.bits, num_groups=num_groups)


def make_int_method(scheme: IntScheme) -> IntMethod:
    """See Scheme.make_method."""
    return IntMethod(scheme)


def describe_groups(bits: int, group_size: int | None) -> str:
    """Return the part of Scheme.describe() that all formats share."""
    return f"{bits}-bit integers, " + ("scales by output" if group_size is None else f"groups of {group_size}")


def read_bits(fields: Fields, name: str = "bits", *, supported: tuple[int, ...] = BITS) -> int:
    """Read the bits of a weight. Raises ModelError."""
    bits = fields.count(name)
    if bits not in supported:
        raise ModelError(
            f"{fields.where}: {name} {bits} is not supported: supported are {', '.join(map(str, supported))}"
        )
    return bits


def read_group_size(fields: Fields, name: str = "group_size") -> int | None:
    """Read the inputs per scale; -1 in the file means all, returned as None."""
    return None if fields.get(name) == -1 else fields.count(name)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[A, B] int32 → [A, B * 32 / bits] uint8: the integers of each word, from its lowest bits."""
    # Flat first: a dimension of size 1 may have any stride and still be contiguous
    octets = words.contiguous().view(-1).view(torch.uint8).view(len(words), -1)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def group_band(part: StoredPart, group_size: int | None) -> tuple[int, range]:
    """Return a matrix's number of groups, and this rank's range of whole groups. Raises ModelError."""
    if group_size is None:
        return 1, range(1)
    if part.num_columns % group_size != 0:
        raise ModelError(
            f"{part.name} has {part.num_columns} inputs, which is not a multiple of group_size {group_size}"
        )
    return part.num_columns // group_size, range(part.columns.start // group_size, part.columns.stop // group_size)


def read_order(part: StoredPart, name: str, group_size: int | None, *, is_needed: bool) -> torch.Tensor | None:
    """Return IntPart.group_of from the tensor `name` [K] of group numbers, if it exists. Raises ModelError."""
    if not is_needed and part.find(name) is None:
        return None
    columns = part.columns
    group_of = part.w.stored(
        part.need(name), (part.num_columns,), ORDER_DTYPES, start=columns.start, stop=columns.stop
    ).long()
    num_groups, _ = group_band(part, group_size)
    inputs = torch.arange(columns.start, columns.stop, device=group_of.device)
    if bool((group_of == inputs // (group_size or part.num_columns)).all()) or bool((group_of == -1).all()):
        return None
    if int(group_of.min()) < 0 or int(group_of.max()) >= num_groups:
        raise ModelError(f"tensor {part.w.full_name(name)} has group numbers outside 0 to {num_groups - 1}")
    return group_of


def check_aligned(part: StoredPart, *, outputs: int = 1, inputs: int = 1) -> None:
    """Raise ModelError unless a part begins and ends at word boundaries of so many outputs or inputs."""
    for kind, share, multiple in (("outputs", part.rows, outputs), ("inputs", part.columns, inputs)):
        if share.start % multiple != 0 or len(share) % multiple != 0:
            raise ModelError(
                f"{part.name}: its {kind} {share.start} to {share.stop - 1} do not fill words of {multiple} integers"
            )


def _have_one_order(one: IntPart, other: IntPart) -> bool:
    if one.group_of is None or other.group_of is None:
        return one.group_of is other.group_of
    return torch.equal(one.group_of, other.group_of)


def _store(parts: Sequence[IntPart], bits: int, dtype: torch.dtype, *, name: str) -> IntWeight | torch.Tensor:
    """Merge parts with equal orders along their outputs, inputs sorted by group. name: for the log."""
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales for part in parts], dim=1)
    stored_zeros = [part.zeros for part in parts if part.zeros is not None]
    zeros = torch.cat(stored_zeros, dim=1) if stored_zeros else torch.full_like(scales, 1 << (bits - 1))
    group_of = parts[0].group_of
    if group_of is None:
        return make_int_weight(codes, scales, zeros, bits=bits)
    order = group_of.argsort(stable=True)
    groups, sizes = group_of[order].unique_consecutive(return_counts=True)
    if bool((sizes == sizes[0]).all()):
        return make_int_weight(codes[:, order], scales[groups], zeros[groups], bits=bits, order=order)
    # A rank's inputs in their own order have groups of any size
    logger.warning(
        "matrices=%s dequantized dtype=%s: this rank has parts of the groups that desc_act scattered", name, dtype
    )
    return ((codes.float() - zeros[group_of].T.float()) * scales[group_of].T.float()).to(dtype)


def _for_cpu(block: IntWeight | torch.Tensor, dtype: torch.dtype) -> IntWeight | Int4Matrix | torch.Tensor:
    return pack_int4(block, dtype) if isinstance(block, IntWeight) and can_pack_int4(block) else block


def _merge_biases(parts: Sequence[IntPart], dtype: torch.dtype) -> torch.Tensor | None:
    if all(part.bias is None for part in parts):
        return None
    biases = [torch.zeros_like(part.scales[0]) if part.bias is None else part.bias for part in parts]
    return torch.cat([bias.to(dtype) for bias in biases])


def round_dense(dense: torch.Tensor, part: StoredPart, scheme: IntScheme) -> IntPart:
    """Round to nearest between the minimum and maximum of each group: random weights as checkpoints, and on load.

    On the CPU in pieces whose fp32 numbers stay in a core's cache.
    """
    num_groups = len(group_band(part, scheme.group_size)[1])
    size = _CACHED_NUMBERS // dense.shape[1] + 1 if dense.device.type == "cpu" else len(dense)
    pieces = [_round_rows(piece, num_groups, scheme) for piece in dense.split(size)]
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return IntPart(
        torch.cat([piece.codes for piece in pieces]),
        torch.cat([piece.scales for piece in pieces], dim=1),
        torch.cat(zeros, dim=1) if zeros else None,
    )


def _round_rows(dense: torch.Tensor, num_groups: int, scheme: IntScheme) -> IntPart:
    grouped = dense.float().unflatten(1, (num_groups, -1))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    top = (1 << scheme.bits) - 1
    if scheme.is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    has_own_dtype = not scheme.has_model_scales or dense.dtype == torch.float32
    scales = ((high - low) / top).clamp(min=1e-4).to(torch.float16 if has_own_dtype else dense.dtype)
    middle = float(1 << (scheme.bits - 1))
    zeros = torch.full_like(low, middle) if scheme.is_symmetric else (-low / scales.float()).round().clamp(0, top)
    codes = (grouped / scales.float()[..., None]).round_().add_(zeros[..., None]).clamp_(0, top)
    stored_zeros = None if scheme.is_symmetric else zeros.T.to(torch.uint8)
    return IntPart(codes.to(torch.uint8).flatten(1), scales.T, stored_zeros)
