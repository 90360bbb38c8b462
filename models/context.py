"""ForwardContext: all inputs of one forward pass but its input ids. Passed as an argument, never a global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.elementwise.reference import FP8, UNSCALED, KVScales
from kernels.states import StateMetadata, StateView


class LayerKV(NamedTuple):
    """One layer's part of the KV pool."""

    # [num_blocks, block_size, num_kv_heads, head_dim of keys and of values]; blocks may lie apart
    keys: torch.Tensor
    values: torch.Tensor
    table: int = 0  # index of its block table in ForwardContext.attention
    # of an INT8 pool, [num_blocks, block_size, num_kv_heads] fp32 each; None: the pool has another dtype
    token_scales: KVScales | None = None

    def scales_or(self, checkpoint: KVScales) -> KVScales:
        """Return the scales of this pool: its own of an INT8 pool, the checkpoint's of an FP8 one, otherwise 1."""
        if self.token_scales is not None:
            return self.token_scales
        return checkpoint if self.keys.dtype == FP8 else UNSCALED


# Advances the states of some rows by inputs [T, num_inputs], and returns what each token reads, [T, any]
Advance = Callable[[torch.Tensor, tuple[StateView, ...], StateMetadata], torch.Tensor]


@dataclass
class DraftRing:
    """The inputs of the newest rows with drafts, which enter the states once the drafts are verified.

    A row with drafts reads its request's state and does not write it. Its tokens' inputs stay in the ring until the
    request's next row, by whose start it is known how many of them are true.
    """

    # by layer: [requests * (drafts + 1), num_inputs] in the model's dtype; None: a layer without states
    inputs: list[torch.Tensor | None]
    # [R * (drafts + 1)] int64: the tokens to settle, row by row as `settling` says; the rest arbitrary
    source: torch.Tensor
    settling: StateMetadata
    # [S] int64: the tokens of rows with drafts, and where their inputs are kept. Other entries: any token, and a place
    # of the padding request
    tokens: torch.Tensor
    target: torch.Tensor


@dataclass
class StepStates:
    """The states of recurrent layers in one step."""

    views: list[tuple[StateView, ...]]  # by layer: of the convolution, then of the recurrence; (): no state
    rows: StateMetadata
    ring: DraftRing | None  # None: no speculation

    def advance(self, layer: int, inputs: torch.Tensor, advance: Advance) -> torch.Tensor:
        """Advance a layer's states by the step's tokens: inputs [T, num_inputs]; return what they read, [T, any]."""
        views, ring = self.views[layer], self.ring
        if ring is not None:
            kept = ring.inputs[layer]
            assert kept is not None, f"layer {layer} has no state"
            advance(kept.index_select(0, ring.source), views, ring.settling)
            kept.index_copy_(0, ring.target, inputs.index_select(0, ring.tokens))
        return advance(inputs, views, self.rows)


@dataclass
class ForwardContext:
    """Positions, caches and attention metadata of one step."""

    # [T] int64: position of each token in its request (for RoPE)
    positions: torch.Tensor
    attention: list[AttentionMetadata]  # by block table
    backend: AttentionBackend
    # by layer; layers that share keys and values have the same; None: a layer without attention
    kv_caches: Sequence[LayerKV | None]
    # [T, layers, size]: inputs of each layer beside the hidden states; set by models that have them
    layer_inputs: torch.Tensor | None = None
    states: StepStates | None = None  # None: a model without recurrent layers
    only_layers: Sequence[int] | None = None  # the layers to run, ascending; None: all
    before_layer: Callable[[], None] | None = None  # called before each layer; may wait while others run

    def run(self, layers: nn.ModuleList, hidden: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
        """Run the layers, one after the other; return what the last one adds, and the residual stream.

        hidden: [T, hidden_size], embedded. A layer is called as causal_lm.DecoderLayer is.
        """
        residual: torch.Tensor | None = None
        for layer in layers if self.only_layers is None else [layers[index] for index in self.only_layers]:
            if self.before_layer is not None:
                self.before_layer()
            hidden, residual = layer(hidden, residual, self)
        return hidden, residual
