"""Decoder layer of gpt-oss (arXiv:2508.10925): Mixtral with sinks, biases, clamped experts and windows in every other.

A sink is a learned logit of each head that takes part in the softmax and stands for no key (ModelConfig.has_sinks).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from kernels.moe.reference import ExpertBiases
from models.config.experts import ExpertsConfig
from models.config.model_config import ModelConfig
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.moe import ExpertWeights, SparseMLP
from models.layers.routing import ExpertNames
from models.parallel import TensorParallel
from models.quantization.experts_scheme import all_experts_scheme
from models.quantization.linear_method import LinearPart
from models.weights.weights import Weights


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config, w = parts.config, parts.w / "mlp"
    assert config.experts is not None
    experts = _load_experts(w / "experts", config, config.experts, parts.tp)
    mlp = SparseMLP(config, w, parts.tp, parts.method, ExpertNames(router="router"), weights=experts)
    return DecoderLayer(config, parts.w, parts.self_attention(parts.attention()), mlp)


def _load_experts(w: Weights, config: ModelConfig, experts: ExpertsConfig, tp: TensorParallel) -> ExpertWeights:
    """Read this rank's share. Gates and ups take turns in a matrix, which is [E, in, out] unless it is quantised."""
    count, size, hidden_size = experts.num_experts, experts.intermediate_size, config.hidden_size
    width = size // tp.size
    start, stop = 2 * tp.rank * width, 2 * (tp.rank + 1) * width
    up_bias = w.slice("gate_up_proj_bias", (count, 2 * size), dim=1, start=start, stop=stop)
    down_bias = w.tensor("down_proj_bias", (count, hidden_size))
    if tp.rank > 0:  # the sum over ranks must contain the bias only once
        down_bias = down_bias.new_zeros(down_bias.shape)
    biases = ExpertBiases(up_bias.unflatten(1, (width, 2)).transpose(1, 2).flatten(1, 2).contiguous(), down_bias)
    names = [w.full_name(name) for name in ("gate_up_proj", "down_proj")]
    scheme = all_experts_scheme(config.quantization, names)
    if scheme is not None:
        up = LinearPart("gate_up_proj", 2 * size, hidden_size, dim=0, rank=tp.rank, size=tp.size)
        part = LinearPart("down_proj", hidden_size, size, dim=1, rank=tp.rank, size=tp.size)
        return ExpertWeights(
            scheme.load_all(w, count, up, takes_turns=True),
            scheme.load_all(w, count, part, takes_turns=False),
            biases,
        )
    gate_up = w.slice("gate_up_proj", (count, hidden_size, 2 * size), dim=2, start=start, stop=stop)
    down = w.shard("down_proj", (count, size, hidden_size), dim=1, rank=tp.rank, size=tp.size)
    return ExpertWeights(
        gate_up=gate_up.unflatten(2, (width, 2)).permute(0, 3, 2, 1).flatten(1, 2).contiguous(),
        down=down.transpose(1, 2).contiguous(),
        biases=biases,
    )


GptOss = partial(CausalLM, make_layer=make_layer)
