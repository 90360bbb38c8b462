"""Adapters: the LoRA adapters of --lora, opened and checked against the model. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.device.memory import format_size
from engine.interface.config import EngineConfig
from kernels.ops import LoraTokens
from models.config.model_config import ModelConfig
from models.lora.adapter import Adapter
from models.lora.linear import AdapterStack, check_adapters
from models.parallel import TensorParallel


@dataclass(frozen=True)
class Adapters:
    """The opened adapters, in the order of EngineConfig.loras: the first has lora_index 1. Keeps their files mapped."""

    opened: tuple[Adapter, ...]
    num_bytes: int  # on the device
    tokens: LoraTokens = field(repr=False)  # shared by the model and its InputBatchBuilder

    def stack(self, *, is_partial: bool = False) -> AdapterStack:
        """Return the source of adapter weights for building a model. is_partial: the model lacks layers."""
        return AdapterStack(self.opened, self.tokens, is_partial=is_partial)

    def describe(self) -> str:
        """Return names and size as text."""
        return f"{', '.join(adapter.name for adapter in self.opened)} ({format_size(self.num_bytes)})"


def open_adapters(
    config: EngineConfig,
    model: ModelConfig,
    *,
    max_step_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
) -> Adapters | None:
    """Open the adapters of the config; None if it has none. Raises ModelError for one that cannot be served."""
    if not config.loras:
        return None
    opened = tuple(Adapter(source.name, Path(source.folder)) for source in config.loras)
    num_bytes = check_adapters(opened, model, dtype=dtype, tp=tp)
    tokens = LoraTokens(num_adapters=len(opened), max_tokens=max_step_tokens, device=device)
    return Adapters(opened, num_bytes, tokens)
