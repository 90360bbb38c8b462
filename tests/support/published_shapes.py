"""One published model of each architecture, by its config.json: what the page of models says of memory.

Sizes come from benchmarks/shapes, from test_published_configs.py, from the defaults of transformers' classes, or from
_SIZES. tests/test_models_page.py compares the parameters of each with what its publisher says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import transformers

from models.config.model_config import ModelConfig
from tests.unit.models.config.test_kimi_fields import KIMI
from tests.unit.models.config.test_latent_fields import V2_LITE
from tests.unit.models.config.test_published_configs import PUBLISHED

FOLDER = Path("benchmarks/shapes")
SLIDING, FULL = "sliding_attention", "full_attention"


class Shape(NamedTuple):
    """A model and its sizes. billions: the parameters that its publisher states; of a composite: those of its text."""

    name: str
    config: ModelConfig
    billions: float


_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NAMES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
_TIED = {"tie_word_embeddings": True}
_MAMBA = {"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256}
# architecture → name, billions, the sizes of _NAMES, other fields that memory or the number of parameters depend on
_Row = tuple[str, float, tuple[int, ...], dict[str, Any]]
_SIZES: dict[str, _Row] = {
    "Qwen2": ("Qwen2.5 7B", 7.616, (152064, 3584, 18944, 28, 28, 4, 128, 32768), {}),
    "Gemma3": (
        "Gemma 3 27B",
        27.01,
        (262208, 5376, 21504, 62, 32, 16, 128, 131072),
        {"sliding_window": 1024, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh", **_TIED},
    ),
    "Olmo3": ("OLMo 3 7B", 7.298, (100278, 4096, 11008, 32, 32, 32, 128, 65536), {"sliding_window": 4096}),
    "SeedOss": (
        "Seed-OSS 36B",
        36.15,
        (155136, 5120, 27648, 64, 80, 8, 128, 524288),
        {"attention_bias": True, "attention_out_bias": False},
    ),
    "Arcee": ("AFM-4.5B", 4.62, (128004, 2560, 18432, 36, 20, 4, 128, 65536), {}),
    "Apertus": ("Apertus 8B", 8.05, (131072, 4096, 21504, 32, 32, 8, 128, 65536), {}),
    "HunYuanDenseV1": ("Hunyuan 7B", 7.5, (128167, 4096, 14336, 32, 32, 8, 128, 32768), _TIED),
    "Exaone4": (
        "EXAONE 4.0 32B",
        32.0,
        (102400, 5120, 27392, 64, 40, 8, 128, 131072),
        {"sliding_window": 4096, "sliding_window_pattern": "LLLG"},
    ),
    "Cohere2": (
        "Command R7B",
        8.03,
        (256000, 4096, 14336, 32, 32, 8, 128, 132096),
        {"sliding_window": 4096, "sliding_window_pattern": 4, **_TIED},
    ),
    "GraniteMoe": (
        "Granite 3.0 1B-A400M",
        1.33,
        (49155, 1024, 512, 24, 16, 8, 64, 4096),
        {"num_local_experts": 32, "num_experts_per_tok": 8, **_TIED},
    ),
    "HunYuanMoEV1": (
        "Hunyuan A13B",
        80.4,
        (128167, 4096, 3072, 32, 32, 8, 128, 32768),
        {"num_experts": 64, "moe_topk": 8, "use_qk_norm": True, **_TIED},
    ),
    "Lfm2Moe": (
        "LFM2 8B-A1B",
        8.34,
        (65536, 2048, 7168, 24, 32, 8, 64, 128000),
        {
            "layer_types": [FULL if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "conv_L_cache": 3,
            "use_expert_bias": True,
            **_TIED,
        },
    ),
    "Bamba": (
        "Bamba 9B",
        9.78,
        (128256, 4096, 14336, 32, 32, 8, 128, 262144),
        {"attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, **_MAMBA},
    ),
    "FalconH1": (
        "Falcon-H1 7B",
        7.59,
        (130048, 3072, 12288, 44, 12, 2, 128, 262144),
        {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_n_groups": 1, **_MAMBA},
    ),
    "Glm4Moe": (
        "GLM-4.5-Air",
        106.9,
        (151552, 4096, 10944, 46, 96, 8, 128, 131072),
        {
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
        },
    ),
    "Dots1": (
        "dots.llm1",
        143.0,
        (152064, 4096, 10944, 62, 32, 32, 128, 32768),
        {
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "sliding_window": None,
        },
    ),
    "ExaoneMoe": (
        "K-EXAONE 236B-A23B",
        236.0,
        (153600, 6144, 18432, 48, 64, 8, 128, 262144),
        {
            "num_experts": 128,
            "moe_intermediate_size": 2048,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 12,
            "sliding_window": 128,
        },
    ),
    "Cohere2Moe": (
        "Command A+, its text",
        218.3,
        (262144, 4096, 4096, 32, 128, 8, 128, 200000),
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 4,
            "expert_selection_fn": "sigmoid",
            **_TIED,
        },
    ),
    "Ministral": (
        "Ministral 8B",
        8.02,
        (131072, 4096, 12288, 36, 32, 8, 128, 131072),
        {"sliding_window": 32768, "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 9},
    ),
}
_FOLDERS = {
    "Llama": ("Llama 3.1 8B", "llama-3.1-8b", 8.03),
    "Qwen3": ("Qwen3 0.6B", "qwen3-0.6b", 0.596),
    "Qwen3Moe": ("Qwen3-30B-A3B", "qwen3-30b-a3b", 30.5),
    "Gemma2": ("Gemma 2 9B", "gemma-2-9b", 9.24),
    "Gemma4": ("Gemma 4 31B", "gemma-4-31b", 30.7),
    "GptOss": ("gpt-oss-20b", "gpt-oss-20b", 20.9),
    "Lfm2": ("LFM2 1.2B", "lfm2-1.2b", 1.17),
    "GraniteMoeHybrid": ("Granite 4.0 H-Small", "granite-4-h-small", 32.2),
    "NemotronH": ("Nemotron 3 Nano 30B-A3B", "nemotron-3-nano-30b-a3b", 31.6),
    "Qwen3Next": ("Qwen3-Next-80B-A3B", "qwen3-next-80b-a3b", 79.7),
    "Qwen3_5": ("Qwen3.5 27B", "qwen3.5-27b", 26.9),
    "Qwen3_5Moe": ("Qwen3.5-35B-A3B", "qwen3.5-35b-a3b", 34.7),
}
_TESTED = {
    "Mistral": ("Mistral 7B v0.1", "Mistral-7B-v0.1"),
    "Mixtral": ("Mixtral 8x7B", "Mixtral-8x7B"),
    "Qwen2Moe": ("Qwen1.5-MoE-A2.7B", "Qwen1.5-MoE-A2.7B"),
    "Gemma": ("Gemma 2B", "gemma-2b"),
    "Phi3": ("Phi-4", "Phi-4"),
    "SmolLM3": ("SmolLM3 3B", "SmolLM3-3B"),
    "Granite": ("Granite 3.1 2B", "Granite-3.1-2b"),
    "Olmo2": ("OLMo 2 7B", "OLMo-2-7B"),
}
# with the fields that these defaults do not have
_DEFAULTS: dict[str, tuple[str, type[transformers.PreTrainedConfig], float, dict[str, Any]]] = {
    "Ministral3": ("Ministral 3 8B", transformers.Ministral3Config, 8.49, {}),
    "Ernie4_5": ("ERNIE 4.5 0.3B", transformers.Ernie4_5Config, 0.361, {}),
    "Glm4": ("GLM-4-9B-0414", transformers.Glm4Config, 9.40, {}),
    "Phimoe": ("Phi-3.5-MoE", transformers.PhimoeConfig, 41.9, {}),
    "Ernie4_5_Moe": ("ERNIE 4.5 21B-A3B", transformers.Ernie4_5_MoeConfig, 21.8, {}),
    "Mellum": (
        "Mellum 2 12B-A2.5B",
        transformers.MellumConfig,
        12.15,
        {"layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 7},
    ),
    "Llama4": ("Llama 4 Scout", transformers.Llama4TextConfig, 107.8, {}),
    "OlmoHybrid": ("OLMo-Hybrid 7B", transformers.OlmoHybridConfig, 7.43, {}),
    "DeepseekV2": ("DeepSeek-V2-Lite", transformers.DeepseekV2Config, 15.7, V2_LITE),
    "DeepseekV3": ("DeepSeek-V3", transformers.DeepseekV3Config, 671.0, {}),
    "MiniMaxM2": ("MiniMax-M2", transformers.MiniMaxM2Config, 229.0, {"rotary_dim": 64}),
    "SolarOpen": ("Solar Open 100B", transformers.SolarOpenConfig, 102.6, {}),
    "Mistral4": ("Mistral Small 4, its text", transformers.Mistral4Config, 119.0, {}),
    "Glm4MoeLite": ("GLM-4.7-Flash", transformers.Glm4MoeLiteConfig, 29.9, {}),
    # without the default's own list of layers
    "KimiLinear": ("Kimi-Linear 48B-A3B", transformers.KimiLinearConfig, 49.1, KIMI | {"layer_types": None}),
}


def published_shapes() -> dict[str, Shape]:
    """Return a model of each architecture that people download."""
    shapes = {
        key: Shape(name, ModelConfig.from_folder(FOLDER / folder), size)
        for key, (name, folder, size) in _FOLDERS.items()
    }
    shapes |= {key: Shape(name, *_tested(published)) for key, (name, published) in _TESTED.items()}
    for key, (name, config_class, size, fields) in _DEFAULTS.items():
        shapes[key] = Shape(name, _read(key, config_class().to_dict() | fields), size)
    for key, (name, size, sizes, fields) in _SIZES.items():
        shapes[key] = Shape(name, _read(key, dict(zip(_NAMES, sizes, strict=True)) | fields), size)
    return {f"{key}ForCausalLM": shape for key, shape in shapes.items()}


def _tested(name: str) -> tuple[ModelConfig, float]:
    config, num_parameters = PUBLISHED[name]
    return config, num_parameters / 1e9


def _read(key: str, fields: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_json(fields | {"architectures": [f"{key}ForCausalLM"]})
