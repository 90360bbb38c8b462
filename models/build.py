"""build(): makes a model from its config and its weights, by the architecture's row in models/registry.py."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.parallel import TensorParallel
from models.registry import find_architecture
from models.weights.weights import Weights


class Model(Protocol):
    """The model that build() returns: an nn.Module with a step's two calls, run under torch.inference_mode."""

    def __call__(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden [T, hidden_size]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size], the same on every rank. Only for models that have a head."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """See nn.Module.modules."""
        ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """See nn.Module.named_modules."""
        ...


def build(config: ModelConfig, w: Weights, tp: TensorParallel) -> Model:
    """Make the model with this rank's weights; every tensor of the checkpoint must be used.

    Blocks while weights are read. Raises ModelError.
    """
    config.check_tensor_parallel(tp.size, is_expert_parallel=tp.is_expert_parallel)
    architecture = find_architecture(config.architecture)
    module_name, _, name = architecture.target.partition(":")
    make_model = vars(importlib.import_module(module_name))[name]
    text = w if architecture.text_prefix is None else w / architecture.text_prefix
    model: Model = make_model(config, text, tp).eval()
    needs_no_head = config.tie_word_embeddings or not config.has_lm_head
    drafts = (f"model.layers.{config.num_layers + index}." for index in range(config.num_draft_layers))
    w.finish(has_tied_embeddings=needs_no_head, ignored_prefixes=(*architecture.ignored_prefixes, *drafts))
    return model


def check_headers(config: ModelConfig, folder: Path, tp: TensorParallel, *, dtype: torch.dtype) -> None:
    """Check the names, shapes and dtypes of a folder's tensors against what a build reads; no values are read.

    Does nothing if the folder has no files of weights. Raises ModelError.
    """
    weights = Weights.of_headers(folder, dtype=dtype)
    assert weights.headers is not None
    if weights.headers.is_empty:
        return
    with torch.inference_mode(), _JoinsByShape():
        build(config, weights, tp)


class _JoinsByShape(TorchFunctionMode):
    """Joins tensors without values by their shapes: torch.cat of such imports torch._dynamo, a second of work."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or what stands for it; see torch.overrides."""
        kwargs = kwargs or {}
        return _cat(*args, **kwargs) if func is torch.cat else func(*args, **kwargs)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """As torch.cat, for tensors of one number of dimensions."""
    first, dim = tensors[0], dim % tensors[0].dim()
    shapes = [tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes) or any(not tensor.is_meta for tensor in tensors):
        return torch.cat(tuple(tensors), dim=dim)
    size = sum(tensor.shape[dim] for tensor in tensors)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return first.new_empty((*first.shape[:dim], size, *first.shape[dim + 1 :]), dtype=dtype)
