"""Greedy runs of an engine judged by a reference that is fed their tokens: the same weights in plain torch, no Triton.

Two right bf16 paths part at the first near-tie and then see different contexts, so their tokens cannot be compared.
Fed one path's tokens, the reference tells at each place how far the chosen token is from its own best.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from engine.core.local_client import GenerationResult
from kernels import dispatch
from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from models.build import build
from models.config.model_config import ModelConfig
from models.context import ForwardContext, LayerKV
from models.parallel import TensorParallel
from models.weights.checkpoint import RandomReader, TensorSlice
from models.weights.weights import TensorReader, Weights

_MAX_TOKENS = 8192  # per forward pass


class Upcast:
    """A TensorReader whose tensors are another's, in a wider dtype: the values stay."""

    def __init__(self, reader: TensorReader, dtype: torch.dtype) -> None:
        self._reader = reader
        self.device = reader.device
        self.dtype = dtype
        self.is_random = reader.is_random

    def read(self, part: TensorSlice) -> torch.Tensor:
        tensor = self._reader.read(part)
        return tensor if part.stored else tensor.to(self.dtype)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._reader.shape_of(name)

    def optional(self, name: str) -> torch.Tensor | None:
        return self._reader.optional(name)

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        self._reader.finish(has_tied_embeddings=has_tied_embeddings, ignored_prefixes=ignored_prefixes)


def dummy_reader(device: torch.device) -> RandomReader:
    """What --load-format dummy reads in bf16."""
    return RandomReader(device=device, dtype=torch.bfloat16, seed=0)


@dataclass(frozen=True)
class Scores:
    """The reference's view of N generated tokens."""

    # [N] logit of the best token minus logit of the generated one
    gaps: torch.Tensor
    # [N] standard deviation of the logits over the vocabulary
    spreads: torch.Tensor
    # [M, k] log-probabilities of the tokens that the engine named, at the M places where it did
    logprobs: torch.Tensor


class Reference:
    """A model over paged caches of its own, one block per sequence, attention row by row."""

    def __init__(self, config: ModelConfig, reader: TensorReader) -> None:
        with torch.inference_mode():
            self._model = build(config, Weights(reader), TensorParallel())
        self._config, self._device, self._dtype = config, reader.device, reader.dtype

    def score(self, prompts: list[list[int]], generations: list[GenerationResult]) -> Scores:
        """Feed each prompt with the tokens that followed it. Blocks."""
        parts: list[Scores] = []
        batch: list[tuple[list[int], GenerationResult]] = []
        for pair in zip(prompts, generations, strict=True):
            if sum(len(p) + len(g.token_ids) for p, g in [*batch, pair]) > _MAX_TOKENS:
                parts.append(self._score(batch))
                batch = []
            batch.append(pair)
        parts.append(self._score(batch))
        return Scores(*(torch.cat([getattr(part, name) for part in parts]) for name in ("gaps", "spreads", "logprobs")))

    def _score(self, batch: list[tuple[list[int], GenerationResult]]) -> Scores:
        sequences = [prompt + generation.token_ids[:-1] for prompt, generation in batch]
        with torch.inference_mode(), mock.patch.object(dispatch, "HAS_TRITON", False):
            hidden = self._forward(sequences).split([len(sequence) for sequence in sequences])
            scores = [
                self._score_one(states[len(prompt) - 1 :], generation)
                for states, (prompt, generation) in zip(hidden, batch, strict=True)
            ]
        gaps, spreads, logprobs = zip(*scores, strict=True)
        return Scores(torch.cat(gaps), torch.cat(spreads), torch.cat(logprobs))

    def _score_one(self, hidden: torch.Tensor, generation: GenerationResult) -> tuple[torch.Tensor, ...]:
        """hidden: [n, hidden_size], before each generated token."""
        logits = self._model.compute_logits(hidden).float()
        chosen = torch.tensor(generation.token_ids, device=self._device)
        gaps = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        named = [entry.top_token_ids for entry in generation.logprobs] or [[]]
        named = torch.tensor(named, dtype=torch.int64, device=self._device)[: len(generation.logprobs)]
        logprobs = logits[: len(named)].log_softmax(-1).gather(1, named)
        return gaps.cpu(), logits.std(-1).cpu(), logprobs.cpu()

    def _forward(self, sequences: list[list[int]]) -> torch.Tensor:
        """Hidden states [T, hidden_size] of all tokens of all sequences."""
        config, lengths = self._config, [len(sequence) for sequence in sequences]
        longest, num_rows = max(lengths), len(sequences)
        shape = (num_rows, longest, config.num_kv_heads, config.head_dim)
        caches = [
            LayerKV(torch.zeros(shape, dtype=self._dtype, device=self._device),
                    torch.zeros(shape, dtype=self._dtype, device=self._device))
            for _ in range(config.num_layers)
        ]  # fmt: skip
        positions = torch.cat([torch.arange(length) for length in lengths])
        rows = torch.arange(num_rows).repeat_interleave(torch.tensor(lengths))
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(self._device, torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self._device),
            block_table=torch.arange(num_rows, dtype=torch.int32, device=self._device)[:, None],
            slot_mapping=(rows * longest + positions).to(self._device),
            max_query_len=longest,
            max_seq_len=longest,
            num_decodes=0,
        )
        ctx = ForwardContext(positions.to(self._device), [metadata], TorchAttention(), caches)
        input_ids = torch.tensor([token_id for sequence in sequences for token_id in sequence], device=self._device)
        return self._model(input_ids, ctx)
