"""The checkpoint of those engine tests that want a real model."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 320


def save_tiny_llama(folder: Path) -> Path:
    """Write a tiny random Llama in Hugging Face layout, whose weights make its text depend on its context."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
