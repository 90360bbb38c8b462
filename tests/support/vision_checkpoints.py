"""Tiny models that also see, with a text part of Llama, Mistral, Qwen2 or Qwen3."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.support.checkpoints import TINY

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
QWEN3_VL_ROPE = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
QWEN3_VL_TEXT = {**TINY, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": QWEN3_VL_ROPE}
QWEN3_VL_VISION = QWEN_VISION | {"deepstack_visual_indexes": [0]}


def make_qwen3_vl(*, is_tied: bool = False) -> PreTrainedModel:
    options = {"text_config": QWEN3_VL_TEXT, "vision_config": QWEN3_VL_VISION, "tie_word_embeddings": is_tied}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**options))


def make_tied_qwen3_vl() -> PreTrainedModel:
    return make_qwen3_vl(is_tied=True)


def make_qwen3_vl_mixture() -> PreTrainedModel:
    """With a layer without experts."""
    text = QWEN3_VL_TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text |= {"mlp_only_layers": [1]}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=QWEN3_VL_VISION))


def make_qwen2_5_vl(**options: Any) -> PreTrainedModel:
    text = TINY | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}} | options
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def make_qwen2_5_vl_with_windows() -> PreTrainedModel:
    return make_qwen2_5_vl(use_sliding_window=True, sliding_window=6, max_window_layers=1)


def make_llava(kind: str = "llama") -> PreTrainedModel:
    text = TINY | {"model_type": kind, "num_key_value_heads": 2}
    text |= {"sliding_window": 6} if kind == "mistral" else {}
    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=90))


def make_llava_with_mistral() -> PreTrainedModel:
    return make_llava("mistral")


def make_llava_with_qwen2() -> PreTrainedModel:
    return make_llava("qwen2")


def make_internvl(kind: str = "qwen2", *, is_tied: bool = False) -> PreTrainedModel:
    text = TINY | {"model_type": kind, "num_key_value_heads": 2}
    text |= {"head_dim": 12} if kind == "qwen3" else {}
    vision = VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
    options = {"image_token_id": 90, "tie_word_embeddings": is_tied}
    return InternVLForConditionalGeneration(InternVLConfig(text_config=text, vision_config=vision, **options))


def make_internvl_with_qwen3() -> PreTrainedModel:
    return make_internvl("qwen3", is_tied=True)


def fill(model: PreTrainedModel) -> None:
    """Set wide random weights, of which every one matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)


VISION_MODELS = [
    make_qwen3_vl,
    make_tied_qwen3_vl,
    make_qwen3_vl_mixture,
    make_qwen2_5_vl,
    make_qwen2_5_vl_with_windows,
    make_llava,
    make_llava_with_mistral,
    make_llava_with_qwen2,
    make_internvl,
    make_internvl_with_qwen3,
]
