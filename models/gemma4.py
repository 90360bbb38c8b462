"""Decoder layer of Gemma 4's text model, dense and with experts; attention over layers of unequal shape.

As in Gemma 3, norms stand before and after attention and MLP, and most layers have a sliding window. Beyond it: heads
of full-attention layers have their own number and size; their values may be their keys before norm and rotation;
values are normalised; the last layers read the keys and values of an earlier one; an embedding of each token for each
layer is mixed in at the layer's end; experts stand beside the dense MLP and read its residual.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from kernels.elementwise.reference import KVScales, apply_rope
from kernels.moe.reference import Gate
from kernels.ops import fused_moe, rms_norm
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.causal_lm import CausalLM, LayerParts, VocabEmbedding
from models.layers.linear import ColumnLinear
from models.layers.mlp import GatedMLP
from models.layers.moe import load_experts
from models.layers.norm import RMSNorm
from models.layers.routing import ExpertNames
from models.parallel import LayerOutput, TensorParallel, whole
from models.quantization.linear_method import LinearPart
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights

# Of layers that share keys and values, in published checkpoints: read, so that they do not count as unread tensors
_UNUSED_NAMES = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    return Gemma4Layer(parts)


def make_layer_inputs(config: ModelConfig, w: Weights, tp: TensorParallel) -> nn.Module | None:
    """Return the module of ForwardContext.layer_inputs, None if the model has no such inputs."""
    return LayerInputs(config, w, tp) if config.gemma4 is not None and config.gemma4.layer_input_size else None


Gemma4 = partial(CausalLM, make_layer=make_layer, make_layer_inputs=make_layer_inputs)


class Gemma4Layer(nn.Module):
    """attention → MLP, with experts beside it → input of this layer → scale. Contract: DecoderLayer.forward."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config, w, layer = parts.config, parts.w, parts.layer_index
        assert config.gemma4 is not None
        self.layer_index = layer
        self.self_attn = parts.self_attention(Gemma4Attention(parts))
        self.mlp = GatedMLP(config, w / "mlp", parts.tp, parts.method, intermediate_size=config.mlp_size(layer))
        self.attention_norm = parts.norm("input_layernorm")
        self.after_attention_norm = parts.norm("post_attention_layernorm")
        self.mlp_norm = parts.norm("pre_feedforward_layernorm")
        self.after_mlp_norm = parts.norm("post_feedforward_layernorm")
        self.experts = Experts(parts) if config.sparse_layers[layer] else None
        self.layer_input = GatedInput(config, w) if config.gemma4.layer_input_size else None
        self.scale = w.tensor("layer_scalar", (1,))

    def forward(
        self, hidden: LayerOutput, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, None]:
        """hidden: [T, hidden_size], the whole residual stream, as the result's."""
        assert residual is None
        stream = whole(hidden)
        attended = self.after_attention_norm(whole(self.self_attn(self.attention_norm(stream), ctx)))
        normed, stream = self.mlp_norm.add(attended, stream)
        out = whole(self.mlp(normed))
        if self.experts is not None:
            out = self.experts(out, stream)
        stream = stream + self.after_mlp_norm(out)
        if self.layer_input is not None and ctx.layer_inputs is not None:
            stream = stream + self.layer_input(stream, ctx.layer_inputs[:, self.layer_index])
        return stream * self.scale, None


class Gemma4Attention(nn.Module):
    """Attention whose values are normalised, and keys unless they are another layer's. Signature: Attention.forward."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        cache = parts.config.cache(parts.layer_index).share_of_rank(parts.tp.size)
        self.cache = cache
        self.attention = parts.attention(has_head_norms=cache.shares is None)
        self.q_norm = None if cache.shares is None else parts.head_norm("q_norm")
        if cache.shares is not None:
            for name in _UNUSED_NAMES:
                (parts.w / "self_attn").optional(name)
        self.v_weight = torch.ones(cache.v_head_dim, dtype=torch.float32, device=parts.w.device)

    def forward(self, qkv: torch.Tensor, ctx: ForwardContext, kv_scales: KVScales) -> torch.Tensor:
        """qkv: [T, outputs of this layer's projections]."""
        attention, cache = self.attention, self.cache
        if self.q_norm is not None:
            q = self.q_norm(qkv.unflatten(-1, (-1, cache.head_dim)))
            q, _ = apply_rope(q, q[:, :0], ctx.positions, attention.cos_sin_cache)
            return attention.attend(q, ctx, kv_scales)
        kv_size = cache.num_kv_heads * cache.head_dim
        values = qkv[:, -kv_size:].unflatten(-1, (cache.num_kv_heads, -1))
        normed = rms_norm(values.contiguous(), self.v_weight, attention.eps).flatten(1)
        others = qkv if cache.values_are_keys else qkv[:, :-kv_size]
        return attention(torch.cat((others, normed), dim=-1), ctx, kv_scales)


class Experts(nn.Module):
    """A mixture of experts beside the dense MLP: the router and the experts read the residual stream, each normed."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config, w, size = parts.config, parts.w / "router", parts.config.hidden_size
        experts = config.experts
        assert experts is not None
        self.tp = parts.tp
        self.top_k = experts.num_experts_per_tok
        self.gate = Gate(experts.gate)
        self.eps = config.rms_norm_eps
        self.dense_norm = parts.norm("post_feedforward_layernorm_1")
        self.norm = parts.norm("pre_feedforward_layernorm_2")
        self.after_norm = parts.norm("post_feedforward_layernorm_2")
        self.router_weight = torch.ones(size, dtype=torch.float32, device=w.device)
        self.router_scale = w.tensor("scale", (size,))
        self.root_size = size**-0.5
        part = LinearPart("proj", experts.num_experts, size, dim=0, rank=0, size=1)
        self.router = ColumnLinear(w, [part], has_bias=False, method=Unquantized())
        self.expert_scales = w.tensor("per_expert_scale", (experts.num_experts,)).float()
        self.weights = load_experts(parts.w, experts, size, parts.tp, ExpertNames(), config.quantization)

    def forward(self, dense: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """dense: the output of the dense MLP; stream: the residual stream before it. All [T, hidden_size]."""
        routed = rms_norm(stream, self.router_weight, self.eps) * self.router_scale * self.root_size
        mixed = fused_moe(
            self.norm(stream),
            self.router(routed),
            self.weights.gate_up,
            self.weights.down,
            top_k=self.top_k,
            renormalize=True,
            round_weights=False,
            gate=self.gate,
            expert_scales=self.expert_scales,
            first_expert=self.weights.first_expert,
        )
        assert isinstance(mixed, torch.Tensor)
        return self.dense_norm(dense) + self.after_norm(self.tp.all_reduce(mixed))


class LayerInputs(nn.Module):
    """The input of each layer: an embedding of the token for each layer, plus a projection of its usual embedding."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> None:
        super().__init__()
        assert config.gemma4 is not None
        size, vocab_size = config.gemma4.layer_input_size, config.gemma4.layer_input_vocab_size
        width = config.num_layers * size
        self.size = size
        self.embedding = VocabEmbedding(
            w / "embed_tokens_per_layer", tp, vocab_size=vocab_size, hidden_size=width, scale=size**0.5
        )
        part = LinearPart("per_layer_model_projection", width, config.hidden_size, dim=0, rank=0, size=1)
        self.projection = ColumnLinear(w, [part], has_bias=False, method=Unquantized())
        self.factor = config.hidden_size**-0.5
        self.norm = RMSNorm(config, w, "per_layer_projection_norm", size=size)

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] int64; embedded: [T, hidden_size]; returns [T, layers, size]."""
        projected = (self.projection(embedded) * self.factor).unflatten(-1, (-1, self.size))
        of_tokens = self.embedding(input_ids).unflatten(-1, (-1, self.size))
        return (self.norm(projected) + of_tokens) * 2**-0.5


class GatedInput(nn.Module):
    """A layer's own input, gated by the hidden states and projected to their size."""

    def __init__(self, config: ModelConfig, w: Weights) -> None:
        super().__init__()
        assert config.gemma4 is not None
        size, hidden_size = config.gemma4.layer_input_size, config.hidden_size
        gate = LinearPart("per_layer_input_gate", size, hidden_size, dim=0, rank=0, size=1)
        projection = LinearPart("per_layer_projection", hidden_size, size, dim=0, rank=0, size=1)
        self.gate = ColumnLinear(w, [gate], has_bias=False, method=Unquantized())
        self.projection = ColumnLinear(w, [projection], has_bias=False, method=Unquantized())
        self.norm = RMSNorm(config, w, "post_per_layer_input_norm", size=hidden_size)

    def forward(self, hidden: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        """hidden: [T, hidden_size]; layer_input: [T, size]; returns [T, hidden_size], to be added to hidden."""
        gated = functional.gelu(self.gate(hidden), approximate="tanh") * layer_input
        return self.norm(self.projection(gated))
