"""ExpertsConfig: the mixture of experts that replaces the MLP in some layers, and its fields of a config.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from models.architecture import Architecture
from models.config.matrix import Matrix
from models.config.mixtures import FAMILIES
from models.config.sparse_layers import find_sparse_layers
from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import QuantizationConfig
from models.quantization.experts_scheme import ExpertsForm, check_experts

# models/layers/routing.py: how the router's products become a choice of experts and their weights
Routing = Literal["softmax", "softmax_bias", "sigmoid", "sigmoid_bias", "chosen_sigmoid", "sparsemixer", "scaled_input"]

# Kinds of Architecture.experts: where an expert's size is called as an MLP's
_SIZE_OF_MLP = ("mixtral", "granite", "hunyuan", "phimoe", "gpt_oss", "minimax")
# Where the chosen experts' weights are divided by their sum: always, if norm_topk_prob says so. gpt-oss: the softmax is
# over the chosen experts alone, which is the same
_NORMALIZED = ("mixtral", "granite", "hunyuan", "ernie4_5", "gpt_oss", "gemma4", "qwen3_5")
_MAY_NORMALIZE = ("qwen2", "qwen3", "mellum", "glm", "glm_lite", "lfm2", "nemotron", "kimi", "exaone", "mistral4")
# Where the weights of experts are used in fp32
_UNROUNDED = ("mixtral", "glm", "glm_lite", "deepseek2", "hunyuan", "gemma4", "nemotron", "kimi", "exaone", "mistral4")


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of one size; a router chooses some of them for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of each expert
    norm_topk_prob: bool  # divide the chosen experts' weights by their sum
    rounds_weights: bool  # then round them to the model's dtype, as transformers does for some architectures
    shared_intermediate_size: int = 0  # width of an expert that every token uses; 0: none
    has_shared_gate: bool = False  # the shared expert's output is multiplied by the sigmoid of a gate of its own
    averages_shared: bool = False  # the output is the mean of the shared expert's and of the routed ones', not the sum
    routing: Routing = "softmax"
    # The router's product: in the model's dtype; in fp32, of the rounded weight or of the weight as it is stored
    router_precision: Literal["model", "fp32", "fp32_stored"] = "model"
    floor: float = 0.0  # least divisor of the weights
    added: float = 0.0  # to that divisor
    factor: float = 1.0  # on the weights, at last
    num_groups: int = 1  # of experts, of which num_groups_per_tok are open to a token: softmax, sigmoid_bias
    num_groups_per_tok: int = 1
    num_best_of_group: int = 2  # experts of a group by whose scores, added, groups are chosen
    jitter: float = 0.0  # sparsemixer
    has_dense_mlp: bool = False  # beside a dense MLP, as in Gemma 4, whose router has scales
    has_bias: bool = False  # of the router and of both products of each expert
    gate: Literal["silu", "gelu_tanh", "clamped", "relu2"] = "silu"  # see kernels.moe.reference.Gate
    gate_alpha: float = 1.0
    gate_limit: float = 0.0
    latent_size: int = 0  # width of the routed experts' inputs and outputs, projected from the hidden size; 0: that
    num_biases: int = 0  # of the shared expert and the projections to and from the latent size
    num_on_rank: int | None = None  # experts of which one rank has weights; None: all. Set by share_of_rank() alone

    @property
    def num_stored(self) -> int:
        """The experts that are stored: all, or those of one rank."""
        return self.num_experts if self.num_on_rank is None else self.num_on_rank

    def count_parameters(self, hidden_size: int, num_experts: int) -> int:
        """Count the parameters of one layer's router, its shared expert and num_experts of its experts."""
        shared = self.shared_intermediate_size
        router = hidden_size * (self.num_experts + self.has_shared_gate)
        router += self.num_experts if self.routing in ("softmax_bias", "sigmoid_bias") else 0
        router += self.has_dense_mlp * (hidden_size + self.num_experts)
        router += self.has_bias * (self.num_experts + num_experts * (2 * self.intermediate_size + hidden_size))
        router += sum(matrix.out_features * matrix.in_features for matrix in self.latent_matrices("", hidden_size))
        routed = num_experts * self.intermediate_size * (self.latent_size or hidden_size)
        num_matrices = 2 if self.gate == "relu2" else 3
        return router + self.num_biases + num_matrices * (routed + shared * hidden_size)

    def latent_matrices(self, block: str, hidden_size: int) -> list[Matrix]:
        """Return the projections to and from the latent size, which every rank has whole. block: their place."""
        if not self.latent_size:
            return []
        return [
            Matrix(f"{block}.fc1_latent_proj", self.latent_size, hidden_size, "outputs", num_kv_heads=1),
            Matrix(f"{block}.fc2_latent_proj", hidden_size, self.latent_size, "outputs", num_kv_heads=1),
        ]

    def share_of_rank(self, tp_size: int, *, is_expert_parallel: bool = False) -> ExpertsConfig:
        """Return the sizes that one of tp_size ranks holds at most. Used for arithmetic, never to build a model."""
        shared = self.shared_intermediate_size // tp_size
        if is_expert_parallel:
            return dataclasses.replace(
                self, num_on_rank=-(-self.num_experts // tp_size), shared_intermediate_size=shared
            )
        return dataclasses.replace(
            self, intermediate_size=self.intermediate_size // tp_size, shared_intermediate_size=shared
        )


def parse_experts(
    config: Fields, architecture: Architecture, num_layers: int, quantization: QuantizationConfig | None
) -> tuple[ExpertsConfig | None, tuple[bool, ...]]:
    """Return the experts (None if there are none) and True for each layer that has them.

    Raises ModelError, also if the experts are quantised in a way that this family's are not served in.
    """
    kind = architecture.experts
    is_dense = kind == "gemma4" and not config.flag("enable_moe_block")
    if architecture.recurrence == "granite" and config.get("num_local_experts") == 0:
        config.pass_over("num_experts_per_tok")
        is_dense = True
    if kind == "none" or is_dense:
        config.pass_over("num_experts", "top_k_experts", "moe_intermediate_size")
        return None, (False,) * num_layers
    experts = _read_experts(config, architecture, num_layers)
    if experts.num_experts_per_tok > experts.num_experts:
        raise ModelError(
            f"{config.where}: {config.name_of('num_experts_per_tok')} {experts.num_experts_per_tok} is more than"
            f" {config.name_of(_count_name(config))} {experts.num_experts}"
        )
    is_sparse = find_sparse_layers(config, architecture, num_layers)
    sparse = [layer for layer in range(num_layers) if is_sparse[layer]]
    if quantization is not None:
        for layer in sparse:
            name = f"{architecture.body_prefix}.layers.{layer}.{architecture.expert}"
            _check_scheme(config, quantization, name, architecture.experts_form, num_experts=experts.num_experts)
    return (experts if sparse else None), is_sparse


def _check_scheme(
    config: Fields, quantization: QuantizationConfig, layer: str, form: ExpertsForm, *, num_experts: int
) -> None:
    try:
        check_experts(quantization, layer, form, num_experts=num_experts)
    except ModelError as error:
        raise ModelError(
            f"{config.where}: its experts are quantized ({quantization.name}): {error}: use the bf16 checkpoint"
        ) from error


def _read_experts(config: Fields, architecture: Architecture, num_layers: int) -> ExpertsConfig:
    kind = architecture.experts
    count = _count_name(config)
    config.pass_over("num_experts")
    experts = ExpertsConfig(
        num_experts=_same_in_all(config, count, num_layers),
        num_experts_per_tok=_same_in_all(config, "num_experts_per_tok", num_layers),
        intermediate_size=_same_in_all(
            config, "intermediate_size" if kind in _SIZE_OF_MLP else "moe_intermediate_size", num_layers
        ),
        norm_topk_prob=config.flag("norm_topk_prob") if kind in _MAY_NORMALIZE else kind in _NORMALIZED,
        rounds_weights=kind not in _UNROUNDED,
    )
    read_family = FAMILIES.get(kind)
    return experts if read_family is None else read_family(config, experts)


def _count_name(config: Fields) -> str:
    """Return the usual name of the number of experts; transformers 5 saves both spellings under the newer name."""
    if "num_local_experts" in config.names or config.get("num_local_experts") is not None:
        return "num_local_experts"
    return "num_experts"


def _same_in_all(config: Fields, name: str, num_layers: int) -> int:
    """Read a positive integer, which may be given for each layer if it is the same in all."""
    value = config.get(name)
    if not isinstance(value, list):
        return config.count(name)
    if len(value) < num_layers or len(set(map(repr, value[:num_layers]))) != 1:
        raise ModelError(
            f"{config.where}: {config.name_of(name)} must be one number, the same in all {num_layers} layers, found"
            f" {value!r}"
        )
    return Fields({config.name_of(name): value[0]}, config.where).count(config.name_of(name))
