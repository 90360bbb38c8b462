"""ExpertsConfig: the mixture of experts that replaces the MLP in some layers, and its fields of a config.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from models.architecture import Architecture
from models.config.mamba2 import read_block_kinds
from models.config.matrix import Matrix
from models.config.mixtures import read_cohere, read_minimax, read_sparse_kinds
from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import QuantizationConfig
from models.quantization.experts_scheme import ExpertsForm, check_experts

# models/layers/routing.py: how the router's products become a choice of experts and their weights
Routing = Literal["softmax", "softmax_bias", "sigmoid", "sigmoid_bias", "chosen_sigmoid", "sparsemixer", "scaled_input"]

# The weights of experts are used in fp32
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
    is_sparse = _sparse_layers(config, architecture, num_layers)
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
    own_size = (
        "intermediate_size"
        if kind in ("mixtral", "granite", "hunyuan", "phimoe", "gpt_oss", "minimax")
        else "moe_intermediate_size"
    )
    experts = ExpertsConfig(
        num_experts=_same_in_all(config, count, num_layers),
        num_experts_per_tok=_same_in_all(config, "num_experts_per_tok", num_layers),
        intermediate_size=_same_in_all(config, own_size, num_layers),
        # gpt-oss: the softmax is over the chosen experts alone, which is the same
        norm_topk_prob=kind in ("mixtral", "granite", "hunyuan", "ernie4_5", "gpt_oss", "gemma4", "qwen3_5"),
        rounds_weights=kind not in _UNROUNDED,
    )
    if kind == "gemma4":
        return dataclasses.replace(experts, has_dense_mlp=True, gate="gelu_tanh")
    if kind == "gpt_oss":
        alpha, limit = config.positive("swiglu_alpha", default=1.702), config.positive("swiglu_limit", default=7.0)
        return dataclasses.replace(experts, has_bias=True, gate="clamped", gate_alpha=alpha, gate_limit=limit)
    if kind == "minimax":
        return read_minimax(experts)
    if kind == "cohere2":
        return read_cohere(config, experts)
    if kind in ("qwen2", "qwen3", "mellum", "glm", "glm_lite", "lfm2", "nemotron", "kimi", "exaone", "mistral4"):
        experts = dataclasses.replace(experts, norm_topk_prob=config.flag("norm_topk_prob"))
    if kind in ("qwen2", "qwen3_5"):
        width = config.count("shared_expert_intermediate_size")
        return dataclasses.replace(experts, shared_intermediate_size=width, has_shared_gate=True)
    if kind == "granite" and config.get("shared_intermediate_size"):
        return dataclasses.replace(experts, shared_intermediate_size=config.count("shared_intermediate_size"))
    if kind == "hunyuan":
        width = experts.intermediate_size
        return dataclasses.replace(experts, shared_intermediate_size=width, router_precision="fp32_stored")
    if kind == "phimoe":
        return _read_sparsemixer(config, experts)
    if kind == "ernie4_5":
        floor, num_shared = config.positive("moe_norm_min", default=1e-12), config.get("moe_num_shared_experts")
        width = experts.intermediate_size * config.count("moe_num_shared_experts") if num_shared else 0
        return dataclasses.replace(
            experts,
            routing="softmax_bias",
            router_precision="fp32_stored",
            floor=floor,
            shared_intermediate_size=width,
        )
    if kind == "llama4":
        width = experts.intermediate_size
        return dataclasses.replace(experts, routing="scaled_input", shared_intermediate_size=width)
    if kind == "lfm2":
        return dataclasses.replace(
            experts,
            routing="sigmoid_bias" if config.flag("use_expert_bias", default=True) else "sigmoid",
            added=1e-6,
            factor=config.positive("routed_scaling_factor", default=1.0),
        )
    if kind == "nemotron":
        return _read_latent(config, _read_groups(config, experts))
    if kind == "deepseek2":
        return _read_deepseek2(config, experts)
    if kind == "mistral4":
        num_groups, num_open = _count_groups(config, experts, least=2)
        return dataclasses.replace(
            experts,
            added=1e-20,
            factor=config.positive("routed_scaling_factor", default=1.0),
            num_groups=num_groups,
            num_groups_per_tok=num_open,
            shared_intermediate_size=_read_shared_size(config, experts),
        )
    return _read_groups(config, experts) if kind in ("glm", "glm_lite", "kimi", "exaone") else experts


def _read_latent(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Add what Nemotron-H has beside DeepSeek-V3's routing: no gates, a latent size, a shared expert of its width."""
    hidden_size, shared = config.count("hidden_size"), config.count("moe_shared_expert_intermediate_size")
    latent = 0 if config.get("moe_latent_size") is None else config.count("moe_latent_size")
    num_biases = shared + hidden_size + (latent + hidden_size if latent else 0)
    return dataclasses.replace(
        experts,
        gate="relu2",
        shared_intermediate_size=shared,
        latent_size=latent,
        num_biases=num_biases if config.flag("mlp_bias") else 0,
    )


def _read_sparsemixer(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.num_experts_per_tok != 2:
        raise ModelError(
            f"{config.where}: num_experts_per_tok {experts.num_experts_per_tok} is not supported: this router chooses 2"
        )
    jitter = config.number("router_jitter_noise", default=0.01)
    return dataclasses.replace(experts, routing="sparsemixer", jitter=jitter)


def _read_deepseek2(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Add DeepSeek-V2's routing (arXiv:2405.04434, §2.2; transformers, DeepseekV2TopkRouter) and shared experts."""
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"{config.where}: topk_method {method!r} is not supported: served are 'greedy' and 'group_limited_greedy'"
        )
    if method == "greedy":
        config.pass_over("n_group", "topk_group")
    num_groups, num_open = (1, 1) if method == "greedy" else _count_groups(config, experts, least=1)
    shared = _read_shared_size(config, experts)
    return dataclasses.replace(
        experts,
        router_precision="fp32",
        factor=config.positive("routed_scaling_factor", default=1.0),
        num_groups=num_groups,
        num_groups_per_tok=num_open,
        num_best_of_group=1,
        shared_intermediate_size=shared,
        num_biases=2 * shared + config.count("hidden_size") if shared and config.flag("mlp_bias") else 0,
    )


def _read_shared_size(config: Fields, experts: ExpertsConfig) -> int:
    """Return the width of n_shared_experts side by side."""
    return experts.intermediate_size * config.count("n_shared_experts") if config.get("n_shared_experts") else 0


def _count_groups(config: Fields, experts: ExpertsConfig, *, least: int) -> tuple[int, int]:
    """Read the numbers of groups of experts, and of those open to a token. least: experts of a group."""
    num_groups, num_open = config.count("n_group", default=1), config.count("topk_group", default=1)
    size = experts.num_experts // num_groups
    if experts.num_experts % num_groups != 0 or (num_groups > 1 and size < least):
        raise ModelError(
            f"{config.where}: {config.name_of('n_group')} {num_groups} does not cut {experts.num_experts} experts into"
            f" groups of {least} or more"
        )
    if num_open > num_groups or (num_groups > 1 and num_open * size < experts.num_experts_per_tok):
        raise ModelError(
            f"{config.where}: topk_group {num_open} of {config.name_of('n_group')} {num_groups} leaves"
            f" {min(num_open, num_groups) * size} experts for {config.name_of('num_experts_per_tok')}"
            f" {experts.num_experts_per_tok}"
        )
    return num_groups, num_open


def _read_groups(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Add DeepSeek-V3's routing (arXiv:2412.19437, §2.1.2) and shared experts."""
    num_groups, num_open = _count_groups(config, experts, least=2)
    return dataclasses.replace(
        experts,
        routing="sigmoid_bias",
        router_precision="fp32",
        floor=1e-20,
        factor=config.positive("routed_scaling_factor", default=1.0),
        num_groups=num_groups,
        num_groups_per_tok=num_open,
        shared_intermediate_size=_read_shared_size(config, experts),
    )


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


def _sparse_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts."""
    kind = architecture.experts
    if kind in ("qwen2", "qwen3"):
        return _stepped_layers(config, num_layers)
    if kind == "ernie4_5":
        step, first = config.count("moe_layer_interval", default=1), _index(config, "moe_layer_start_index")
        last = _index(config, "moe_layer_end_index")
        last = num_layers - 1 if last == -1 else last
        return tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(num_layers))
    if kind in ("exaone", "cohere2"):
        return read_sparse_kinds(config, num_layers)
    kinds = config.get("mlp_layer_types") if kind in ("mellum", "glm_lite", "kimi") else None
    if kind in ("glm", "deepseek2", "kimi", "mistral4") and kinds is None:
        return tuple(layer >= _index(config, "first_k_dense_replace") for layer in range(num_layers))
    if kind == "lfm2":
        num_dense = 0 if config.get("num_dense_layers") == 0 else config.count("num_dense_layers", default=2)
        return tuple(layer >= num_dense for layer in range(num_layers))
    if kind == "nemotron":
        return tuple(each == "moe" for each in read_block_kinds(config, architecture))
    if kind == "llama4":
        return _listed_layers(config, num_layers)
    if kind == "kimi":
        config.pass_over("first_k_dense_replace")
    if kinds is None:
        return tuple(kind != "glm_lite" or layer > 0 for layer in range(num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(each in ("dense", "sparse") for each in kinds)
    ):
        raise ModelError(
            f"{config.where}: mlp_layer_types must be a list of 'dense' and 'sparse' for {num_layers} layers, found"
            f" {kinds!r}"
        )
    return tuple(each == "sparse" for each in kinds)


def _listed_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts, by the rule of transformers' Llama4TextConfig."""
    listed = config.get("moe_layers")
    config.pass_over("interleave_moe_layer_step")
    if listed is None:
        step = config.count("interleave_moe_layer_step", default=1)
        return tuple((layer + 1) % step == 0 for layer in range(num_layers))
    if not isinstance(listed, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in listed):
        raise ModelError(f"{config.where}: moe_layers must be indices of the {num_layers} layers, found {listed!r}")
    return tuple(layer in listed for layer in range(num_layers))


def _stepped_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts, by the rule of transformers' Qwen2MoeDecoderLayer."""
    step = config.count("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise ModelError(f"{config.where}: mlp_only_layers must be a list of layer indices, found {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _index(config: Fields, name: str) -> int:
    """Read the index of a layer; -1 is the last."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ModelError(f"{config.where}: {name} must be the index of a layer, found {value!r}")
    return value
