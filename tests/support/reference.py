"""Tiny random checkpoints, and the logits that transformers computes for them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import transformers

ZERO_CENTRED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LOGITS_ERROR = "logits_error"  # a property of the tests' reports: the largest absolute difference


def save_checkpoint(folder: Path, config: transformers.PreTrainedConfig, *, max_shard_size: str = "1GB") -> None:
    """Save a model whose every parameter matters: wide weights, norms that are not ones, biases that are not zero."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight") and config.model_type in ("gemma4_text", "gemma4_unified_text"):
                parameter.uniform_(0.1, 0.4)  # in place of a scale: at 1, float32 alone would be off by 1e-3
            elif config.model_type in ZERO_CENTRED and name.endswith("norm.weight") and "linear_attn" not in name:
                parameter.uniform_(-0.5, 0.5)  # 1 is added to it; a larger sum makes float32 alone be off by 1e-4
            elif name.endswith(("norm.weight", "norm_f.weight")):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def attention_of(config: transformers.PreTrainedConfig) -> str:
    """The fastest attention that computes all of a model: sdpa knows no cap on logits and no sinks."""
    return "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"


@contextmanager
def delta_rule_token_by_token(config: transformers.PreTrainedConfig) -> Iterator[None]:
    """Make transformers compute the gated delta rule of prompts by the recurrence, which defines it.

    Its chunks of 64 tokens round otherwise: in float32 logits of the tests' checkpoints differ by up to 3e-4.
    """
    family = config.model_type.removesuffix("_text")
    kinds = {"linear_num_key_heads": "torch_{}_gated_delta_rule", "linear_num_heads": "{}_kimi_delta_attention"}
    name = next((name for field, name in kinds.items() if hasattr(config, field)), None)
    if name is None:
        yield
        return
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with patch.object(module, name.format("chunk"), getattr(module, name.format("recurrent"))):
        yield


def reference_logits(folder: Path, token_ids: list[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[len(token_ids), vocab_size], as transformers computes them."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention_of(config)
    )
    with torch.inference_mode(), delta_rule_token_by_token(config):
        return model.eval()(torch.tensor([token_ids])).logits[0]
