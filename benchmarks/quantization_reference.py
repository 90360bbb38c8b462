"""Reference: the unquantised model that schemes are compared with, and its recorded inputs and logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from engine.startup.device_choice import resolve_dtype
from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from models.build import Model, build
from models.config.model_config import ModelConfig
from models.context import ForwardContext, LayerKV
from models.errors import ModelError
from models.parallel import TensorParallel
from models.weights.weights import Weights

_LAYER_ROWS = 8  # first tokens of each answer, used to compare layers
_BLOCK = 16


@dataclass(frozen=True)
class Conversation:
    """A prompt and the unquantised model's answer."""

    token_ids: list[int]
    num_prompt: int

    @property
    def answered(self) -> slice:
        """Return the positions that predict a token of the answer, or the end after it."""
        return slice(self.num_prompt - 1, len(self.token_ids))


@dataclass(frozen=True)
class Reading:
    """A model's logits and layer inputs for one conversation."""

    # [tokens, vocab_size]
    logits: torch.Tensor
    # layer → [tokens, in]
    inputs: dict[str, torch.Tensor]


@dataclass
class Reference:
    """The unquantised model, and its outputs for each conversation."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    conversations: Sequence[Conversation]
    model: Model
    # [tokens of the answer, vocab_size] each
    logits: list[torch.Tensor] = field(default_factory=list)
    # layer → [rows, in], its inputs at the first tokens of the answers
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    # layer → the largest magnitude of its inputs, on other conversations
    input_amax: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        folder: Path,
        conversations: Sequence[Conversation],
        others: Sequence[Conversation],
        *,
        device: torch.device,
    ) -> Reference:
        """Load the model, and record the data for comparisons. Raises ModelError."""
        config = ModelConfig.from_folder(folder)
        dtype = resolve_dtype("auto", config, device)
        found = cls(folder, device, dtype, conversations, load(folder, "none", device=device, dtype=dtype))
        for other in others:
            for name, x in read(found.model, config, other.token_ids, found).inputs.items():
                found.input_amax[name] = max(found.input_amax.get(name, 0.0), float(x.abs().amax()))
        kept: dict[str, list[torch.Tensor]] = {}
        for conversation in conversations:
            reading = read(found.model, config, conversation.token_ids, found)
            found.logits.append(reading.logits[conversation.answered])
            for name, x in reading.inputs.items():
                kept.setdefault(name, []).append(x[conversation.answered][:_LAYER_ROWS])
        found.inputs = {name: torch.cat(rows) for name, rows in kept.items()}
        return found

    def amax_of(self, projection: str) -> float:
        """Return the largest magnitude of a projection's input; projection: its name in a checkpoint."""
        prefix, _, name = projection.rpartition(".")
        block = prefix.removeprefix("model.")
        for layer, amax in self.input_amax.items():
            owner, _, merged = layer.rpartition(".")
            if owner == block and is_last(name) == is_last(merged):
                return amax
        raise ModelError(f"{projection}: no layer of the model has it")


def load(folder: Path, flag: str, *, device: torch.device, dtype: torch.dtype) -> Model:
    """Build a model as the flag --quantization says. Raises ModelError."""
    config = ModelConfig.from_folder(folder).quantized(flag)
    with torch.inference_mode():
        return build(config, Weights.from_folder(folder, device=device, dtype=dtype), TensorParallel())


def layers_of(model: Model) -> Mapping[str, nn.Module]:
    """Return the layers that a scheme may quantise, by name."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def is_last(projection: str) -> bool:
    """Return True if a projection's input is computed inside its block, not the block's input."""
    return projection in ("o_proj", "down_proj")


def read(model: Model, config: ModelConfig, token_ids: list[int], reference: Reference) -> Reading:
    """Run a model over a conversation, as one prefill."""
    inputs: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor]], None]:
        return lambda module, arguments: inputs.update({name: arguments[0]})

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers_of(model).items()]
    with torch.inference_mode():
        logits = model.compute_logits(model(*_plan(token_ids, config, reference)))
    for handle in handles:
        handle.remove()
    return Reading(logits, inputs)


def _plan(token_ids: list[int], config: ModelConfig, reference: Reference) -> tuple[torch.Tensor, ForwardContext]:
    """Return the context of a step of one row whose blocks are contiguous."""
    device, num_tokens = reference.device, len(token_ids)
    num_blocks = -(-num_tokens // _BLOCK)
    shape = (num_blocks, _BLOCK, config.num_kv_heads_per_rank(1), config.head_dim)
    caches = [
        LayerKV(
            torch.zeros(shape, dtype=reference.dtype, device=device),
            torch.zeros(shape, dtype=reference.dtype, device=device),
        )
        for _ in range(config.num_layers)
    ]
    places = torch.arange(num_tokens, device=device)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=places,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        num_decodes=0,
    )
    input_ids = torch.tensor(token_ids, device=device)
    return input_ids, ForwardContext(places, [metadata], TorchAttention(), caches)
