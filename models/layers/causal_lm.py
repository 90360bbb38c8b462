"""CausalLM: the causal language model of every family. A family is a function that makes one layer from LayerParts.

CausalLM prepares the parts that all layers share, and owns embedding, layers, final norm and LM head. DecoderLayer is
the pre-norm layer of Llama-like models. The residual stream is a separate tensor beside the hidden states, so that each
addition fuses with the norm after it and, with several ranks, with the all-reduce before it. Scaled and Normed
(models/layers/branches.py) wrap a branch (attention or MLP) with a constant or a norm before its output joins the
residual stream.

VocabEmbedding and LMHead split the vocabulary over ranks. Each rank owns ceil(vocab_size / tp.size) rows; rows missing
on the last ranks are zeros, and their logits are cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from models.config.model_config import ModelConfig
from models.context import ForwardContext, LayerKV
from models.layers.attention import Attention, SelfAttention
from models.layers.layer_loop import LayerLoop
from models.layers.linear import HeadProduct, make_linear_method
from models.layers.mlp import GatedMLP, PlainMLP
from models.layers.moe import SparseMLP
from models.layers.norm import (
    LayerNorm,
    RMSNorm,
    UnitRMSNorm,
    add_and_norm,
    add_and_norm_as_wanted,
    hidden_norm,
    wanted_by,
)
from models.layers.rotary import make_cos_sin_caches, make_query_factors
from models.layers.routing import ExpertNames
from models.parallel import LayerOutput, TensorParallel, whole
from models.quantization.linear_method import LinearMethod
from models.weights.weights import Weights

logger = logging.getLogger(__name__)

MakeLayerInputs = Callable[[ModelConfig, Weights, TensorParallel], nn.Module | None]


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

    def attention(
        self,
        *,
        has_head_norms: bool = False,
        names: tuple[str, str] = ("q_norm", "k_norm"),
        has_unit_norms: bool = False,
        norms_rotated: bool = False,
        is_interleaved: bool = False,
    ) -> Attention:
        """Make Attention without its projections. has_head_norms: add RMS norms, `names`, over each query and key head.

        has_unit_norms: add norms without weights. norms_rotated, is_interleaved: see Attention.
        """
        w, size = self.w / "self_attn", self.config.cache(self.layer_index).head_dim
        norms: list[RMSNorm | UnitRMSNorm | None]
        norms = [UnitRMSNorm(w, size=size) if has_unit_norms else None for _ in names]
        if has_head_norms:
            norms = [self.head_norm(name) for name in names]
        return Attention(
            self.config,
            self.tp,
            layer_index=self.layer_index,
            cos_sin_cache=self.cos_sin_cache,
            query_factors=self.query_factors,
            q_norm=norms[0],
            k_norm=norms[1],
            norms_rotated=norms_rotated,
            is_interleaved=is_interleaved,
            sinks=self._sinks(w) if self.config.has_sinks else None,
        )

    def self_attention(self, attention: nn.Module, w: Weights | None = None) -> SelfAttention:
        """Make attention with its projections. w: their Weights, by default those below `self_attn`."""
        w = self.w / "self_attn" if w is None else w
        return SelfAttention(
            self.config, w, self.tp, layer_index=self.layer_index, method=self.method, attention=attention
        )

    def mlp(self, w: Weights | None = None, names: ExpertNames | None = None) -> nn.Module:
        """Make the layer's MLP, dense or a mixture of experts, whose tensors have `names`, by default Qwen's.

        w: its Weights, by default those below `mlp`.
        """
        w = self.w / "mlp" if w is None else w
        if self.config.sparse_layers[self.layer_index]:
            return SparseMLP(self.config, w, self.tp, self.method, names or ExpertNames())
        make = GatedMLP if self.config.has_gated_mlp else PlainMLP
        return make(self.config, w, self.tp, self.method)

    def head_norm(self, name: str) -> RMSNorm:
        """Make an RMS norm over each query or key head."""
        size = self.config.cache(self.layer_index).head_dim
        return RMSNorm(self.config, self.w / "self_attn", name, size=size)

    def norm(self, name: str) -> RMSNorm | LayerNorm:
        """Make a norm over hidden_size."""
        return hidden_norm(self.config, self.w, name)

    def _sinks(self, w: Weights) -> torch.Tensor:
        """Read the sinks of this rank's heads."""
        return w.shard("sinks", (self.config.num_heads,), dim=0, rank=self.tp.rank, size=self.tp.size).float()


class CausalLM(nn.Module):
    """The whole model, from a checkpoint with Llama's tensor names; models.build.Model is its contract.

    make_layer: called once per layer, in order; DecoderLayer.forward is the contract of its result. has_fp32_rope:
    RoPE is computed in fp32, otherwise in the model's dtype; has_rounded_angles: with cos and sin rounded to that.
    make_layer_inputs: makes a module that computes ForwardContext.layer_inputs from (input_ids [T], embedded
    [T, hidden_size]), or returns None. last_norm, embedding: the checkpoint's names of the norm behind
    the last layer and of the embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        make_layer: Callable[[LayerParts], nn.Module],
        has_fp32_rope: bool = False,
        make_layer_inputs: MakeLayerInputs | None = None,
        has_rounded_angles: bool = False,
        last_norm: str = "norm",
        embedding: str = "embed_tokens",
    ) -> None:
        super().__init__()
        inner = w / config.body_prefix
        self.embed_tokens = VocabEmbedding(
            inner / embedding,
            tp,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            scale=config.multipliers.embedding,
            rounds_scale=config.multipliers.rounds_embedding,
        )
        self.layer_inputs = None if make_layer_inputs is None else make_layer_inputs(config, inner, tp)
        method = make_linear_method(config)
        caches = make_cos_sin_caches(
            config,
            device=w.device,
            dtype=torch.float32 if has_fp32_rope else w.dtype,
            rounded_to=w.dtype if has_rounded_angles else None,
        )
        factors = make_query_factors(config, device=w.device, dtype=w.dtype)
        self.layers = nn.ModuleList()
        for i in range(config.num_layers):
            self.layers.append(make_layer(LayerParts(config, inner / f"layers.{i}", tp, method, i, caches[i], factors)))
            # What a layer's matrices took as they were read is large: with a small matrix of the next layer in it, it
            # would serve no other large one, and be lost to the KV cache (gpt-oss-120b: 5 GiB and more)
            w.give_back_unused()
        self._loop = LayerLoop(self.layers, DecoderLayer)
        self.norm = hidden_norm(config, inner, last_norm)
        self.lm_head: LMHead | None = None
        if not config.has_lm_head:
            return
        head = w / "lm_head"
        bias = load_vocab_bias(head, vocab_size=config.vocab_size, tp=tp) if config.has_head_bias else None
        self.lm_head = LMHead(config, self._head_rows(config, head, tp), bias, tp)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden states after the final norm, [T, hidden_size]."""
        hidden = self.embed_tokens(input_ids)
        if self.layer_inputs is not None:
            ctx = replace(ctx, layer_inputs=self.layer_inputs(input_ids, hidden))
        if hidden.dtype == torch.bfloat16:
            return add_and_norm(self.norm, *self._loop.run(hidden, ctx))[0]
        return add_and_norm(self.norm, *ctx.run(self.layers, hidden))[0]

    def describe_decode(self, caches: Sequence[LayerKV | None]) -> str | None:
        """Return which decode steps over this pool have all layers at once, in words; None: none have."""
        return self._loop.describe(caches)

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
        if not config.tie_word_embeddings or w.headers is not None:
            return head
        # As in transformers: configs of fine-tuned models, above all multimodal ones, say "tied" by default
        if torch.equal(head, embedding):
            return embedding
        logger.warning("%s differs from the embedding and is used, despite tie_word_embeddings", w.full_name("weight"))
        return head


class DecoderLayer(nn.Module):
    """norm → self_attn → norm → mlp. self_attn: called with (hidden [T, hidden_size], ctx), returns the same shape.

    Both branches may return a sum over ranks that is still pending (LayerOutput); the next norm computes it.
    attention_norm, mlp_norm: the checkpoint's names of the norms. Scaled and Normed may wrap a branch.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        self_attn: nn.Module,
        mlp: nn.Module,
        *,
        attention_norm: str = "input_layernorm",
        mlp_norm: str = "post_attention_layernorm",
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.attention_norm = hidden_norm(config, w, attention_norm)
        self.mlp_norm = hidden_norm(config, w, mlp_norm)
        self.attention_input, self.mlp_input = wanted_by(self_attn), wanted_by(mlp)

    def forward(
        self, hidden: LayerOutput, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[LayerOutput, torch.Tensor]:
        """hidden: [T, hidden_size], not yet added to residual (None: the first layer). Returns the same pair."""
        normed, residual = add_and_norm_as_wanted(self.attention_norm, hidden, residual, self.attention_input)
        attended = self.self_attn(normed, ctx)
        normed, residual = add_and_norm_as_wanted(self.mlp_norm, attended, residual, self.mlp_input)
        return self.mlp(normed), residual


class MixerLayer(nn.Module):
    """norm → mixer: attention, a recurrence or an MLP alone. Same contract as DecoderLayer.forward.

    takes_context: the mixer is called with (hidden, ctx) instead of hidden alone.
    """

    def __init__(self, norm: RMSNorm | LayerNorm, mixer: nn.Module, *, takes_context: bool) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.takes_context = takes_context
        self.mixer_input = wanted_by(mixer)

    def forward(
        self, hidden: LayerOutput, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[LayerOutput, torch.Tensor]:
        """hidden: [T, hidden_size], not yet added to residual (None: the first layer). Returns the same pair."""
        normed, residual = add_and_norm_as_wanted(self.norm, hidden, residual, self.mixer_input)
        return (self.mixer(normed, ctx) if self.takes_context else self.mixer(normed)), residual


class ResidualLayer(nn.Module):
    """Adds both branches to the residual stream, without norms before them. Same contract as DecoderLayer.forward."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp

    def forward(
        self, hidden: LayerOutput, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [T, hidden_size], not yet added to residual (None: the first layer). Returns the same pair."""
        stream = whole(hidden) if residual is None else residual + whole(hidden)
        stream = stream + self.self_attn(stream, ctx)
        return self.mlp(stream), stream


class VocabEmbedding(nn.Module):
    """Token embedding, times a constant. rounds_scale: it is rounded to the weights' dtype as Gemma does."""

    def __init__(
        self,
        w: Weights,
        tp: TensorParallel,
        *,
        vocab_size: int,
        hidden_size: int,
        scale: float = 1.0,
        rounds_scale: bool = True,
    ) -> None:
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=w.dtype)) if rounds_scale else scale
        self.tp = tp
        self.weight = load_vocab_rows(w, vocab_size=vocab_size, hidden_size=hidden_size, tp=tp)
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
    """Logits over the whole vocabulary.

    weight: [rows of this rank, hidden_size], its own or the embedding's; bias: [rows of this rank] or None.
    """

    def __init__(
        self, config: ModelConfig, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        rounds = config.quantization is not None and config.quantization.rounds_head
        self.product = HeadProduct(weight, bias, rounds=rounds)
        self.vocab_size = config.vocab_size
        self.factor = config.multipliers.logits
        self.divisor = config.multipliers.logits_divisor
        self.softcap = config.multipliers.logits_softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size], the same on every rank."""
        logits = self.tp.all_gather(self.product(hidden), dim=-1)[:, : self.vocab_size]
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap > 0.0:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_vocab_rows(w: Weights, *, vocab_size: int, hidden_size: int, tp: TensorParallel) -> torch.Tensor:
    """Read this rank's rows of `weight`, padded with zeros to ceil(vocab_size / tp.size)."""
    start, stop, num_missing = _vocab_share(vocab_size, tp)
    rows = w.slice("weight", (vocab_size, hidden_size), dim=0, start=start, stop=stop)
    return functional.pad(rows, (0, 0, 0, num_missing)) if num_missing > 0 else rows


def load_vocab_bias(w: Weights, *, vocab_size: int, tp: TensorParallel) -> torch.Tensor:
    """Read this rank's part of `bias`, padded as load_vocab_rows pads."""
    start, stop, num_missing = _vocab_share(vocab_size, tp)
    return functional.pad(w.slice("bias", (vocab_size,), dim=0, start=start, stop=stop), (0, num_missing))


def _vocab_share(vocab_size: int, tp: TensorParallel) -> tuple[int, int, int]:
    """Return this rank's first row, the row after its last, and the rows that it lacks."""
    num_rows = -(-vocab_size // tp.size)
    start = min(tp.rank * num_rows, vocab_size)
    stop = min(start + num_rows, vocab_size)
    return start, stop, num_rows - (stop - start)
