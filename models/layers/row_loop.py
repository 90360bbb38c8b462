"""RowLoop: a model's layers for steps of one row, all in one kernel that stays on the GPU.

A layer of a small model takes less time than its kernels wait for each other. kernels/row_layers/gluon_layers.py
computes plain layers of measured sizes without: bf16, RMS norms, whole attention over a pool of bf16, a gated SiLU, one
rank, no adapters, no quantisation. What a model or a step has beyond that is computed by the layers' own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kernels.attention.base import AttentionMetadata
from kernels.dispatch import is_hopper, on_triton, when_used
from kernels.linear.ops import HAS_GLUON
from models.context import ForwardContext, LayerKV
from models.layers.attention import Attention, SelfAttention
from models.layers.linear import ColumnLinear, RowLinear
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.quantization.schemes import Unquantized

_BACKEND = "triton"  # whose pool and block tables the kernel reads
if HAS_GLUON:
    gluon_layers = when_used("kernels.row_layers.gluon_layers")


@dataclass(frozen=True)
class RowLoop:
    """All layers over one pool. The model and the pool keep what the addresses lead to."""

    first: SelfAttention
    eps: float
    keys: torch.Tensor
    table: int  # the block table of every layer
    shape: Any  # kernels.row_layers.gluon_layers.LayerShape
    scratch: Any  # RowScratch
    # [num_layers, 10] int64, of all layers and of those that a step may choose
    addresses: dict[tuple[int, ...] | None, torch.Tensor] = field(repr=False)

    @classmethod
    def of(cls, layers: nn.ModuleList, plain: type[nn.Module], caches: Sequence[LayerKV | None]) -> RowLoop | None:
        """Read every layer; None: the device, or one of them, is of another kind."""
        first = caches[0] if caches else None
        if not HAS_GLUON or first is None or not is_hopper(first.keys.device):
            return None
        rows = [_read_layer(layer, caches) if type(layer) is plain else None for layer in layers]
        kinds = {None if row is None else row.kind for row in rows}
        if len(kinds) != 1 or None in kinds:
            return None
        layer: Any = layers[0]
        shape = gluon_layers.LayerShape(
            hidden=layer.attention_norm.weight.shape[0], num_heads=layer.self_attn.attention.num_heads,
            num_kv_heads=first.keys.shape[2], head_dim=first.keys.shape[3],
            intermediate=layer.mlp.down_proj.params["weight"].shape[1],
        )  # fmt: skip
        device = first.keys.device
        if not gluon_layers.is_measured(shape, device) or not _has_sizes(layer, shape):
            return None
        addresses = torch.tensor([row.addresses for row in rows if row is not None], dtype=torch.int64, device=device)
        scratch = gluon_layers.RowScratch.allocate(shape, device)
        return cls(
            layer.self_attn, layer.attention_norm.eps, first.keys, first.table, shape, scratch, {None: addresses}
        )

    @property
    def words(self) -> str:
        """See LayerLoop.describe."""
        return "steps of one row have all layers in one kernel"

    def takes(self, hidden: torch.Tensor, ctx: ForwardContext) -> bool:
        """Return True if this step is one token of one row that decodes, and nothing beside it."""
        if hidden.shape[0] != 1 or not on_triton(hidden) or ctx.layer_inputs is not None or ctx.states is not None:
            return False
        metadata = ctx.attention[self.table]
        return metadata.num_decodes == metadata.seq_lens.shape[0] == 1 and ctx.backend.name == _BACKEND

    def run(self, hidden: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """See ForwardContext.run. Requires takes(hidden, ctx)."""
        if ctx.before_layer is not None:
            ctx.before_layer()
        attention: Any = self.first.attention
        metadata: AttentionMetadata = ctx.attention[self.table]
        return gluon_layers.row_layers(
            hidden, self._addresses_of(ctx.only_layers), self.shape, self.keys, metadata.block_table,
            metadata.seq_lens, ctx.positions, metadata.slot_mapping, attention.cos_sin_cache, self.scratch,
            scale=attention.scale, eps=self.eps, head_eps=attention.eps, has_head_norms=attention.q_norm is not None,
        )  # fmt: skip

    def _addresses_of(self, only_layers: Sequence[int] | None) -> torch.Tensor:
        key = None if only_layers is None else tuple(only_layers)
        if key not in self.addresses:
            assert key is not None
            self.addresses[key] = torch.stack([self.addresses[None][index] for index in key])
        return self.addresses[key]


@dataclass(frozen=True)
class _Layer:
    addresses: list[int]
    kind: tuple[object, ...]  # what must be equal in all layers


def _read_layer(layer: Any, caches: Sequence[LayerKV | None]) -> _Layer | None:
    """Return a decoder layer's addresses; None: it has something that the kernel has not."""
    branch, mlp = layer.self_attn, layer.mlp
    if type(branch) is not SelfAttention or branch.has_output_gate or type(mlp) is not GatedMLP or mlp.is_gelu:
        return None
    attention: Any = branch.attention
    norms = [layer.attention_norm, layer.mlp_norm]
    if norms[0].eps != norms[1].eps:
        return None
    if mlp.gate_factor != 1.0 or type(attention) is not Attention or any(type(norm) is not RMSNorm for norm in norms):
        return None
    kv = caches[attention.layer_index]
    if kv is None or not _is_plain(attention, kv):
        return None
    matrices = [_matrix(part) for part in (branch.qkv_proj, branch.o_proj, mlp.gate_up_proj, mlp.down_proj)]
    head_norms = [attention.q_norm, attention.k_norm]
    has_norms = [norm is not None for norm in head_norms]
    if any(matrix is None for matrix in matrices) or has_norms[0] != has_norms[1]:
        return None
    weights = [norm.weight for norm in (*norms, *head_norms) if norm is not None]
    if any(weight.dtype != torch.bfloat16 or not weight.is_contiguous() for weight in weights):
        return None
    qkv, output, gate_up, down = matrices
    q_norm, k_norm = (weights[0] if norm is None else norm.weight for norm in head_norms)
    tensors = (norms[0].weight, qkv, q_norm, k_norm, output, norms[1].weight, gate_up, down, kv.keys, kv.values)
    sizes = tuple(tensor.shape for tensor in tensors if tensor is not None)
    kind = (
        sizes, kv.table, kv.keys.stride(), attention.cos_sin_cache.data_ptr(), attention.scale, attention.eps,
        norms[0].eps, has_norms[0],
    )  # fmt: skip
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return _Layer(addresses, kind) if all(address % 16 == 0 for address in addresses) else None


def _has_sizes(layer: Any, shape: Any) -> bool:
    """Return True if a layer's matrices have the sizes that the kernel trusts. shape: LayerShape."""
    width = shape.num_heads * shape.head_dim
    wanted = (
        (layer.self_attn.qkv_proj, (shape.num_qkv, shape.hidden)), (layer.self_attn.o_proj, (shape.hidden, width)),
        (layer.mlp.gate_up_proj, (2 * shape.intermediate, shape.hidden)),
        (layer.mlp.down_proj, (shape.hidden, shape.intermediate)),
    )  # fmt: skip
    return all(linear.params["weight"].shape == size for linear, size in wanted)


def _is_plain(attention: Attention, kv: LayerKV) -> bool:
    """Return True if the kernel rotates and attends as this layer does, over a pool that it reads."""
    has_more = attention.is_interleaved or attention.norms_rotated or attention.softcap != 0.0
    if has_more or attention.sinks is not None or attention.query_factors is not None:
        return False
    if attention.sliding_window is not None or attention.chunk is not None:
        return False
    caches = (kv.keys, kv.values)
    is_dense = kv.keys.stride() == kv.values.stride() and kv.keys.stride(3) == 1
    is_whole = attention.cos_sin_cache.shape[1] == kv.keys.shape[3] and attention.cos_sin_cache.is_contiguous()
    dtypes = {tensor.dtype for tensor in (*caches, attention.cos_sin_cache)}
    is_aligned = all(stride % 8 == 0 for stride in kv.keys.stride()[:3])
    return is_dense and is_whole and is_aligned and dtypes == {torch.bfloat16}


def _matrix(linear: ColumnLinear | RowLinear) -> torch.Tensor | None:
    """Return the matrix of a linear layer that is nothing else on one rank; None: it is more."""
    if isinstance(linear, RowLinear) and (linear.tp.size > 1 or linear.is_partial):
        return None
    if type(linear.method) is not Unquantized or linear.bias is not None or not isinstance(linear.params, dict):
        return None
    weight = linear.params.get("weight")
    is_plain = isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return weight if is_plain else None
