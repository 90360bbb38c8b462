"""SparseMLP: a mixture of experts in place of the MLP.

Each expert's intermediate dimension is split over ranks as in a dense MLP; or, with expert parallelism, each rank has
some experts whole. Every rank has all tokens and routes them alike, so in both forms a rank computes its part of each
token's sum, and one all-reduce adds the parts. The shared expert is always split as a dense MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from kernels.linear.late_norm import LateNorm
from kernels.moe.planes import PlanesMatrix, takes_planes, to_planes
from kernels.moe.reference import ExpertBiases, ExpertSum, Gate
from kernels.moe.storage import ExpertMatrix
from kernels.moe.storage_int import IntMatrix
from kernels.ops import fused_moe, sums_late
from models.config.experts import ExpertsConfig
from models.config.model_config import ModelConfig
from models.layers.experts_on_load import read_merged, read_separate
from models.layers.linear import ColumnLinear
from models.layers.mlp import GatedMLP, PlainMLP
from models.layers.routing import ExpertNames, Router
from models.parallel import ExpertShare, LateExperts, LayerOutput, TensorParallel
from models.quantization.config import QuantizationConfig, naming_scheme
from models.quantization.experts_scheme import (
    DenseExperts,
    each_expert_scheme,
    expect_experts,
    expert_matrices,
    on_load_scheme,
)
from models.quantization.linear_method import LinearMethod, LinearPart
from models.weights.weights import Weights


@dataclass(frozen=True)
class ExpertWeights:
    """This rank's share of all experts. E: those of which it has weights, the first of them is first_expert."""

    # [E, 2 * I, hidden_size], gates first, or [E, I, hidden_size] without gates, and [E, hidden_size, I]
    gate_up: ExpertMatrix
    down: ExpertMatrix
    biases: ExpertBiases | None = None
    first_expert: int = 0


class SparseMLP(nn.Module):
    """A router, its experts and, if the config has one, an expert that every token uses.

    w: the block that holds the router and the experts. w_shared: the shared expert's Weights, by default names.shared
    in w. method: for the shared expert; the names of the routed experts select their scheme.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        method: LinearMethod,
        names: ExpertNames,
        w_shared: Weights | None = None,
        weights: ExpertWeights | None = None,
    ) -> None:
        """weights: those of the experts; None: read below `experts`, in a common layout."""
        super().__init__()
        experts = config.experts
        assert experts is not None
        self.experts = experts
        self.gate = Gate(experts.gate, experts.gate_alpha, experts.gate_limit)
        self.tp = tp
        self.router = Router(config, experts, w, names)
        self.shared_expert: nn.Module | None = None
        if experts.shared_intermediate_size > 0:
            self.shared_expert = (GatedMLP if config.has_gated_mlp else PlainMLP)(
                config,
                w / names.shared if w_shared is None else w_shared,
                tp,
                method,
                intermediate_size=experts.shared_intermediate_size,
                is_partial=True,
            )
        width = experts.latent_size or config.hidden_size
        self.weights = _arrange(weights or load_experts(w, experts, width, tp, names, config.quantization), w)
        self.to_latent, self.from_latent = _read_latent(config, experts, w, tp, method)
        # Nothing is added behind the experts' sum but the residual stream
        has_rest = self.shared_expert is not None and not experts.has_shared_gate
        self.leaves_sum = tp.size == 1 and self.from_latent is None and not has_rest

    def takes_norm(self, hidden: torch.Tensor) -> bool:
        """Return True if the addition of hidden to the residual stream and its norm are better left to this block."""
        return self.router.takes_norm(hidden)

    def forward(self, hidden: torch.Tensor | LateNorm) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        experts = self.experts
        if isinstance(hidden, LateNorm):
            normed = torch.empty_like(hidden.new_residual)
            scores, given = self.router(hidden, normed)
            hidden = normed
        else:
            scores, given = self.router(hidden)
        shared = None if self.shared_expert is None else self.shared_expert(hidden)
        if experts.routing == "scaled_input":
            mixed = self._mix_scaled(hidden, scores)
        else:
            summed = fused_moe(
                hidden if self.to_latent is None else self.to_latent(hidden),
                scores,
                self.weights.gate_up,
                self.weights.down,
                top_k=experts.num_experts_per_tok,
                renormalize=experts.norm_topk_prob and experts.routing != "chosen_sigmoid",  # its router has done it
                round_weights=experts.rounds_weights,
                shared=shared if experts.has_shared_gate else None,
                given=given,
                choice=self.router.choice(),
                floor=experts.floor,
                added=experts.added,
                factor=experts.factor,
                gate=self.gate,
                biases=self.weights.biases,
                first_expert=self.weights.first_expert,
                is_late=self.leaves_sum and sums_late(hidden),
            )
            if isinstance(summed, ExpertSum):
                return LateExperts(summed)
            mixed = summed
        if self.from_latent is not None:
            mixed = self.from_latent(mixed)
        if shared is None or experts.has_shared_gate:
            return self.tp.sum_late(mixed)
        return self.tp.sum_late((mixed + shared) / 2 if experts.averages_shared else mixed + shared)

    def _mix_scaled(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Sum the chosen experts, of which each gets the token times the sigmoid of its logit (Llama 4).

        So each pair of a token and an expert is a token of its own, whose expert is certain.
        """
        top_k = self.experts.num_experts_per_tok
        best, chosen = logits.topk(top_k, dim=-1)
        scaled = hidden[:, None] * best.float().sigmoid().to(hidden.dtype)[..., None]
        choice = torch.zeros_like(logits).repeat_interleave(top_k, 0).scatter_(1, chosen.view(-1, 1), 1.0)
        given = torch.ones_like(choice, dtype=torch.float32)
        out = fused_moe(
            scaled.flatten(0, 1),
            choice,
            self.weights.gate_up,
            self.weights.down,
            top_k=1,
            renormalize=False,
            round_weights=False,
            given=given,
            first_expert=self.weights.first_expert,
        )
        assert isinstance(out, torch.Tensor)
        return out.unflatten(0, (-1, top_k)).sum(1)


def _arrange(weights: ExpertWeights, w: Weights) -> ExpertWeights:
    """Arrange packed experts for the kernels of this device and dtype, if they take both matrices."""
    if not takes_planes(w.dtype, w.device, is_integer=isinstance(weights.gate_up, IntMatrix)):
        return weights
    gate_up = to_planes(weights.gate_up)
    w.give_back_unused()  # or small matrices that stay would lie in the large pieces of memory that arranging used
    down = to_planes(weights.down)
    if not (isinstance(gate_up, PlanesMatrix) and isinstance(down, PlanesMatrix)):
        return weights
    return replace(weights, gate_up=gate_up, down=down)


def _read_latent(
    config: ModelConfig, experts: ExpertsConfig, w: Weights, tp: TensorParallel, method: LinearMethod
) -> tuple[ColumnLinear | None, ColumnLinear | None]:
    """Read the projections to and from the latent size, whole on every rank; None: the experts have none."""
    if not experts.latent_size:
        return None, None
    sizes = (experts.latent_size, config.hidden_size)
    layers = []
    for name, (out_features, in_features) in (("fc1_latent_proj", sizes), ("fc2_latent_proj", sizes[::-1])):
        part = LinearPart(name, out_features, in_features, dim=0, rank=0, size=1)
        layers.append(ColumnLinear(w, [part], has_bias=config.has_mlp_bias, method=method))
    if tp.rank != 0:  # its inputs are parts of a sum over the ranks, which must contain the bias once
        layers[1].bias = None
    return layers[0], layers[1]


def load_experts(
    w: Weights,
    experts: ExpertsConfig,
    hidden_size: int,
    tp: TensorParallel,
    names: ExpertNames,
    quantization: QuantizationConfig | None,
) -> ExpertWeights:
    """Read this rank's share of experts without biases, in the scheme of their names, or quantise them on load.

    The checkpoint has either one tensor per matrix and expert or, in 16 bits, two tensors for all experts.
    """
    count, size = experts.num_experts, experts.intermediate_size
    share = tp.share_of_experts(count)
    here = share.here
    inner = [names.gate, names.up] if experts.gate != "relu2" else [names.up]
    layers = expert_matrices(quantization, w.full_name("experts"), count, (*inner, names.down))
    ups = [LinearPart(name, size, hidden_size, dim=0, rank=share.rank, size=share.size) for name in inner]
    downs = [LinearPart(names.down, hidden_size, size, dim=1, rank=share.rank, size=share.size)]
    scheme, on_load = each_expert_scheme(quantization, layers), on_load_scheme(quantization, layers)
    is_merged = scheme is None and w.shape_of(names.all_gate_up) is not None
    # published checkpoints of Qwen3-VL have what transformers saves of a model of its own transposed
    stored = w.shape_of(names.all_gate_up), w.shape_of(names.all_down)
    if stored == ((count, hidden_size, 2 * size), (count, size, hidden_size)):
        names = replace(names, are_transposed=True)
    naming = naming_scheme(quantization, layers[0], layer=w.full_name("experts"))
    if w.headers is not None and not is_merged:
        found = None if quantization is None else quantization.scheme_of(layers[0])
        with naming:
            expect_experts(w, range(count), [*ups, *downs], None if scheme is None else found)
        nothing = torch.empty(0, dtype=w.dtype, device=w.device)
        return ExpertWeights(nothing, nothing)
    if on_load is not None and w.headers is None:
        read_up, read_down = read_separate(w, ups), read_separate(w, downs)
        if is_merged:
            read_up, read_down = read_merged(w, names, ups, downs[0], share)
        with naming:
            gate_up, down = on_load.quantize_each(here, read_up), on_load.quantize_each(here, read_down)
    elif is_merged:
        width = size // share.size
        gate_up = torch.empty(len(here), len(inner) * width, hidden_size, dtype=w.dtype, device=w.device)
        down = torch.empty(len(here), hidden_size, width, dtype=w.dtype, device=w.device)
        _read_all(w, names, gate_up, down, size=size, share=share)
    else:
        storage = DenseExperts() if scheme is None else scheme
        with naming:
            gate_up, down = storage.load_each(w, here, ups), storage.load_each(w, here, downs)
    if len(here) < count and not is_merged:
        w.leave_out("experts", {str(expert) for expert in range(count) if expert not in here})
    return ExpertWeights(gate_up, down, first_expert=here.start)


def _read_all(
    w: Weights, names: ExpertNames, gate_up: torch.Tensor, down: torch.Tensor, *, size: int, share: ExpertShare
) -> None:
    """Fill gate_up and down from the tensors of all experts, whose intermediate dimension is `size`."""
    count, (hidden_size, width) = share.num_experts, down.shape[1:]
    shapes = (count, 2 * size, hidden_size), (count, hidden_size, size)
    gate_up_dim, down_dim = 1, 2
    if names.are_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        shapes = (count, hidden_size, 2 * size), (count, size, hidden_size)
        gate_up_dim, down_dim = 2, 1
    dim, start, stop = share.cut(down_dim, size)
    down.copy_(w.slice(names.all_down, shapes[1], dim=dim, start=start, stop=stop))
    if dim == 0:
        gate_up.copy_(w.slice(names.all_gate_up, shapes[0], dim=0, start=start, stop=stop))
        return
    for place, first in enumerate((start, size + start)):
        part = w.slice(names.all_gate_up, shapes[0], dim=gate_up_dim, start=first, stop=first + width)
        gate_up.narrow(gate_up_dim, place * width, width).copy_(part)
