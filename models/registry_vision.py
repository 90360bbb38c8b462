"""Rows of models that see with a text part of Llama, Mistral, Qwen2 or Qwen3: Qwen-VL, LLaVA and InternVL."""

from __future__ import annotations

from dataclasses import replace

from models.architecture import Architecture
from models.registry_text import text_part_of

# Sizes that LLaVA's published configs leave to the classes of their text parts
_LLAMA_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL_SIZES = {**_LLAMA_SIZES, "intermediate_size": 14_336, "max_position_embeddings": 131_072}
_QWEN2_SIZES = {
    **_LLAMA_SIZES,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
}


def vision_rows(
    *, llama: Architecture, mistral: Architecture, qwen2: Architecture, qwen3: Architecture, qwen3_moe: Architecture
) -> dict[str, Architecture]:
    """Return the rows by the names of their architectures. Their positions on three axes are equal for text."""
    return {
        "Qwen3VLForConditionalGeneration": _qwen3_vl(replace(qwen3, model_type="qwen3_vl_text"), num_kv_heads=32),
        "Qwen3VLMoeForConditionalGeneration": replace(
            _qwen3_vl(replace(qwen3_moe, model_type="qwen3_vl_moe_text"), num_kv_heads=16),
            # the router's class divides by the sum whatever the file says
            neutral={"norm_topk_prob": (True,)},
            harmless=("sliding_window",),  # transformers' class sets it to null
        ),
        "Qwen2_5_VLForConditionalGeneration": replace(
            qwen2,
            model_type="qwen2_5_vl_text",
            rope="qwen2_vl",
            text_config="text_config",
            may_have_flat_text=True,
            ignored_prefixes=("visual.",),
            defaults={
                **qwen2.defaults,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "max_position_embeddings": 32_768,
            },
        ),
        "LlavaForConditionalGeneration": text_part_of(
            _with_sizes(llama, _LLAMA_SIZES), _with_sizes(mistral, _MISTRAL_SIZES), _with_sizes(qwen2, _QWEN2_SIZES)
        ),
        "InternVLForConditionalGeneration": text_part_of(_tied(qwen2), _tied(qwen3)),
    }


def _qwen3_vl(text: Architecture, *, num_kv_heads: int) -> Architecture:
    """Return the row of Qwen3-VL with this text part, whose class has no sliding windows."""
    defaults = {name: value for name, value in text.defaults.items() if name != "sliding_window"}
    own = {"num_key_value_heads": num_kv_heads, "rope_theta": 5e5, "max_position_embeddings": 128_000}
    if text.experts != "none":
        own |= {"norm_topk_prob": True, "num_experts_per_tok": 4}
    return replace(
        text,
        sliding_layers="none",
        text_config="text_config",
        body_prefix="model.language_model",
        ignored_prefixes=("model.visual.",),
        defaults={**defaults, **own},
    )


def _with_sizes(text: Architecture, sizes: dict[str, int]) -> Architecture:
    return replace(text, defaults={**sizes, **text.defaults})


def _tied(text: Architecture) -> Architecture:
    """Return a text part whose embedding is the head, if nothing is said."""
    return replace(text, defaults={**text.defaults, "tie_word_embeddings": True})
