"""Makes models/known_models.json and docs/reference/models-by-name.md: the ids that people search for.

Bytes are the engine's own arithmetic over the sizes of a published config.json: those of tests/support/
published_shapes.py, of test_published_configs.py, or of _SIZES here. Each row says how many parameters the publisher
states; a test compares them with those that follow from the sizes, to 1 %. Nothing is estimated.
"""

import json
from typing import Any, NamedTuple

import torch

from engine.interface.units import GIB, format_count
from models.config.model_config import ModelConfig
from tests.support.published_shapes import FOLDER, published_shapes
from tests.unit.models.config.test_published_configs import PUBLISHED

_CUDA = torch.device("cuda")
_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NAMES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
_TIED = {"tie_word_embeddings": True}
_QWEN7 = (152064, 3584, 18944, 28, 28, 4, 128, 32768)
_QWEN8 = (151936, 4096, 12288, 36, 32, 8, 128, 40960)
_QWEN4 = (151936, 2560, 9728, 36, 32, 8, 128, 40960)
_LLAMA7 = (32000, 4096, 11008, 32, 32, 32, 128, 4096)
_GEMMA3 = {"sliding_window": 1024, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh", **_TIED}
_SLIDING_4 = ["sliding_attention"] * 4 + ["full_attention"]
_SLIDING_5 = ["sliding_attention"] * 5 + ["full_attention"]
_GEMMA4 = {
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    **_TIED,
}
_QWEN3_5 = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
_GEMMA4_EXPERTS = {
    "sliding_window": 1024,
    "layer_types": _SLIDING_5 * 5,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
# a size of the sections below: architecture, sizes of _NAMES, other fields
_Sizes = tuple[str, tuple[int, ...], dict[str, Any]]
_SIZES: dict[str, _Sizes] = {
    "llama-3.2-3b": ("Llama", (128256, 3072, 8192, 28, 24, 8, 128, 131072), _TIED),
    "llama-70b": ("Llama", (128256, 8192, 28672, 80, 64, 8, 128, 131072), {}),
    "llama-405b": ("Llama", (128256, 16384, 53248, 126, 128, 8, 128, 131072), {}),
    "smollm2-360m": ("Llama", (49152, 960, 2560, 32, 15, 5, 64, 8192), _TIED),
    "smollm2-1.7b": ("Llama", (49152, 2048, 8192, 24, 32, 32, 64, 8192), _TIED),
    "llava-7b": ("Llama", (32064, *_LLAMA7[1:]), {}),
    "mistral-7b-v0.3": ("Mistral", (32768, 4096, 14336, 32, 32, 8, 128, 32768), {"sliding_window": None}),
    "qwen2.5-0.5b": ("Qwen2", (151936, 896, 4864, 24, 14, 2, 64, 32768), _TIED),
    "qwen2.5-1.5b": ("Qwen2", (151936, 1536, 8960, 28, 12, 2, 128, 32768), _TIED),
    "qwen2.5-1.5b-untied": ("Qwen2", (151936, 1536, 8960, 28, 12, 2, 128, 131072), {}),
    "qwen2.5-3b": ("Qwen2", (151936, 2048, 11008, 36, 16, 2, 128, 32768), _TIED),
    "qwen2.5-7b": ("Qwen2", _QWEN7, {}),
    "qwen2.5-14b": ("Qwen2", (152064, 5120, 13824, 48, 40, 8, 128, 32768), {}),
    "qwen2.5-32b": ("Qwen2", (152064, 5120, 27648, 64, 40, 8, 128, 32768), {}),
    "qwen2.5-72b": ("Qwen2", (152064, 8192, 29568, 80, 64, 8, 128, 32768), {}),
    "qwen3-1.7b": ("Qwen3", (151936, 2048, 6144, 28, 16, 8, 128, 40960), _TIED),
    "qwen3-4b": ("Qwen3", _QWEN4, _TIED),
    "qwen3-8b": ("Qwen3", _QWEN8, {}),
    "qwen3-14b": ("Qwen3", (151936, 5120, 17408, 40, 40, 8, 128, 40960), {}),
    "qwen3-32b": ("Qwen3", (151936, 5120, 25600, 64, 64, 8, 128, 40960), {}),
    "gemma-3-4b": ("Gemma3", (262208, 2560, 10240, 34, 8, 4, 256, 131072), _GEMMA3),
    "gemma-3-12b": ("Gemma3", (262208, 3840, 15360, 48, 16, 8, 256, 131072), _GEMMA3),
    "gemma-2-27b": (
        "Gemma2",
        (256000, 4608, 36864, 46, 32, 16, 128, 8192),
        {"sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144, **_TIED},
    ),
    "gemma-3-270m": ("Gemma3", (262144, 640, 2048, 18, 4, 1, 256, 32768), _GEMMA3 | {"sliding_window": 512}),
    "gemma-4-e2b": (
        "Gemma4",
        (262144, 1536, 6144, 35, 8, 1, 256, 131072),
        _GEMMA4 | {"layer_types": _SLIDING_4 * 7, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    ),
    "gemma-4-e4b": (
        "Gemma4",
        (262144, 2560, 10240, 42, 8, 2, 256, 131072),
        _GEMMA4 | {"layer_types": _SLIDING_5 * 7, "num_kv_shared_layers": 18},
    ),
    "gemma-4-26b": ("Gemma4", (262144, 2816, 2112, 30, 16, 8, 256, 262144), _GEMMA4 | _GEMMA4_EXPERTS),
    "llama-3-8b": ("Llama", (128256, 4096, 14336, 32, 32, 8, 128, 8192), {}),
    "hermes-3-8b": ("Llama", (128256, 4096, 14336, 32, 32, 8, 128, 131072), {}),
    "zephyr-7b": ("Mistral", (32000, 4096, 14336, 32, 32, 8, 128, 32768), {"sliding_window": 4096}),
    "qwen3-emb-4b": ("Qwen3", (151665, *_QWEN4[1:]), _TIED),
    "qwen3-emb-8b": ("Qwen3", (151665, *_QWEN8[1:]), {}),
    "glm-4-32b": ("Glm4", (151552, 6144, 23040, 61, 48, 2, 128, 32768), {}),
    "olmo-3-32b": ("Olmo3", (100278, 5120, 27648, 64, 40, 8, 128, 65536), {"sliding_window": 4096}),
    "granite-3.3-8b": ("Granite", (49159, 4096, 12800, 40, 32, 8, 128, 131072), _TIED),
    "qwen3-coder-480b": (
        "Qwen3Moe",
        (151936, 6144, 8192, 62, 96, 8, 128, 262144),
        {"num_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "norm_topk_prob": True},
    ),
    "ministral-3-3b": ("Ministral3", (131072, 3072, 9216, 26, 32, 8, 128, 262144), _TIED),
    "ministral-3-14b": ("Ministral3", (131072, 5120, 16384, 40, 32, 8, 128, 262144), {}),
    "qwen3.5-122b": (
        "Qwen3_5Moe",
        (248320, 3072, 1024, 48, 32, 2, 256, 262144),
        _QWEN3_5 | {"num_experts": 256, "num_experts_per_tok": 8},
    ),
    "qwen3.5-397b": (
        "Qwen3_5Moe",
        (248320, 4096, 1024, 60, 32, 2, 256, 262144),
        _QWEN3_5 | {"num_experts": 512, "num_experts_per_tok": 10},
    ),
    "glm-4.6": (
        "Glm4Moe",
        (151552, 5120, 12288, 92, 96, 8, 128, 202752),
        {
            "n_routed_experts": 160,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
}


# models of benchmarks/shapes
_FOLDERS = {"gpt-oss-120b": "gpt-oss-120b-mxfp4", "qwen3.5-4b": "qwen3.5-4b"}
_AS_PUBLISHED = {f"openai/gpt-oss-{size}": FOLDER / f"gpt-oss-{size}-mxfp4" for size in ("20b", "120b")}


class Known(NamedTuple):
    """A served model. shape: in _SIZES, _FOLDERS, PUBLISHED or, by architecture, published_shapes()."""

    model: str
    shape: str
    billions: float  # as stated
    text_of: str = ""  # the architecture of pictures whose text alone is served
    note: str = ""


SERVED = (
    Known("meta-llama/Llama-3.2-1B-Instruct", "Llama-3.2-1B", 1.24),
    Known("meta-llama/Llama-3.2-3B-Instruct", "llama-3.2-3b", 3.21),
    Known("meta-llama/Llama-3.1-8B-Instruct", "Llama", 8.03),
    Known("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b", 8.03),
    Known("meta-llama/Llama-3.3-70B-Instruct", "llama-70b", 70.6),
    Known("meta-llama/Llama-3.1-70B-Instruct", "llama-70b", 70.6),
    Known("meta-llama/Llama-3.1-405B-Instruct", "llama-405b", 406.0),
    Known("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama4", 107.8, "Llama4ForConditionalGeneration"),
    Known("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b", 6.74),
    Known("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama-1.1B", 1.10),
    Known("NousResearch/Hermes-3-Llama-3.1-8B", "hermes-3-8b", 8.03),
    Known("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M", 0.135),
    Known("HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-360m", 0.362),
    Known("HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-1.7b", 1.71),
    Known("HuggingFaceTB/SmolLM3-3B", "SmolLM3-3B", 3.08),
    Known("Qwen/Qwen3-0.6B", "Qwen3", 0.596),
    Known("Qwen/Qwen3-1.7B", "qwen3-1.7b", 1.72),
    Known("Qwen/Qwen3-4B", "qwen3-4b", 4.02),
    Known("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b", 4.02),
    Known("Qwen/Qwen3-8B", "qwen3-8b", 8.19),
    Known("Qwen/Qwen3-14B", "qwen3-14b", 14.8),
    Known("Qwen/Qwen3-32B", "qwen3-32b", 32.8),
    Known("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B", 30.5),
    Known("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B", 30.5),
    Known("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-30B-A3B", 30.5),
    Known("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b", 480.0),
    Known("Qwen/Qwen3-235B-A22B", "Qwen3-235B-A22B", 235.0),
    Known("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B", 235.0),
    Known("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3Next", 79.7),
    Known("Qwen/Qwen3-Embedding-0.6B", "Qwen3", 0.596, note="embeddings"),
    Known("Qwen/Qwen3-Embedding-4B", "qwen3-emb-4b", 4.02, note="embeddings"),
    Known("Qwen/Qwen3-Embedding-8B", "qwen3-emb-8b", 8.19, note="embeddings"),
    Known("Qwen/Qwen3-VL-2B-Instruct", "qwen3-1.7b", 1.72, "Qwen3VLForConditionalGeneration"),
    Known("Qwen/Qwen3-VL-4B-Instruct", "qwen3-4b", 4.02, "Qwen3VLForConditionalGeneration"),
    Known("Qwen/Qwen3-VL-8B-Instruct", "qwen3-8b", 8.19, "Qwen3VLForConditionalGeneration"),
    Known("Qwen/Qwen3-VL-32B-Instruct", "qwen3-32b", 32.8, "Qwen3VLForConditionalGeneration"),
    Known("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3-30B-A3B", 30.5, "Qwen3VLMoeForConditionalGeneration"),
    Known("Qwen/Qwen3-VL-235B-A22B-Instruct", "Qwen3-235B-A22B", 235.0, "Qwen3VLMoeForConditionalGeneration"),
    Known("Qwen/Qwen3.5-4B", "qwen3.5-4b", 4.21, "Qwen3_5ForConditionalGeneration"),
    Known("Qwen/Qwen3.5-27B", "Qwen3_5", 26.9, "Qwen3_5ForConditionalGeneration"),
    Known("Qwen/Qwen3.5-35B-A3B", "Qwen3_5Moe", 34.7, "Qwen3_5MoeForConditionalGeneration"),
    Known("Qwen/Qwen3.5-122B-A10B", "qwen3.5-122b", 122.0, "Qwen3_5MoeForConditionalGeneration"),
    Known("Qwen/Qwen3.5-397B-A17B", "qwen3.5-397b", 397.0, "Qwen3_5MoeForConditionalGeneration"),
    Known("Qwen/Qwen3.6-27B", "Qwen3_5", 26.9, "Qwen3_5ForConditionalGeneration"),
    Known("Qwen/Qwen3.6-35B-A3B", "Qwen3_5Moe", 34.7, "Qwen3_5MoeForConditionalGeneration"),
    Known("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b", 0.494),
    Known("Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5-1.5b", 1.54),
    Known("Qwen/Qwen2.5-3B-Instruct", "qwen2.5-3b", 3.09),
    Known("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", 7.62),
    Known("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b", 14.8),
    Known("Qwen/Qwen2.5-32B-Instruct", "qwen2.5-32b", 32.8),
    Known("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b", 72.7),
    Known("Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-1.5b", 1.54),
    Known("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b", 7.62),
    Known("Qwen/Qwen2.5-Coder-14B-Instruct", "qwen2.5-14b", 14.8),
    Known("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b", 32.8),
    Known("Qwen/QwQ-32B", "qwen2.5-32b", 32.8),
    Known("Qwen/Qwen2.5-VL-3B-Instruct", "qwen2.5-3b", 3.09, "Qwen2_5_VLForConditionalGeneration"),
    Known("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-7b", 7.62, "Qwen2_5_VLForConditionalGeneration"),
    Known("Qwen/Qwen2.5-VL-32B-Instruct", "qwen2.5-32b", 32.8, "Qwen2_5_VLForConditionalGeneration"),
    Known("Qwen/Qwen2.5-VL-72B-Instruct", "qwen2.5-72b", 72.7, "Qwen2_5_VLForConditionalGeneration"),
    Known("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2.5-1.5b-untied", 1.78),
    Known("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b", 7.62),
    Known("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b", 14.8),
    Known("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b", 32.8),
    Known("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Llama", 8.03),
    Known("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-70b", 70.6),
    Known("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b", 8.19),
    Known("deepseek-ai/DeepSeek-V2-Lite-Chat", "DeepseekV2", 15.7),
    Known("deepseek-ai/DeepSeek-V3.1", "DeepseekV3", 671.0, note="published in FP8"),
    Known("deepseek-ai/DeepSeek-V3-0324", "DeepseekV3", 671.0, note="published in FP8"),
    Known("deepseek-ai/DeepSeek-R1", "DeepseekV3", 671.0, note="published in FP8"),
    Known("google/gemma-2-2b-it", "gemma-2-2b", 2.61),
    Known("google/gemma-2-9b-it", "Gemma2", 9.24),
    Known("google/gemma-2-27b-it", "gemma-2-27b", 27.2),
    Known("google/gemma-3-270m-it", "gemma-3-270m", 0.268),
    Known("google/gemma-3-1b-it", "gemma-3-1b", 1.0),
    Known("google/gemma-3-4b-it", "gemma-3-4b", 3.88, "Gemma3ForConditionalGeneration"),
    Known("google/gemma-3-12b-it", "gemma-3-12b", 11.8, "Gemma3ForConditionalGeneration"),
    Known("google/gemma-3-27b-it", "Gemma3", 27.0, "Gemma3ForConditionalGeneration"),
    # 5.1 and 7.9 are stated with the encoders, of 0.15 for pictures and 0.3 for sound
    Known("google/gemma-4-E2B-it", "gemma-4-e2b", 4.65, "Gemma4ForConditionalGeneration"),
    Known("google/gemma-4-E4B-it", "gemma-4-e4b", 7.45, "Gemma4ForConditionalGeneration"),
    Known("google/gemma-4-26B-A4B-it", "gemma-4-26b", 25.2, "Gemma4ForConditionalGeneration"),
    Known("google/gemma-4-31B-it", "Gemma4", 30.7, "Gemma4ForConditionalGeneration"),
    Known("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3", 7.25),
    Known("mistralai/Ministral-8B-Instruct-2410", "Ministral", 8.02),
    Known("mistralai/Ministral-3-3B-Instruct-2512", "ministral-3-3b", 3.43, "Mistral3ForConditionalGeneration"),
    Known("mistralai/Ministral-3-8B-Instruct-2512", "Ministral3", 8.49, "Mistral3ForConditionalGeneration"),
    Known("mistralai/Ministral-3-14B-Instruct-2512", "ministral-3-14b", 13.5, "Mistral3ForConditionalGeneration"),
    Known("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo", 12.2),
    Known("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B", 23.6),
    Known(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "Mistral-Small-24B", 23.6, "Mistral3ForConditionalGeneration"
    ),
    Known("mistralai/Mistral-Small-4-119B-2603", "Mistral4", 119.0, "Mistral3ForConditionalGeneration"),
    Known("HuggingFaceH4/zephyr-7b-beta", "zephyr-7b", 7.24),
    Known("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B", 46.7),
    Known("mistralai/Mixtral-8x22B-Instruct-v0.1", "Mixtral-8x22B", 141.0),
    Known("microsoft/Phi-3-mini-4k-instruct", "Phi-3-mini-4k", 3.82),
    Known("microsoft/Phi-3.5-mini-instruct", "Phi-3-mini-4k", 3.82),
    Known("microsoft/Phi-4-mini-instruct", "Phi-4-mini", 3.84),
    Known("microsoft/phi-4", "Phi-4", 14.7),
    Known("microsoft/Phi-4-reasoning", "Phi-4", 14.7),
    Known("microsoft/Phi-3.5-MoE-instruct", "Phimoe", 41.9),
    Known("openai/gpt-oss-20b", "GptOss", 20.9, note="published in MXFP4"),
    Known("openai/gpt-oss-120b", "gpt-oss-120b", 116.8, note="published in MXFP4"),
    Known("zai-org/GLM-4-9B-0414", "Glm4", 9.40),
    Known("zai-org/GLM-4-32B-0414", "glm-4-32b", 32.6),
    Known("zai-org/GLM-4.5-Air", "Glm4Moe", 106.9),
    Known("zai-org/GLM-4.6", "glm-4.6", 355.0),
    Known("zai-org/GLM-4.7-Flash", "Glm4MoeLite", 29.9),
    Known("allenai/OLMo-2-1124-7B-Instruct", "OLMo-2-7B", 7.30),
    Known("allenai/Olmo-3-7B-Instruct", "Olmo3", 7.3),
    Known("allenai/Olmo-3-32B-Think", "olmo-3-32b", 32.2),
    Known("ibm-granite/granite-3.1-2b-instruct", "Granite-3.1-2b", 2.53),
    Known("ibm-granite/granite-3.3-8b-instruct", "granite-3.3-8b", 8.17),
    Known("ibm-granite/granite-4.0-h-small", "GraniteMoeHybrid", 32.2),
    Known("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NemotronH", 31.6),
    Known("CohereLabs/c4ai-command-r7b-12-2024", "Cohere2", 8.03),
    Known("tiiuae/Falcon-H1-7B-Instruct", "FalconH1", 7.59),
    Known("LiquidAI/LFM2-1.2B", "Lfm2", 1.17),
    Known("LiquidAI/LFM2-8B-A1B", "Lfm2Moe", 8.34),
    Known("ByteDance-Seed/Seed-OSS-36B-Instruct", "SeedOss", 36.2),
    Known("LGAI-EXAONE/EXAONE-4.0-32B", "Exaone4", 32.0),
    Known("swiss-ai/Apertus-8B-Instruct-2509", "Apertus", 8.05),
    Known("arcee-ai/AFM-4.5B", "Arcee", 4.62),
    Known("MiniMaxAI/MiniMax-M2", "MiniMaxM2", 229.0, note="published in FP8"),
    Known("moonshotai/Kimi-Linear-48B-A3B-Instruct", "KimiLinear", 49.1, note="needs a tokenizer.json, which it lacks"),
    Known("llava-hf/llava-1.5-7b-hf", "llava-7b", 6.74, "LlavaForConditionalGeneration"),
)


class Unserved(NamedTuple):
    """A model that is not served, why, and the nearest that is; "" for none."""

    model: str
    architecture: str
    why: str
    instead: str = ""


_SEES = "it sees, and its text part is not served by itself"
_BERT = "an encoder in which each token sees later ones"
UNSERVED = (
    Unserved("meta-llama/Llama-3.2-11B-Vision-Instruct", "MllamaForConditionalGeneration", _SEES,
             "meta-llama/Llama-3.1-8B-Instruct"),
    Unserved("Qwen/Qwen2-VL-7B-Instruct", "Qwen2VLForConditionalGeneration", _SEES, "Qwen/Qwen2.5-VL-7B-Instruct"),
    Unserved("google/gemma-3n-E4B-it", "Gemma3nForConditionalGeneration", _SEES, "google/gemma-3-4b-it"),
    Unserved("google/paligemma-3b-pt-224", "PaliGemmaForConditionalGeneration", _SEES, "google/gemma-3-4b-it"),
    Unserved("zai-org/GLM-4.5V", "Glm4vMoeForConditionalGeneration", _SEES, "zai-org/GLM-4.5-Air"),
    Unserved("microsoft/Phi-4-multimodal-instruct", "Phi4MMForCausalLM", _SEES, "microsoft/Phi-4-mini-instruct"),
    Unserved("Qwen/Qwen2.5-Omni-7B", "Qwen2_5OmniModel", "it hears, sees and speaks", "Qwen/Qwen2.5-7B-Instruct"),
    Unserved("Qwen/Qwen3-Omni-30B-A3B-Instruct", "Qwen3OmniMoeForConditionalGeneration", "it hears, sees and speaks",
             "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    Unserved("mistralai/Voxtral-Mini-3B-2507", "VoxtralForConditionalGeneration", "it hears",
             "mistralai/Ministral-3-3B-Instruct-2512"),
    Unserved("zai-org/GLM-5", "GlmMoeDsaForCausalLM", "its sparse attention is not implemented", "zai-org/GLM-4.6"),
    Unserved("deepseek-ai/DeepSeek-V3.2", "DeepseekV32ForCausalLM", "its sparse attention is not implemented",
             "deepseek-ai/DeepSeek-V3.1"),
    Unserved("tiiuae/falcon-7b-instruct", "FalconForCausalLM", "its attention cannot be replaced",
             "tiiuae/Falcon-H1-7B-Instruct"),
    Unserved("state-spaces/mamba-2.8b-hf", "MambaForCausalLM", "its states are not those of a served layer"),
    Unserved("google-bert/bert-base-uncased", "BertForMaskedLM", _BERT),
    Unserved("sentence-transformers/all-MiniLM-L6-v2", "BertModel", _BERT, "Qwen/Qwen3-Embedding-0.6B"),
    Unserved("BAAI/bge-m3", "XLMRobertaModel", _BERT, "Qwen/Qwen3-Embedding-0.6B"),
    Unserved("google-t5/t5-base", "T5ForConditionalGeneration", "an encoder and a decoder"),
    Unserved("openai/whisper-large-v3", "WhisperForConditionalGeneration", "it hears: an encoder and a decoder"),
    Unserved("openai/clip-vit-base-patch32", "CLIPModel", "it compares pictures with texts"),
    Unserved("black-forest-labs/FLUX.1-dev", "", "it makes pictures by diffusion"),
    Unserved("stabilityai/stable-diffusion-xl-base-1.0", "", "it makes pictures by diffusion"),
)  # fmt: skip


def config_of(known: Known) -> ModelConfig:
    """Return the model's dimensions; of one that also sees, those of its text part."""
    if known.shape in PUBLISHED:
        return PUBLISHED[known.shape][0]
    if known.shape in _SIZES:
        architecture, sizes, fields = _SIZES[known.shape]
        raw = dict(zip(_NAMES, sizes, strict=True)) | fields | {"architectures": [f"{architecture}ForCausalLM"]}
        return ModelConfig.from_json(raw)
    if known.shape in _FOLDERS:
        raw = json.loads((FOLDER / _FOLDERS[known.shape] / "config.json").read_text(encoding="utf-8"))
        return ModelConfig.from_json({name: raw[name] for name in raw if name != "quantization_config"})
    return published_shapes()[f"{known.shape}ForCausalLM"].config


def known_json() -> str:
    """Return the text of models/known_models.json."""
    served = [_served_row(known) for known in SERVED]
    unserved = [entry._asdict() for entry in UNSERVED]
    lines = ['{\n "served": [']
    lines += [f"  {json.dumps(row)}{',' * (row is not served[-1])}" for row in served]
    lines += [' ],\n "unserved": [']
    lines += [f"  {json.dumps(row)}{',' * (row is not unserved[-1])}" for row in unserved]
    return "\n".join([*lines, " ]\n}\n"])


def _served_row(known: Known) -> dict[str, Any]:
    config = config_of(known)
    note = known.note
    if (published := _AS_PUBLISHED.get(known.model)) is not None:
        size = ModelConfig.from_folder(published).weight_bytes(torch.bfloat16, _CUDA)
        note += f": {size / GIB:.1f} GiB"
    weights = {name: config.quantized(name).weight_bytes(torch.bfloat16, _CUDA) for name in ("none", "fp8", "int4")}
    return {
        "model": known.model,
        "architecture": known.text_of or config.architecture,
        "parameters": config.num_parameters,
        "bf16": weights["none"],
        "fp8": weights["fp8"],
        "int4": weights["int4"],
        "kv_per_token": config.kv_bytes_per_token(1, torch.bfloat16),
        "is_text_part": bool(known.text_of),
        "note": note,
    }


def known_rows() -> list[str]:
    """Return the rows of the table of served models."""
    rows = []
    for known in SERVED:
        row = _served_row(known)
        note = "; ".join(filter(None, ["its text alone" * row["is_text_part"], row["note"]]))
        sizes = [f"{row[name] / GIB:,.1f}" for name in ("bf16", "fp8", "int4")]
        command = f"`quire serve {known.model}`"
        cells = [known.model, format_count(row["parameters"]), *sizes, f"{row['kv_per_token']:,}", note or "–", command]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def unserved_rows() -> list[str]:
    """Return the rows of the table of models that are not served."""
    return [f"| {entry.model} | {entry.why} | {entry.instead or '–'} |" for entry in UNSERVED]
