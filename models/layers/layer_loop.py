"""LayerLoop: the layers of a step, one after the other, or all at once: in one kernel, or on a CPU in one call in C.

models/layers/row_loop.py has the kernel, for one row on a GPU; the rest of this file is for rows of one token on a CPU.

A token alone spends a third of its time in Python between the kernels of 28 layers. kernels/native/layers.c computes
plain decoder layers without: RMS norms of the model's dtype, attention without sinks and soft caps over a pool of that
dtype, a gated SiLU, matrices that kernels/native/products.c reads, one rank, no adapters. What a model or a step has
beyond that is computed by the layers' own forward, which is the specification.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernels.attention.torch_ref import TorchAttention
from kernels.elementwise.reference import UNSCALED
from kernels.linear.int4_cpu import Int4Matrix
from kernels.linear.onednn import FEW_ROWS, Bf16Matrix, Int8Matrix
from kernels.linear.reference import MIN_SCALE
from kernels.native import ops as native
from kernels.native.library import products_level
from models.context import ForwardContext, LayerKV
from models.layers.attention import Attention, SelfAttention
from models.layers.linear import ColumnLinear, RowLinear
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm, UnitRMSNorm
from models.layers.row_loop import RowLoop
from models.parallel import LayerOutput
from models.quantization.int8 import Int8Params
from models.quantization.integers import IntParams
from models.quantization.schemes import RoutedParams

_TILED_ROWS = 32  # that products with AMX take at once


class LayerLoop:
    """Runs a model's layers. plain: the class of those that may run at once, with causal_lm.DecoderLayer's parts."""

    def __init__(self, layers: nn.ModuleList, plain: type[nn.Module]) -> None:
        self._layers = layers
        self._plain = plain
        self._native: _Native | RowLoop | None = None
        self._built_for: Sequence[LayerKV | None] | None = None

    def run(self, hidden: torch.Tensor, ctx: ForwardContext) -> tuple[LayerOutput, torch.Tensor | None]:
        """Run all layers; see ForwardContext.run. hidden: [T, hidden_size], bf16."""
        if hidden.is_cuda or (hidden.is_cpu and products_level()):
            native = self._native_for(ctx.kv_caches)
            if native is not None and native.takes(hidden, ctx):
                return native.run(hidden, ctx)
        return ctx.run(self._layers, hidden)

    def describe(self, caches: Sequence[LayerKV | None]) -> str | None:
        """Return which steps over this pool have all layers at once, and by what, in words; None: none have."""
        is_cpu = any(cache is not None and cache.keys.is_cpu for cache in caches)
        native = None if is_cpu and not products_level() else self._native_for(caches)
        return None if native is None else native.words

    def _native_for(self, caches: Sequence[LayerKV | None]) -> _Native | RowLoop | None:
        """Return the layers at once over this pool, or None; made anew for another pool."""
        if self._built_for is not caches:
            self._built_for = caches
            is_cpu = any(cache is not None and cache.keys.is_cpu for cache in caches)
            self._native = (_Native if is_cpu else RowLoop).of(self._layers, self._plain, caches)
        return self._native


@dataclass(frozen=True)
class _Native:
    """All layers of a model for layers.c. The model and the pool keep what the addresses lead to."""

    layers: ctypes.Array[native.Layer]
    num_tables: int

    @classmethod
    def of(cls, layers: nn.ModuleList, plain: type[nn.Module], caches: Sequence[LayerKV | None]) -> _Native | None:
        """Read every layer; None: one of them is of another kind."""
        found: list[native.Layer] = []
        for layer in layers:
            read = _read_layer(layer, caches) if type(layer) is plain else None
            if read is None:
                return None
            found.append(read)
        return cls((native.Layer * len(found))(*found), 1 + max(layer.table for layer in found)) if found else None

    @property
    def words(self) -> str:
        """See LayerLoop.describe."""
        return f"steps of up to {_most_rows()} rows have all layers in one call in C"

    def takes(self, hidden: torch.Tensor, ctx: ForwardContext) -> bool:
        """Return True if this step has one token a row, few rows, and nothing beside them."""
        num_rows = hidden.shape[0]
        if not 0 < num_rows <= _most_rows():
            return False
        is_plain = ctx.only_layers is None and ctx.layer_inputs is None and ctx.states is None
        if not is_plain or not hidden.is_contiguous() or not isinstance(ctx.backend, TorchAttention):
            return False
        return all(
            table.num_decodes == num_rows == table.seq_lens.shape[0] and table.shared is None
            for table in ctx.attention[: self.num_tables]
        )

    def run(self, hidden: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerLoop.run."""
        kept: list[torch.Tensor] = []  # until the call has returned
        tables: list[native.Table] = []
        for table in ctx.attention[: self.num_tables]:
            slots = table.slot_mapping.long().contiguous()
            lengths, blocks = table.seq_lens.int().contiguous(), table.block_table.int().contiguous()
            kept += (slots, lengths, blocks)
            tables.append(native.Table(slots.data_ptr(), lengths.data_ptr(), blocks.data_ptr(), blocks.shape[1]))
        longest = max(table.max_seq_len for table in ctx.attention[: self.num_tables])
        positions = ctx.positions.long().contiguous()
        return native.run_layers(self.layers, tables, positions, hidden, longest=longest, least=MIN_SCALE)


def _most_rows() -> int:
    """Return the rows of one token that C computes at once on this CPU."""
    return _TILED_ROWS if products_level() == native.BY_AMX else FEW_ROWS


def _read_layer(layer: Any, caches: Sequence[LayerKV | None]) -> native.Layer | None:
    """Return a decoder layer's addresses and sizes; None: it has something that layers.c has not."""
    branch, mlp = layer.self_attn, layer.mlp
    norms = (layer.attention_norm, layer.mlp_norm)
    if type(branch) is not SelfAttention or branch.has_output_gate or type(mlp) is not GatedMLP or mlp.is_gelu:
        return None
    if mlp.gate_factor != 1.0 or any(type(norm) is not RMSNorm for norm in norms):
        return None
    attention: Any = branch.attention
    kv = caches[attention.layer_index] if type(attention) is Attention else None
    if kv is None or not _is_plain_attention(attention, kv, branch):
        return None
    matrices = [_read_matrix(part) for part in (branch.qkv_proj, branch.o_proj, mlp.gate_up_proj, mlp.down_proj)]
    weights = [_norm_address(norm) for norm in norms]
    if any(matrix is None for matrix in matrices) or not all(weights):
        return None
    _check_sizes(matrices, num_heads=attention.num_heads, num_kv_heads=kv.keys.shape[2], head_dim=kv.keys.shape[3])
    cos_sin, strides = attention.cos_sin_cache, (*kv.keys.stride()[:2], *kv.values.stride()[:2])
    return native.Layer(
        *matrices, *weights, *(_norm_address(norm) for norm in (attention.q_norm, attention.k_norm)),
        cos_sin.data_ptr(), kv.keys.data_ptr(), kv.values.data_ptr(), attention.num_heads, kv.keys.shape[2],
        kv.keys.shape[3], kv.keys.shape[1], *strides, cos_sin.dtype == torch.float32,
        attention.sliding_window or 0, attention.chunk or 0, kv.table, norms[0].eps, norms[1].eps, attention.eps,
        attention.scale,
    )  # fmt: skip


def _check_sizes(matrices: Sequence[Any], *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Assert that the matrices fit each other: C trusts them."""
    qkv, output, gate_up, down = matrices
    assert qkv.k == output.n == gate_up.k == down.n
    assert qkv.n == (num_heads + 2 * num_kv_heads) * head_dim
    assert output.k == num_heads * head_dim
    assert gate_up.n == 2 * down.k


def _is_plain_attention(attention: Attention, kv: LayerKV, branch: SelfAttention) -> bool:
    """Return True if rows.c rotates and attends as this layer does."""
    has_more = attention.is_interleaved or attention.norms_rotated or attention.softcap != 0.0
    if has_more or attention.sinks is not None or attention.query_factors is not None:
        return False
    if kv.scales_or(branch.kv_scales) is not UNSCALED:
        return False
    norms = (attention.q_norm, attention.k_norm)
    if any(norm is not None and _norm_address(norm) is None for norm in norms):
        return False
    head_dim = kv.keys.shape[3]
    q = torch.empty(1, attention.num_heads, head_dim, dtype=torch.bfloat16)
    qkv = torch.empty(1, (attention.num_heads + 2 * kv.keys.shape[2]) * head_dim, dtype=torch.bfloat16)
    takes_rotation = native.takes_rope(qkv, (None, None), attention.cos_sin_cache, kv.keys, kv.values)
    return takes_rotation and native.takes_attention(q, kv.keys, kv.values)


def _norm_address(norm: RMSNorm | UnitRMSNorm | None) -> int | None:
    """Return the address of a norm's weight; None: there is none, or it has another dtype."""
    if norm is None or norm.weight.dtype != torch.bfloat16 or not norm.weight.is_contiguous():
        return None
    return norm.weight.data_ptr()


def _read_matrix(linear: ColumnLinear | RowLinear) -> native.Matrix | None:
    """Return a linear layer's matrix; None: products.c does not read it, or more than a product is computed."""
    if isinstance(linear, RowLinear) and (linear.tp.size > 1 or linear.is_partial):
        return None
    params, bias = linear.params, linear.bias
    if isinstance(params, RoutedParams):
        if len(params.params) != 1:
            return None
        params = params.params[0]
    if isinstance(params, IntParams):
        bias = params.bias if bias is None else bias
        if len(params.blocks) != 1:
            return None
        params = params.blocks[0]
    address = None if bias is None else bias.data_ptr()
    if bias is not None and (bias.dtype != torch.bfloat16 or not bias.is_contiguous()):
        return None
    if isinstance(params, Int4Matrix):
        if not params.is_in_blocks or params.order is not None or params.scales_zeros.dtype != torch.bfloat16:
            return None
        return native.Matrix(
            native.INT4, params.packed.data_ptr(), address, params.scales_zeros.data_ptr(), None, params.out_features,
            params.in_features, params.group_size,
        )  # fmt: skip
    if isinstance(params, Int8Params):
        matrix = params.weight
        if not isinstance(matrix, Int8Matrix) or matrix.width is None or params.input_scale is not None:
            return None
        return native.Matrix(
            native.BYTES, matrix.address, address, matrix.scales.data_ptr(), matrix.sums.data_ptr(), *matrix.shape,
            matrix.width,
        )  # fmt: skip
    dense = params.get("weight") if isinstance(params, dict) else None
    if not isinstance(dense, Bf16Matrix) or dense.width is None:
        return None
    return native.Matrix(native.BF16, dense.address, address, None, None, *dense.packed.shape, dense.width)
