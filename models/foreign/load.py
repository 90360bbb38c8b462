"""load_foreign(): builds transformers' own class with its weights, and compares it with itself before it serves.

The comparison is of two short random texts: whole by transformers' own attention, and in pieces side by side by
Quire's. A class that keeps more of earlier tokens than keys and values, or mixes texts, fails it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from kernels.attention.base import AttentionBackend, AttentionMetadata
from models.config.model_config import ModelConfig
from models.context import ForwardContext, LayerKV
from models.errors import ModelError
from models.foreign.config import foreign_class
from models.foreign.interface import ATTENTION
from models.foreign.model import ForeignModel
from models.foreign.probe import failure, probe

_LENGTHS = (29, 18)  # tokens of the two texts
_STEPS = ((0, 13, 0, 17), (13, 28, 17, 18), (28, 29, 18, 18))  # [start, end) of each text in each step
# Largest relative error of the hidden states, in the norm over all of them
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
_BLOCK_SIZE = 16


def load_foreign(
    config: ModelConfig,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend,
    is_dummy: bool = False,
) -> ForeignModel:
    """Return the model with its weights on the device, checked. is_dummy: random weights. Raises ModelError."""
    cls, foreign = foreign_class(folder)
    calls = probe(cls, foreign, longest=config.max_context_len)
    if is_dummy:
        model = cls._from_config(foreign, attn_implementation=ATTENTION, dtype=dtype)
    else:
        try:
            with _no_progress_bar():
                loaded: Any = cls.from_pretrained(
                    folder,
                    config=foreign,
                    dtype=dtype,
                    attn_implementation=ATTENTION,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{folder}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from error
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelError(f"{folder}: {len(missing)} tensors are missing, such as {missing[0]}")
    with failure(config.architecture):
        made = ForeignModel(model.to(device).eval(), calls)
        _compare(made, config, backend, device=device, dtype=dtype)
    return made


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Silence transformers' own progress bar, which would go raw into the log."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def _compare(
    model: ForeignModel, config: ModelConfig, backend: AttentionBackend, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ModelError if the model with Quire's attention differs from the one with its own."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(config.vocab_size, (length,), generator=generator).to(device) for length in _LENGTHS]
    with torch.inference_mode():
        whole = [model.whole(text) for text in texts]
        pieces = _Pieces.make(config, backend, device=device, dtype=dtype).run(model, texts)
        logits = model.compute_logits(pieces[0][-1:])
    if logits.shape != (1, config.vocab_size):
        raise ModelError(
            f"{config.architecture}: its head has {[*logits.shape]} logits of one token, not vocab_size"
            f" {config.vocab_size}"
        )
    for one, other in zip(whole, pieces, strict=True):
        error = float((one.float() - other.float()).norm() / one.float().norm().clamp(min=1e-9))
        if not error <= _TOLERANCE[dtype]:
            raise ModelError(
                f"{config.architecture}: with Quire's attention and cache its hidden states differ by {error:.2g} from"
                f" those of transformers' own, more than {_TOLERANCE[dtype]:g}: it cannot be served by its own class"
            )


@dataclass(frozen=True)
class _Pieces:
    """A small pool of two requests with two blocks each, beside block 0, in the wrong order."""

    kv_caches: list[LayerKV]
    table: torch.Tensor
    backend: AttentionBackend

    @classmethod
    def make(
        cls, config: ModelConfig, backend: AttentionBackend, *, device: torch.device, dtype: torch.dtype
    ) -> _Pieces:
        caches = [
            LayerKV(
                torch.zeros(5, _BLOCK_SIZE, cache.num_kv_heads, cache.head_dim, device=device, dtype=dtype),
                torch.zeros(5, _BLOCK_SIZE, cache.num_kv_heads, cache.v_head_dim, device=device, dtype=dtype),
            )
            for cache in config.kv_caches
        ]
        return cls(caches, torch.tensor([[3, 1], [4, 2]], dtype=torch.int32, device=device), backend)

    def run(self, model: ForeignModel, texts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the hidden states of each text, computed in steps beside the other."""
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        for first, end, other_first, other_end in _STEPS:
            spans = [(0, first, end), (1, other_first, other_end)]
            spans = [span for span in spans if span[1] < span[2]]
            ids = torch.cat([texts[row][start:stop] for row, start, stop in spans])
            hidden = model(ids, self._context(spans, ids.device))
            for (row, _, _), part in zip(spans, hidden.split([stop - start for _, start, stop in spans]), strict=True):
                found[row].append(part)
        return [torch.cat(parts) for parts in found]

    def _context(self, spans: list[tuple[int, int, int]], device: torch.device) -> ForwardContext:
        positions = torch.cat([torch.arange(start, stop, device=device) for _, start, stop in spans])
        rows = torch.cat([torch.full((stop - start,), row, device=device) for row, start, stop in spans])
        blocks = self.table[rows, positions // _BLOCK_SIZE].long()
        counts = [stop - start for _, start, stop in spans]
        starts = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
        metadata = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=torch.tensor([stop for _, _, stop in spans], dtype=torch.int32, device=device),
            block_table=self.table[[row for row, _, _ in spans]].contiguous(),
            slot_mapping=blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE,
            max_query_len=max(counts),
            max_seq_len=max(stop for _, _, stop in spans),
            num_decodes=0,
        )
        self.backend.prepare(metadata)
        return ForwardContext(positions, [metadata], self.backend, self.kv_caches)
