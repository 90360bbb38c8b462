"""One tiny transformers config for every kind of checkpoint that the models folder serves."""

from __future__ import annotations

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}


def make_configs() -> dict[str, PreTrainedConfig]:
    """Checkpoint kind → config."""
    configs = {
        "llama2": LlamaConfig(**TINY, num_key_value_heads=4, rope_parameters=DEFAULT_ROPE),
        "llama3.1": LlamaConfig(**TINY, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
        "tinyllama": LlamaConfig(**TINY | {"num_attention_heads": 8}, num_key_value_heads=1),
        "llama_all_biases": LlamaConfig(**TINY, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
        "llama_wide_heads": LlamaConfig(**TINY, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True),
        "linear_rope": LlamaConfig(
            **TINY, num_key_value_heads=2, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        ),
        "yarn_rope": LlamaConfig(**TINY, num_key_value_heads=2, rope_parameters=YARN_ROPE),
        "mistral": MistralConfig(**TINY, num_key_value_heads=2, sliding_window=7),
        "mistral_full": MistralConfig(**TINY, num_key_value_heads=2, head_dim=16, sliding_window=None),
        "qwen2": Qwen2Config(**TINY, num_key_value_heads=2),
        "qwen2_windows": Qwen2Config(
            **TINY, num_key_value_heads=2, use_sliding_window=True, sliding_window=6, max_window_layers=1
        ),
        "qwen3": Qwen3Config(**TINY, num_key_value_heads=2, head_dim=24, tie_word_embeddings=True),
        "qwen3_yarn": Qwen3Config(
            **TINY, num_key_value_heads=4, head_dim=8, attention_bias=True, rope_parameters=YARN_ROPE
        ),
    }
    return configs
