"""Which architectures are served, and how each differs from the common reading of a Hugging Face config.

A new model is one file and one row here. Imports a model's file only when it is built.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from models.errors import ModelError

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.parallel import TensorParallel
    from models.weights import Weights


@dataclass(frozen=True)
class Architecture:
    """One row: where the model is, and what its transformers class fixes instead of reading from config.json."""

    target: str  # "module:Class"
    # q, k and v have a bias: as the config's attention_bias says, or fixed by the architecture
    qkv_bias: Literal["config"] | bool
    # the output projection follows attention_bias too
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    # RMS norm of queries and keys before RoPE: of each head, or over the width of all heads
    qk_norm: Literal["none", "head", "width"] = "none"
    # whose RMS norm: models/layers/norm.py tells them apart
    norm: Literal["llama", "olmo2", "gemma"] = "llama"
    num_layer_norms: int = 2  # of hidden_size, in each layer
    # "legacy_gelu_tanh": where the name "gelu" means the tanh approximation, too
    activation: Literal["silu", "gelu_tanh", "legacy_gelu_tanh"] = "silu"
    # models/scales.py: which constants the config has
    scales: Literal["llama", "granite", "gemma", "gemma2", "gemma3"] = "llama"
    ties_embeddings: bool = False  # where the config does not say
    # models/layer_kinds.py: no layer slides, or each; those that layer_types names, else those of a rule
    sliding_layers: Literal["none", "every", "max_window_layers", "nope", "alternating", "pattern"] = "none"
    default_window: int | None = 4096  # where the config does not say
    # models/rope_config.py: whose reading of the rotary fields
    rope: Literal["llama", "smollm3", "phi3", "gemma3"] = "llama"
    default_theta: float = 10_000.0
    default_original_len: int | None = None  # original_max_position_embeddings; None: as max_position_embeddings


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("models.llama:Llama", qkv_bias="config", has_output_bias=True, has_mlp_bias=True),
    "MistralForCausalLM": Architecture("models.llama:Llama", qkv_bias=False, sliding_layers="every"),
    "Qwen2ForCausalLM": Architecture("models.llama:Llama", qkv_bias=True, sliding_layers="max_window_layers"),
    "Qwen3ForCausalLM": Architecture(
        "models.qwen3:Qwen3",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="head",
        sliding_layers="max_window_layers",
    ),
    "SmolLM3ForCausalLM": Architecture(
        "models.llama:Llama",
        qkv_bias="config",
        has_output_bias=True,
        has_mlp_bias=True,
        ties_embeddings=True,
        sliding_layers="nope",
        default_window=None,
        rope="smollm3",
        default_theta=2e6,
    ),
    "Phi3ForCausalLM": Architecture(
        "models.phi3:Phi3",
        qkv_bias=False,
        sliding_layers="every",
        default_window=None,
        rope="phi3",
        default_original_len=4096,
    ),
    "GraniteForCausalLM": Architecture(
        "models.granite:Granite", qkv_bias="config", has_output_bias=True, has_mlp_bias=True, scales="granite"
    ),
    "Olmo2ForCausalLM": Architecture(
        "models.olmo2:Olmo2", qkv_bias="config", has_output_bias=True, qk_norm="width", norm="olmo2"
    ),
    "GemmaForCausalLM": Architecture(
        "models.llama:Llama",
        qkv_bias="config",
        has_output_bias=True,
        norm="gemma",
        activation="legacy_gelu_tanh",
        scales="gemma",
        ties_embeddings=True,
    ),
    "Gemma2ForCausalLM": Architecture(
        "models.gemma2:Gemma2",
        qkv_bias="config",
        has_output_bias=True,
        norm="gemma",
        num_layer_norms=4,
        activation="gelu_tanh",
        scales="gemma2",
        ties_embeddings=True,
        sliding_layers="alternating",
    ),
    "Gemma3ForCausalLM": Architecture(
        "models.gemma3:Gemma3",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="head",
        norm="gemma",
        num_layer_norms=4,
        activation="gelu_tanh",
        scales="gemma3",
        ties_embeddings=True,
        sliding_layers="pattern",
        rope="gemma3",
    ),
}


def find_architecture(name: str) -> Architecture:
    """Look a row up. Raises ModelError listing the supported names."""
    if name not in ARCHITECTURES:
        raise ModelError(f"architecture {name!r} is not supported: supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def build(config: ModelConfig, w: Weights, tp: TensorParallel) -> nn.Module:
    """Make the model with this rank's weights, every tensor of the checkpoint accounted for.

    The result has forward(input_ids [T] int64, ctx) → hidden [T, hidden_size] and
    compute_logits(hidden [N, hidden_size]) → [N, vocab_size], the same on every rank. Call both under
    torch.inference_mode. Blocks while weights are read. Raises ModelError.
    """
    config.check_tensor_parallel(tp.size)
    module_name, _, class_name = find_architecture(config.architecture).target.partition(":")
    model_class = vars(importlib.import_module(module_name))[class_name]
    model: nn.Module = model_class(config, w, tp)
    w.finish(has_tied_embeddings=config.tie_word_embeddings)
    return model.eval()
