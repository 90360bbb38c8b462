"""ExpertsConfig: the mixture of experts that some layers of a model have for an MLP, read from a config.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import QuantizationConfig
from models.registry import Architecture


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of one size, of which a router chooses some for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of each expert
    norm_topk_prob: bool  # the chosen experts' probabilities are divided by their sum
    rounds_weights: bool  # and rounded to the model's dtype, as transformers does for some
    shared_intermediate_size: int = 0  # of an expert that every token has, behind a gate of its own; 0: none

    def count_parameters(self, hidden_size: int, num_experts: int) -> int:
        """Parameters of one layer's router and shared expert, and of num_experts of its experts."""
        shared = self.shared_intermediate_size
        router = hidden_size * (self.num_experts + (shared > 0))
        return router + 3 * hidden_size * (num_experts * self.intermediate_size + shared)

    def share_of_rank(self, tp_size: int) -> ExpertsConfig:
        """What one of tp_size ranks holds of them: for arithmetic, not to be built."""
        return dataclasses.replace(
            self,
            intermediate_size=self.intermediate_size // tp_size,
            shared_intermediate_size=self.shared_intermediate_size // tp_size,
        )


def parse_experts(
    config: Fields, architecture: Architecture, num_layers: int, quantization: QuantizationConfig | None
) -> tuple[ExpertsConfig | None, tuple[bool, ...]]:
    """The experts, and which layers have them; None if none has. Raises ModelError, too if they are quantised."""
    kind = architecture.experts
    if kind == "none":
        return None, (False,) * num_layers
    # transformers 5 calls both by the newer name when it saves
    count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    experts = ExpertsConfig(
        num_experts=config.count(count),
        num_experts_per_tok=config.count("num_experts_per_tok"),
        intermediate_size=config.count("intermediate_size" if kind == "mixtral" else "moe_intermediate_size"),
        norm_topk_prob=kind == "mixtral" or config.flag("norm_topk_prob"),
        rounds_weights=kind != "mixtral",
        shared_intermediate_size=config.count("shared_expert_intermediate_size") if kind == "qwen2" else 0,
    )
    if experts.num_experts_per_tok > experts.num_experts:
        raise ModelError(
            f"{config.where}: num_experts_per_tok {experts.num_experts_per_tok} is more than"
            f" {count} {experts.num_experts}"
        )
    is_sparse = (True,) * num_layers if kind == "mixtral" else _sparse_layers(config, num_layers)
    expert = "block_sparse_moe.experts.0.w1" if kind == "mixtral" else "mlp.experts.0.gate_proj"
    sparse = [layer for layer in range(num_layers) if is_sparse[layer]]
    if quantization is not None and any(quantization.scheme_of(f"model.layers.{i}.{expert}") for i in sparse):
        raise ModelError(
            f"{config.where}: its experts are quantized ({quantization.name}), and experts are served unquantized only:"
            " use the bf16 checkpoint"
        )
    return (experts if sparse else None), is_sparse


def _sparse_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts, by the rule of transformers' Qwen2MoeDecoderLayer."""
    step = config.count("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise ModelError(f"{config.where}: mlp_only_layers must be a list of layer indices, found {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
