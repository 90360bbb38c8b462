"""ForeignModel: a model class of transformers itself, with Quire's attention and paged cache. Slower, but exact.

The class computes everything but the attention: it is called with the step's tokens as one text, and their positions
say where each belongs. Only classes that are part of transformers are built, never code of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from kernels.elementwise.reference import UNSCALED, write_kv
from models.context import ForwardContext
from models.foreign.interface import ATTENTION
from models.foreign.probe import AttentionCall


class ForeignModel(nn.Module):
    """A causal language model of transformers under the contract of models.build.Model."""

    def __init__(self, model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
        """model: built with attn_implementation ATTENTION. calls: its attentions (models.foreign.probe)."""
        super().__init__()
        assert model.config._attn_implementation == ATTENTION
        self.calls = tuple(calls)
        self.decoder: Any = model.get_decoder()
        # The head is the class's own forward around hidden states that are given, with its scales and caps
        self._given = _Given()
        parent, name = _place_of(model, self.decoder)
        setattr(parent, name, self._given)
        self.head = model

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden states after the final norm, [T, hidden_size]."""
        attend = _PagedAttention(self.calls, ctx)
        out = self.decoder(
            input_ids=input_ids[None], position_ids=ctx.positions[None], use_cache=False, quire_attend=attend
        )
        return out.last_hidden_state[0]

    def whole(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute one text with transformers' own attention, without a cache: [T] → [T, hidden_size]."""
        config = self.decoder.config
        config._attn_implementation = "eager"
        try:
            positions = torch.arange(input_ids.shape[0], device=input_ids.device)
            out = self.decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            config._attn_implementation = ATTENTION
        return out.last_hidden_state[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        logits = self.head(input_ids=ids, use_cache=False).logits[0]
        self._given.hidden = None
        return logits


def _place_of(model: nn.Module, part: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds `part`, and its name there."""
    path = next(path for path, module in model.named_modules() if module is part)
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


@dataclass
class _Output(MoeModelOutputWithPast):
    """What a decoder returns, with every field that a head may read."""

    cross_attentions: Any = None


class _Given(nn.Module):
    """Stands for the decoder in the class's forward, and returns hidden states that were computed before."""

    hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.hidden)


class _PagedAttention:
    """The attentions of one step: an Attend. Writes keys and values into the pool, and reads them from there."""

    def __init__(self, calls: Sequence[AttentionCall], ctx: ForwardContext) -> None:
        self._calls = calls
        self._ctx = ctx
        self._next = 0

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        call, index, ctx = self._calls[self._next], self._next, self._ctx
        self._next += 1
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        kv = ctx.kv_caches[index]
        assert kv is not None
        metadata, sinks, scales = ctx.attention[kv.table], options.get("s_aux"), kv.scales_or(UNSCALED)
        write_kv(k, v, kv.keys, kv.values, metadata.slot_mapping, scales)
        out = ctx.backend.forward(
            q,
            kv.keys,
            kv.values,
            metadata,
            scale=call.scale,
            sliding_window=call.window,
            softcap=call.softcap,
            sinks=None if sinks is None else sinks.float(),
            kv_scales=scales,
        )
        return out[None]
