"""The pre-norm decoder stack that Llama and its kin share; a model brings its own attention.

The residual stream is carried beside the hidden states, so that each addition fuses with the norm after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from models.config import ModelConfig
from models.context import ForwardContext
from models.layers.embedding import LMHead, VocabEmbedding, load_vocab_rows
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.parallel import TensorParallel
from models.quantization.base import LinearMethod
from models.weights import Weights


class DecoderLayer(nn.Module):
    """norm → self_attn → norm → mlp. self_attn: called with (hidden [T, hidden_size], ctx), returns the like."""

    def __init__(self, config: ModelConfig, w: Weights, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(w, "input_layernorm", size=config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(
            w, "post_attention_layernorm", size=config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [T, hidden_size], not yet added to residual (None: the first layer). Returns the same pair."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, ctx)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm and LM head, from a checkpoint with Llama's tensor names.

    make_attention(layer_index, w) is called once per layer, with the Weights of its "self_attn".
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        method: LinearMethod,
        make_attention: Callable[[int, Weights], nn.Module],
    ) -> None:
        super().__init__()
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        inner = w / "model"
        self.embed_tokens = VocabEmbedding(
            inner / "embed_tokens", vocab_size=vocab_size, hidden_size=hidden_size, tp=tp
        )
        layers = []
        for layer_index in range(config.num_layers):
            w_layer = inner / f"layers.{layer_index}"
            self_attn = make_attention(layer_index, w_layer / "self_attn")
            layers.append(DecoderLayer(config, w_layer, self_attn, GatedMLP(config, w_layer / "mlp", tp, method)))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(inner, "norm", size=hidden_size, eps=config.rms_norm_eps)
        if config.tie_word_embeddings:
            head = self.embed_tokens.weight
        else:
            head = load_vocab_rows(w / "lm_head", vocab_size=vocab_size, hidden_size=hidden_size, tp=tp)
        self.lm_head = LMHead(head, vocab_size=vocab_size, tp=tp)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden states after the final norm, [T, hidden_size]."""
        hidden = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, ctx)
        return self.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        return self.lm_head(hidden)
