"""The decoder stack that all models share, and the pre-norm layer of Llama and its kin; a model makes its layers.

The residual stream is carried beside the hidden states, so that each addition fuses with the norm after it, and over
several ranks with the sum before it.

What some models do to the output of attention or MLP before it joins the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.embedding import LMHead, VocabEmbedding, load_vocab_rows
from models.layers.norm import RMSNorm
from models.parallel import LayerOutput, TensorParallel, whole
from models.weights.weights import Weights


class DecoderLayer(nn.Module):
    """norm → self_attn → norm → mlp. self_attn: called with (hidden [T, hidden_size], ctx), returns the like.

    What both return may wait for its sum over ranks (LayerOutput): the norm behind it makes that.
    mlp_norm: what the checkpoint calls the norm before the MLP. layers/branch.py has what may come behind a branch.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        self_attn: nn.Module,
        mlp: nn.Module,
        *,
        mlp_norm: str = "post_attention_layernorm",
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.attention_norm = RMSNorm(config, w, "input_layernorm", size=config.hidden_size)
        self.mlp_norm = RMSNorm(config, w, mlp_norm, size=config.hidden_size)

    def forward(
        self, hidden: LayerOutput, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[LayerOutput, torch.Tensor]:
        """hidden: [T, hidden_size], not yet added to residual (None: the first layer). Returns the same pair."""
        if residual is None:
            residual = whole(hidden)
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(hidden, residual)
        normed, residual = self.mlp_norm.add(self.self_attn(normed, ctx), residual)
        return self.mlp(normed), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm and LM head, from a checkpoint with Llama's tensor names.

    make_layer(layer_index, w) is called once per layer, with its Weights; for what it makes see DecoderLayer.forward.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        make_layer: Callable[[int, Weights], nn.Module],
    ) -> None:
        super().__init__()
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        inner, scales = w / "model", config.scales
        self.embed_tokens = VocabEmbedding(
            inner / "embed_tokens", vocab_size=vocab_size, hidden_size=hidden_size, tp=tp, scale=scales.embedding
        )
        self.layers = nn.ModuleList(
            make_layer(layer_index, inner / f"layers.{layer_index}") for layer_index in range(config.num_layers)
        )
        self.norm = RMSNorm(config, inner, "norm", size=hidden_size)
        self.lm_head: LMHead | None = None
        if not config.has_lm_head:
            return
        if config.tie_word_embeddings:
            head = self.embed_tokens.weight
        else:
            head = load_vocab_rows(w / "lm_head", vocab_size=vocab_size, hidden_size=hidden_size, tp=tp)
        self.lm_head = LMHead(
            head, vocab_size=vocab_size, tp=tp, divisor=scales.logits_divisor, softcap=scales.logits_softcap
        )

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden states after the final norm, [T, hidden_size]."""
        hidden = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, ctx)
        assert residual is not None, "a model has a layer"
        return self.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        assert self.lm_head is not None, "the engine refuses what would sample"
        return self.lm_head(hidden)


class Scaled(nn.Module):
    """A branch times a constant."""

    def __init__(self, branch: nn.Module, factor: float) -> None:
        super().__init__()
        self.branch = branch
        self.factor = factor

    def forward(self, hidden: torch.Tensor, *ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: if the branch takes it."""
        return self.branch(hidden, *ctx) * self.factor


class Normed(nn.Module):
    """A branch with a norm behind it."""

    def __init__(self, branch: nn.Module, norm: RMSNorm) -> None:
        super().__init__()
        self.branch = branch
        self.norm = norm

    def forward(self, hidden: torch.Tensor, *ctx: ForwardContext) -> torch.Tensor:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: if the branch takes it."""
        return self.norm(whole(self.branch(hidden, *ctx)))
