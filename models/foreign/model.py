"""ForeignModel: a model class of transformers itself, with Quire's attention and paged cache. Slower, but exact.

The class computes everything but the attention: it is called with the step's tokens as one text, and their positions
say where each belongs. Only classes that are part of transformers are built, never code of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from kernels.elementwise.reference import UNSCALED, write_kv
from models.context import ForwardContext
from models.errors import ModelError
from models.foreign.interface import ATTENTION, Attend
from models.foreign.probe import AttentionCall


class ForeignModel(nn.Module):
    """A causal language model of transformers under the contract of models.build.Model."""

    def __init__(self, model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
        """model: built with attn_implementation ATTENTION. calls: its attentions (models.foreign.probe).

        Raises ModelError if the class does not tell its decoder from its head.
        """
        super().__init__()
        assert model.config._attn_implementation == ATTENTION
        self.calls = tuple(calls)
        self.decoder: Any = _decoder_of(model)
        # Some classes look for it in the ids of each call without a mask, to warn: a wait for the device in each step.
        # Others declare it as a number, and check what is assigned
        vars(self.decoder.config)["pad_token_id"] = None
        # The head is the class's own forward around hidden states that are given, with its scales and caps
        self._given = _Given()
        parent, name = _place_of(model, self.decoder)
        setattr(parent, name, self._given)
        self.head = model

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden states after the final norm, [T, hidden_size]."""
        return self._decode(input_ids, ctx.positions, quire_attend=_PagedAttention(self.calls, ctx))

    def whole(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute one text with transformers' own attention, without a cache: [T] → [T, hidden_size]."""
        config = self.decoder.config
        config._attn_implementation = "eager"
        try:
            positions = torch.arange(input_ids.shape[0], device=input_ids.device)
            return self._decode(input_ids, positions)
        finally:
            config._attn_implementation = ATTENTION

    def try_parts(self, num_tokens: int) -> None:
        """Compute decoder and head on the meta device, where attention is a shape. Raises what they raise."""
        ids = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
        # A mask like that of models.foreign.probe: some classes look for several texts in positions without one
        mask = torch.ones(1, num_tokens, dtype=torch.int64, device="meta")
        self.compute_logits(self._decode(ids, ids, quire_attend=_empty_attention, attention_mask=mask))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]. Only after a call of the decoder."""
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        logits = self.head(input_ids=ids, use_cache=False).logits[0]
        self._given.hidden = None
        return logits

    def _decode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, **options: Attend | torch.Tensor
    ) -> torch.Tensor:
        out = self.decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **options)
        self._given.output_class = type(out)
        return out.last_hidden_state[0]


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head; get_decoder() of some classes is the head, which has that name."""
    for found in (model.get_decoder(), model.base_model):
        if isinstance(found, PreTrainedModel) and found is not model:
            return found
    raise ModelError(f"{type(model).__name__}: transformers' own class does not tell its decoder from its head")


def _place_of(model: nn.Module, part: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds `part`, and its name there."""
    path = next(path for path, module in model.named_modules() if module is part)
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


class _Given(nn.Module):
    """Stands for the decoder in the class's forward, and returns hidden states that were computed before."""

    hidden: torch.Tensor | None = None
    output_class: type[ModelOutput] = ModelOutput  # the decoder's own, with every field that the head may read

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        return self.output_class(last_hidden_state=self.hidden)


def _empty_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


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
