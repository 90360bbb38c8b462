"""ARCHITECTURES: the supported architectures, and their differences from the common reading of a config.json.

A new model is one file and one row here. A model's file is imported only when the model is built.
"""

from __future__ import annotations

import dataclasses

from models.architecture import Architecture
from models.errors import ModelError
from models.known import instead_of
from models.registry_experts import COHERE_HARMLESS, COHERE_NEUTRAL, EXPERTS, HUNYUAN_HARMLESS, HUNYUAN_NEUTRAL
from models.registry_gemma4 import GEMMA4
from models.registry_hybrid import HYBRIDS
from models.registry_latent import LATENT
from models.registry_recurrent import RECURRENT
from models.registry_text import split_text_part, text_part_of, with_text_part
from models.registry_vision import vision_rows

_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_LLAMA = Architecture("models.llama:Llama", "llama", qkv_bias="config", has_output_bias=True, has_mlp_bias=True)
_MISTRAL = Architecture(
    "models.llama:Llama",
    "mistral",
    qkv_bias=False,
    sliding_layers="every",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
# Computed by transformers' Llama, whose name its own files then have: published ones have that of code of their own
_INTERNLM3 = dataclasses.replace(
    _LLAMA,
    model_type="internlm3",
    names={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    takes_usual_names=True,
    output_bias="attention_bias",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
)
_IQUEST_CODER = dataclasses.replace(
    _LLAMA,
    model_type="iquestcoder",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    neutral={"clip_qkv": (), "use_sliding_window": (False,)},
)
# Mistral whose queries grow with their position beyond the original length, as Llama 4's
_MINISTRAL3 = Architecture(
    "models.llama:Llama",
    "ministral3",
    qkv_bias=False,
    sliding_layers="every",
    multipliers="ministral3",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
_QWEN2 = Architecture(
    "models.llama:Llama",
    "qwen2",
    qkv_bias=True,
    sliding_layers="max_window_layers",
    defaults={"sliding_window": 4096, "num_key_value_heads": 32},
)
_QWEN3 = Architecture(
    "models.qwen3:Qwen3",
    "qwen3",
    qkv_bias="config",
    has_output_bias=True,
    qk_norm="head",
    sliding_layers="max_window_layers",
    defaults={"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
)
_GEMMA3 = Architecture(
    "models.gemma:Gemma",
    "gemma3_text",
    qkv_bias="config",
    has_output_bias=True,
    qk_norm="head",
    norm="gemma",
    num_layer_norms=4,
    activation="gelu_tanh",
    multipliers="gemma3",
    sliding_layers="pattern",
    rope="gemma3",
    defaults=_GEMMA3_DEFAULTS,
    harmless=("attn_logit_softcapping",),  # transformers' class has it, but its model does not apply it
)
_COHERE2 = Architecture(
    "models.cohere2:Cohere2",
    "cohere2",
    qkv_bias="config",
    has_output_bias=True,
    norm="layer",
    num_layer_norms=1,
    multipliers="cohere2",
    sliding_layers="pattern",
    rope_layers="sliding",
    names={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    harmless=COHERE_HARMLESS,
    neutral=COHERE_NEUTRAL,
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": text_part_of(_MISTRAL, _MINISTRAL3, LATENT["Mistral4ForCausalLM"]),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "SmolLM3ForCausalLM": Architecture(
        "models.llama:Llama",
        "smollm3",
        qkv_bias="config",
        has_output_bias=True,
        has_mlp_bias=True,
        sliding_layers="nope",
        rope="smollm3",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "num_key_value_heads": 4},
    ),
    "Phi3ForCausalLM": Architecture(
        "models.phi3:Phi3",
        "phi3",
        qkv_bias=False,
        sliding_layers="every",
        rope="phi3",
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        packed_modules={
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            "gate_proj": "gate_up_proj",
            "up_proj": "gate_up_proj",
        },
    ),
    "GraniteForCausalLM": Architecture(
        "models.granite:Granite",
        "granite",
        qkv_bias="config",
        has_output_bias=True,
        has_mlp_bias=True,
        multipliers="granite",
    ),
    "Olmo2ForCausalLM": Architecture(
        "models.olmo2:Olmo2",
        "olmo2",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="width",
        norm="olmo2",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Architecture(
        "models.olmo2:Olmo2",
        "olmo3",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="width",
        norm="olmo2",
        sliding_layers="three_of_four",
        rope="olmo3",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "SeedOssForCausalLM": Architecture(
        "models.llama:Llama",
        "seed_oss",
        qkv_bias="config",
        has_output_bias=True,
        output_bias="attention_out_bias",
        has_mlp_bias=True,
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "ArceeForCausalLM": Architecture(
        "models.llama:Llama",
        "arcee",
        qkv_bias="config",
        has_output_bias=True,
        has_mlp_bias=True,
        activation="relu2",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "ApertusForCausalLM": Architecture(
        "models.apertus:Apertus",
        "apertus",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="head",
        activation="xielu",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1.2e7,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1.2e7,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "models.ernie4_5:Ernie4_5",
        "ernie4_5",
        qkv_bias="config",
        has_output_bias=True,
        has_mlp_bias=True,
        names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
    ),
    "Glm4ForCausalLM": Architecture(
        "models.glm4:Glm4",
        "glm4",
        qkv_bias="config",
        num_layer_norms=4,
        rope="glm",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        packed_modules={"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"},
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "models.hunyuan:HunYuan",
        "hunyuan_v1_dense",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="head",
        rope="hunyuan",
        defaults={"rms_norm_eps": 1e-5},
        harmless=HUNYUAN_HARMLESS,
        neutral=HUNYUAN_NEUTRAL,
    ),
    "Exaone4ForCausalLM": Architecture(
        "models.exaone4:Exaone4",
        "exaone4",
        qkv_bias=False,
        qk_norm="head",
        sliding_layers="letters",
        rope_layers="sliding_or_all",
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "Cohere2ForCausalLM": _COHERE2,
    "MinistralForCausalLM": Architecture(
        "models.llama:Llama",
        "ministral",
        qkv_bias=False,
        sliding_layers="listed_or_every",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "GemmaForCausalLM": Architecture(
        "models.llama:Llama",
        "gemma",
        qkv_bias="config",
        has_output_bias=True,
        norm="gemma",
        activation="legacy_gelu_tanh",
        multipliers="gemma",
        defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
    ),
    "Gemma2ForCausalLM": Architecture(
        "models.gemma:Gemma",
        "gemma2",
        qkv_bias="config",
        has_output_bias=True,
        norm="gemma",
        num_layer_norms=4,
        activation="gelu_tanh",
        multipliers="gemma2",
        sliding_layers="alternating",
        harmless=("sliding_window_size",),  # sliding_window's older name, beside it in published configs
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    **GEMMA4,
    "Gemma3ForCausalLM": _GEMMA3,
    # its transformers class does not cap the logits
    "Gemma3ForConditionalGeneration": dataclasses.replace(
        text_part_of(_GEMMA3), neutral={"final_logit_softcapping": ()}
    ),
    "Cohere2VisionForConditionalGeneration": dataclasses.replace(
        _COHERE2,
        text_config="text_config",
        other_text_parts=(EXPERTS["Cohere2MoeForCausalLM"],),
        body_prefix="model.language_model",
        ignored_prefixes=("model.vision_tower.", "model.multi_modal_projector."),
    ),
    **vision_rows(llama=_LLAMA, mistral=_MISTRAL, qwen2=_QWEN2, qwen3=_QWEN3, qwen3_moe=EXPERTS["Qwen3MoeForCausalLM"]),
    **EXPERTS,
    **HYBRIDS,
    **LATENT,
    **RECURRENT,
}


# Names in the first files of a family, by which its later files are known no more
_OLD_NAMES = {"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"}
# Architectures that transformers has under the name of Llama, which computes them
_LLAMAS = {"InternLM3ForCausalLM": _INTERNLM3, "IQuestCoderForCausalLM": _IQUEST_CODER}


def current_name(name: str, model_type: object = None) -> str:
    """Return the name by which find_architecture knows an architecture. model_type: that of its config.json."""
    if name == "LlamaForCausalLM":
        return next((own for own, row in _LLAMAS.items() if row.model_type == model_type), name)
    return _OLD_NAMES.get(name, name)


def whole_of_text_part(name: str, *, is_foreign: bool) -> str | None:
    """Return the name of the multimodal architecture of which the text part alone is served; None: it is all text."""
    if is_foreign or find_architecture(name).text_config is None:
        return None
    return split_text_part(current_name(name))[0]


def is_served(name: str) -> bool:
    """Return whether ARCHITECTURES has the architecture, with or without its head."""
    name = current_name(name)
    return name in {*ARCHITECTURES, *_LLAMAS} or (
        name.endswith("Model") and f"{name.removesuffix('Model')}ForCausalLM" in ARCHITECTURES
    )


def find_architecture(name: str) -> Architecture:
    """Return an architecture's row; XModel is XForCausalLM without head. Raises ModelError naming the nearest model.

    name: the one in a config.json, or that of a text part (text_part_name).
    """
    name, text = split_text_part(current_name(name))
    if text:
        return with_text_part(ARCHITECTURES[name], text)
    if name in _LLAMAS:
        return _LLAMAS[name]
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    if name.endswith("Model") and whole in ARCHITECTURES:
        return dataclasses.replace(ARCHITECTURES[whole], has_lm_head=False)
    if name not in ARCHITECTURES:
        raise ModelError(f"architecture {name!r} is not supported{instead_of(name)}; quire models lists those that are")
    return ARCHITECTURES[name]
