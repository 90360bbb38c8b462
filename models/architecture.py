"""Architecture: how one architecture differs from the common reading of a config.json. models/registry.py has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Architecture:
    """One row: the model's factory, and the settings its transformers class fixes instead of reading config.json."""

    target: str  # "module:name" of the factory: models.layers.causal_lm.CausalLM with the family's layers
    model_type: str  # transformers' name of the config class: of the text part's, if there is one
    # q, k and v have a bias: as the config's attention_bias or qkv_bias says, or fixed by the architecture
    qkv_bias: Literal["config", "qkv_bias"] | bool
    # the output projection has a bias if output_bias, a name of a field, is true
    has_output_bias: bool = False
    output_bias: str = "attention_bias"
    has_mlp_bias: bool = False
    # RMS norm of queries and keys: of each head, or over the width of all heads
    # ("unit_if_used": without a weight, after RoPE, in layers that have it)
    qk_norm: Literal["none", "head", "head_if_used", "unit_if_used", "width"] = "none"
    # see models/layers/norm.py
    # ("layer_unless_rms": "layer", or "llama" if rms_norm_eps is given)
    norm: Literal["llama", "olmo2", "gemma", "layer", "layer_bias", "layer_unless_rms"] = "llama"
    num_layer_norms: int = 2  # norms over hidden_size in each layer
    # "legacy_gelu_tanh": the name "gelu" means the tanh approximation too
    activation: Literal["silu", "gelu_tanh", "legacy_gelu_tanh", "relu2", "xielu"] = "silu"
    # models/config/layers.py: the constants in the config
    multipliers: Literal[
        "llama", "granite", "gemma", "gemma2", "gemma3", "gemma4", "ministral3", "cohere2", "llama4", "falcon"
    ] = "llama"
    # models/config/layers.py: no layer slides, all do, those in layer_types do, or those by a rule
    sliding_layers: Literal[
        "none",
        "every",
        "every_if_used",
        "max_window_layers",
        "above_max_window_layers",
        "odd_until_max",
        "nope",
        "alternating",
        "pattern",
        "pattern_and_last",
        "letters",
        "three_of_four",
        "listed_or_every",
        "listed_or_none",
        "chunked",
        "dense_prefix",
        "attention_types",
    ] = "none"
    # layers with rotary positions, of those that `rope` has: "sliding_or_all" is all of them without a window,
    # "sliding_or_dense" adds the layers without experts if prefix_dense_sliding_window_pattern is 1
    rope_layers: Literal["all", "sliding", "sliding_or_all", "sliding_or_dense"] = "all"
    # models/config/experts.py, mixtures.py, sparse_layers.py: the family whose fields of experts config.json has
    experts: Literal[
        "none",
        "mixtral",
        "qwen2",
        "qwen3",
        "granite",
        "phimoe",
        "ernie4_5",
        "hunyuan",
        "mellum",
        "glm",
        "glm_lite",
        "deepseek2",
        "llama4",
        "gpt_oss",
        "gemma4",
        "qwen3_5",
        "lfm2",
        "nemotron",
        "kimi",
        "minimax",
        "exaone",
        "cohere2",
        "mistral4",
    ] = "none"
    # models/config/recurrence.py: the recurrent layers, whose fields are spelled as the family named spells them
    recurrence: Literal[
        "none", "qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2", "granite", "bamba", "falcon", "nemotron"
    ] = "none"
    # the query projection yields a gate for each head beside the query: the head's output is multiplied by its sigmoid
    has_output_gate: bool = False
    # models/config/latent.py: latent attention, whose neighbouring dimensions are rotated, always or if rope_interleave
    # ("unrotated": nothing is)
    latent: Literal["none", "interleaved", "interleaved_if_said", "unrotated"] = "none"
    has_sinks: bool = False  # attention has a learned logit for each head beside those of keys
    # models/config/gemma4.py: layers have heads of one shape and size, or each its own
    layers: Literal["uniform", "gemma4"] = "uniform"
    # a matrix of an expert in checkpoints, and the block of the shared expert, within a layer
    expert: str = "mlp.experts.0.gate_proj"
    # how checkpoints store quantised experts; see models/quantization/experts_scheme.py
    experts_form: Literal["each", "all", "none"] = "each"
    shared_expert: str = "mlp.shared_expert"
    mlp: str = "mlp"  # the block of a dense MLP
    attention: str = "self_attn"  # the block of attention
    # models/config/rope.py: the spelling of the rotary fields
    rope: Literal[
        "llama",
        "smollm3",
        "phi3",
        "gemma3",
        "gemma4",
        "glm",
        "hunyuan",
        "olmo3",
        "phimoe",
        "mellum",
        "llama4",
        "olmo_hybrid",
        "minimax",
        "mistral4",
        "qwen2_vl",
    ] = "llama"
    # the file's names of fields, by their usual names, where they differ
    names: Mapping[str, str] = field(default_factory=dict)
    takes_usual_names: bool = False  # a file may have the usual names as well
    # fields that a config may omit: the default of its transformers class, where it is not that of models/config
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # models/config/unread_fields.py: fields of its config class that change nothing, and those that must have a value
    harmless: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # multimodal models: location of the text part in config and checkpoint, and the prefixes that are not read
    text_config: str | None = None
    may_have_flat_text: bool = False  # without text_config, the fields of the text part are those of the whole file
    # rows of text parts with another model_type that it may have instead
    other_text_parts: tuple[Architecture, ...] = ()
    text_prefix: str | None = None
    body_prefix: str = "model"  # location of embedding, layers and last norm in the text part's checkpoint
    ignored_prefixes: tuple[str, ...] = ()
    # projections that checkpoints store merged, and their parts
    packed_modules: Mapping[str, str] = field(default_factory=dict)
    has_head_bias: bool = False  # of the LM head, if lm_head_bias is true
    has_draft_layers: bool = False  # checkpoints have num_nextn_predict_layers more layers, which are not read
    has_lm_head: bool = True  # False: the model returns hidden states only
