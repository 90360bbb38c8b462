"""The checkpoints of those engine tests that want a real model."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 320


def save_tiny_llama(folder: Path, *, vocab_size: int = VOCAB_SIZE, spread: float = 0.15) -> Path:
    """Write a tiny random Llama in Hugging Face layout, whose weights make its text depend on its context."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=spread,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_tiny_qwen3(folder: Path) -> Path:
    """Write a tiny random Qwen3 with heads of 64, as kernels for GPUs want them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.12,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
