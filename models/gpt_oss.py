"""Decoder layer of gpt-oss (arXiv:2508.10925): Mixtral with sinks, biases, clamped experts and windows in every other.

A sink is a learned logit of each head that takes part in the softmax and stands for no key (ModelConfig.has_sinks).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from kernels.moe.reference import ExpertBiases
from models.config.experts import ExpertsConfig
from models.config.model_config import ModelConfig
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.experts_on_load import slices
from models.layers.moe import ExpertWeights, SparseMLP
from models.layers.routing import ExpertNames
from models.parallel import ExpertShare, TensorParallel
from models.quantization.config import naming_scheme
from models.quantization.experts_scheme import all_experts_scheme, on_load_scheme
from models.quantization.linear_method import LinearPart, ReadExpert
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
    share = tp.share_of_experts(count)

    def read(name: str, shape: tuple[int, ...], dim: int) -> torch.Tensor:
        dim, start, stop = share.cut(dim, shape[dim])
        return w.slice(name, shape, dim=dim, start=start, stop=stop)

    up_bias = read("gate_up_proj_bias", (count, 2 * size), 1)
    first, last = share.here.start, share.here.stop
    down_bias = w.slice("down_proj_bias", (count, hidden_size), dim=0, start=first, stop=last)
    if share.rank > 0:  # the sum over the parts of an expert must contain the bias only once
        down_bias = down_bias.new_zeros(down_bias.shape)
    biases = ExpertBiases(up_bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous(), down_bias)
    names = [w.full_name(name) for name in ("gate_up_proj", "down_proj")]
    scheme = all_experts_scheme(config.quantization, names)
    naming = naming_scheme(config.quantization, names[0], layer=w.full_name("").removesuffix("."))
    if scheme is not None:
        up = LinearPart("gate_up_proj", 2 * size, hidden_size, dim=0, rank=share.rank, size=share.size)
        part = LinearPart("down_proj", hidden_size, size, dim=1, rank=share.rank, size=share.size)
        with naming:
            gate_up_4bit = scheme.load_all(w, share, up, takes_turns=True)
            down_4bit = scheme.load_all(w, share, part, takes_turns=False)
        return ExpertWeights(gate_up_4bit, down_4bit, biases, first)
    on_load = on_load_scheme(config.quantization, names)
    if on_load is not None and w.headers is None:
        read_up, read_down = _read_each(w, share, hidden_size, size)
        with naming:
            ups, downs = on_load.quantize_each(share.here, read_up), on_load.quantize_each(share.here, read_down)
        return ExpertWeights(ups, downs, biases, first)
    gate_up = read("gate_up_proj", (count, hidden_size, 2 * size), 2)
    down = read("down_proj", (count, size, hidden_size), 1)
    return ExpertWeights(
        gate_up=gate_up.unflatten(2, (-1, 2)).permute(0, 3, 2, 1).flatten(1, 2).contiguous(),
        down=down.transpose(1, 2).contiguous(),
        biases=biases,
        first_expert=first,
    )


def _read_each(w: Weights, share: ExpertShare, hidden_size: int, size: int) -> tuple[ReadExpert, ReadExpert]:
    """Return readers of this rank's part of an expert: gate and up, whose outputs take turns, and down."""
    all_gate_up = slices(w, "gate_up_proj", (share.num_experts, hidden_size, 2 * size))
    all_down = slices(w, "down_proj", (share.num_experts, size, hidden_size))
    width = size // share.size
    start, stop = share.rank * width, (share.rank + 1) * width

    def read_up(expert: int) -> list[torch.Tensor]:
        turns = all_gate_up(expert)[:, 2 * start : 2 * stop]
        return [turns[:, place::2].T.contiguous() for place in range(2)]

    return read_up, lambda expert: [all_down(expert)[start:stop].T.contiguous()]


GptOss = partial(CausalLM, make_layer=make_layer)
