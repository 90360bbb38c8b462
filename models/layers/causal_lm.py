"""CausalLM: the causal language model of every family. A family is a function that makes one layer from LayerParts.

CausalLM prepares the parts that all layers share, and owns embedding, layers, final norm and LM head. DecoderLayer is
the pre-norm layer of Llama-like models. The residual stream is a separate tensor beside the hidden states, so that each
addition fuses with the norm after it and, with several ranks, with the all-reduce before it. Scaled and Normed wrap a
branch (attention or MLP) with a constant or a norm before its output joins the residual stream.

VocabEmbedding and LMHead split the vocabulary over ranks. Each rank owns ceil(vocab_size / tp.size) rows; rows missing
on the last ranks are zeros, and their logits are cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from kernels.linear.ops import DenseLinear
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import Attention, SelfAttention
from models.layers.linear import make_linear_method
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import make_cos_sin_caches, make_query_factors
from models.parallel import LayerOutput, TensorParallel, whole
from models.quantization.linear_method import LinearMethod
from models.weights.weights import Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerParts:
    """Factory of one layer's usual parts. w: the layer's Weights."""

    config: ModelConfig
    w: Weights
    tp: TensorParallel
    method: LinearMethod
    layer_index: int
    cos_sin_cache: torch.Tensor
    query_factors: torch.Tensor | None

    def attention(self, *, has_head_norms: bool = False) -> Attention:
        """Make Attention without its projections. has_head_norms: add RMS norms over each query and key head."""
        w, size = self.w / "self_attn", self.config.head_dim
        return Attention(
            self.config,
            self.tp,
            layer_index=self.layer_index,
            cos_sin_cache=self.cos_sin_cache,
            query_factors=self.query_factors,
            q_norm=RMSNorm(self.config, w, "q_norm", size=size) if has_head_norms else None,
            k_norm=RMSNorm(self.config, w, "k_norm", size=size) if has_head_norms else None,
        )

    def self_attention(self, attention: nn.Module, w: Weights | None = None) -> SelfAttention:
        """Make attention with its projections. w: their Weights, by default those below `self_attn`."""
        w = self.w / "self_attn" if w is None else w
        return SelfAttention(self.config, w, self.tp, method=self.method, attention=attention)

    def mlp(self, w: Weights | None = None) -> nn.Module:
        """Make the layer's MLP, dense or a mixture of experts. w: its Weights, by default those below `mlp`."""
        make = SparseMLP if self.config.sparse_layers[self.layer_index] else GatedMLP
        return make(self.config, self.w / "mlp" if w is None else w, self.tp, self.method)

    def norm(self, name: str) -> RMSNorm:
        """Make an RMS norm over hidden_size."""
        return RMSNorm(self.config, self.w, name, size=self.config.hidden_size)


class CausalLM(nn.Module):
    """The whole model, from a checkpoint with Llama's tensor names; models.build.Model is its contract.

    make_layer: called once per layer, in order; DecoderLayer.forward is the contract of its result. has_fp32_rope:
    RoPE is computed in fp32, otherwise in the model's dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        make_layer: Callable[[LayerParts], nn.Module],
        has_fp32_rope: bool = False,
    ) -> None:
        super().__init__()
        inner = w / "model"
        self.embed_tokens = VocabEmbedding(config, inner / "embed_tokens", tp)
        method = make_linear_method(config)
        caches = make_cos_sin_caches(config, device=w.device, dtype=torch.float32 if has_fp32_rope else w.dtype)
        factors = make_query_factors(config, device=w.device, dtype=w.dtype)
        self.layers = nn.ModuleList(
            make_layer(LayerParts(config, inner / f"layers.{i}", tp, method, i, caches[i], factors))
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config, inner, "norm", size=config.hidden_size)
        self.lm_head: LMHead | None = None
        if not config.has_lm_head:
            return
        self.lm_head = LMHead(config, self._head_rows(config, w / "lm_head", tp), tp)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden states after the final norm, [T, hidden_size]."""
        hidden = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, ctx)
        assert residual is not None, "a model has at least one layer"
        return self.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        assert self.lm_head is not None, "the engine refuses requests that sample"
        return self.lm_head(hidden)

    def _head_rows(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> torch.Tensor:
        """Return the head's rows: the embedding's if they are tied, unless the checkpoint has a head that differs."""
        embedding = self.embed_tokens.weight
        if config.tie_word_embeddings and w.shape_of("weight") is None:
            return embedding
        head = load_vocab_rows(w, vocab_size=config.vocab_size, hidden_size=config.hidden_size, tp=tp)
        if not config.tie_word_embeddings:
            return head
        # As in transformers: configs of fine-tuned models, above all multimodal ones, say "tied" by default
        if torch.equal(head, embedding):
            return embedding
        logger.warning("%s differs from the embedding and is used, despite tie_word_embeddings", w.full_name("weight"))
        return head


class DecoderLayer(nn.Module):
    """norm → self_attn → norm → mlp. self_attn: called with (hidden [T, hidden_size], ctx), returns the same shape.

    Both branches may return a sum over ranks that is still pending (LayerOutput); the next norm computes it.
    mlp_norm: the checkpoint's name of the norm before the MLP. Scaled and Normed (below) may wrap a branch.
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


class Scaled(nn.Module):
    """A branch whose output is multiplied by a constant."""

    def __init__(self, branch: nn.Module, factor: float) -> None:
        super().__init__()
        self.branch = branch
        self.factor = factor

    def forward(self, hidden: torch.Tensor, *ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: passed on if the branch takes it."""
        return self.branch(hidden, *ctx) * self.factor


class Normed(nn.Module):
    """A branch with a norm after it."""

    def __init__(self, branch: nn.Module, norm: RMSNorm) -> None:
        super().__init__()
        self.branch = branch
        self.norm = norm

    def forward(self, hidden: torch.Tensor, *ctx: ForwardContext) -> torch.Tensor:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: passed on if the branch takes it."""
        return self.norm(whole(self.branch(hidden, *ctx)))


class VocabEmbedding(nn.Module):
    """Token embedding, times a constant that is rounded to the weights' dtype as Gemma does."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> None:
        super().__init__()
        self.scale = float(torch.tensor(config.multipliers.embedding, dtype=w.dtype))
        self.tp = tp
        self.weight = load_vocab_rows(w, vocab_size=config.vocab_size, hidden_size=config.hidden_size, tp=tp)
        self.first_row = tp.rank * self.weight.shape[0]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] int64 → [T, hidden_size], the same on every rank."""
        hidden = self._look_up(input_ids)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def _look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return functional.embedding(input_ids, self.weight)
        rows = input_ids - self.first_row
        is_elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        hidden = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.tp.all_reduce(hidden.masked_fill(is_elsewhere[:, None], 0))


class LMHead(nn.Module):
    """Logits over the whole vocabulary. weight: [rows of this rank, hidden_size], its own or the embedding's."""

    def __init__(self, config: ModelConfig, weight: torch.Tensor, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = weight
        self.vocab_size = config.vocab_size
        self.divisor = config.multipliers.logits_divisor
        self.softcap = config.multipliers.logits_softcap
        self._linear = DenseLinear()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size], the same on every rank."""
        logits = self.tp.all_gather(self._linear(hidden, self.weight, None), dim=-1)[:, : self.vocab_size]
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap > 0.0:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_vocab_rows(w: Weights, *, vocab_size: int, hidden_size: int, tp: TensorParallel) -> torch.Tensor:
    """Read this rank's rows of `weight`, padded with zeros to ceil(vocab_size / tp.size)."""
    num_rows = -(-vocab_size // tp.size)
    start = min(tp.rank * num_rows, vocab_size)
    stop = min(start + num_rows, vocab_size)
    rows = w.slice("weight", (vocab_size, hidden_size), dim=0, start=start, stop=stop)
    num_missing = num_rows - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, num_missing)) if num_missing > 0 else rows
