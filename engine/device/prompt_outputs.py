"""Computes prompt log-probabilities, and sums of hidden states for embeddings, from a step. Imports torch.

Only steps with rows that request them are processed (RowPlan.prompt_logprobs, RowPlan.pool_span). The logits of a whole
chunk would be a hundred times as large as its hidden states, so PromptLogprobsComputer computes them for a limited
number of positions at a time and keeps only the requested values. pool() sums in float32, each span within one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from engine.core.step import RequestInit, RowPlan, StepResult
from engine.device.device_state import Staging
from engine.device.sampler import to_host
from engine.interface.protocol import TokenLogprobs

_MAX_PIECE_BYTES = 256 * 2**20
_BYTES_PER_LOGIT = 12  # the computed value, float32, log-probability, and the comparison for the rank
_MIN_PIECE_ROWS = 16


@dataclass
class PromptLogprobs:
    """One step's prompt log-probabilities on the host, in plan order. Complete once the stream is."""

    rows: list[tuple[int, int, int]]  # index in the plan, number of positions, number of most likely tokens
    # per piece: [n] float32, [n] int64, [n, k] int64, [n, k] float32: logprob, rank, most likely ids, their logprobs
    pieces: list[tuple[torch.Tensor, ...]]

    def to_lists(self) -> dict[int, list[TokenLogprobs]]:
        """Return the entries of each row, by its index in the plan."""
        entries = (entry for piece in self.pieces for entry in zip(*(tensor.tolist() for tensor in piece), strict=True))
        return {
            place: [
                TokenLogprobs(logprob, ids[:count], values[:count], rank)
                for logprob, rank, ids, values in islice(entries, num_positions)
            ]
            for place, num_positions, count in self.rows
        }


class PromptLogprobsComputer:
    """Computes prompt log-probabilities. Owns the number of most likely tokens requested by each running request."""

    def __init__(self, staging: Staging, *, vocab_size: int, max_num_seqs: int) -> None:
        self._staging = staging
        self._counts: dict[int, int] = {}  # by req_index
        # at most as many rows as the sampler, whose memory is reserved
        self._piece_rows = max(_MIN_PIECE_ROWS, min(max_num_seqs, _MAX_PIECE_BYTES // (_BYTES_PER_LOGIT * vocab_size)))

    def init(self, inits: list[RequestInit]) -> None:
        """Store the number of most likely tokens of new requests."""
        for init in inits:
            if init.params.prompt_logprobs is not None:
                self._counts[init.req_index] = init.params.prompt_logprobs

    def compute(
        self, rows: list[RowPlan], hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> PromptLogprobs:
        """Launch the log-probabilities of a step and their copy to the host. Does not sync.

        hidden: [T, hidden_size] of all tokens, those of prompt chunks first, as InputBatchBuilder lays them out.
        """
        places: list[int] = []
        token_ids: list[int] = []
        shares: list[tuple[int, int, int]] = []
        offset = 0
        for index, row in enumerate(rows):
            if row.prompt_logprobs is not None:
                first = offset + row.prompt_logprobs.start - row.start
                places += range(first, first + len(row.prompt_logprobs.token_ids))
                token_ids += row.prompt_logprobs.token_ids
                shares.append((index, len(row.prompt_logprobs.token_ids), self._counts[row.req_index]))
            offset += len(row.token_ids)  # decode rows have none here, and their hidden states come last
        where, targets = self._staging.send(np.array([places, token_ids]))
        count = max(count for _, _, count in shares)
        pieces = []
        for start in range(0, len(places), self._piece_rows):
            piece = slice(start, start + self._piece_rows)
            computed = token_logprobs(compute_logits(hidden[where[piece]]), targets[piece], count)
            pieces.append(tuple(to_host(tensor) for tensor in computed))
        return PromptLogprobs(shares, pieces)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logprob [N], rank [N] int64 from 1, the `count` most likely ids [N, count], their logprobs).

    logits: [N, V]; token_ids: [N] int64. One log-softmax feeds all, so a token in both lists has bit-equal values.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = logprobs.topk(count, dim=-1)
    return chosen.squeeze(-1), ranks, ids, values


@dataclass
class PoolSums:
    """One step's sums on the host. Complete once the stream is."""

    places: list[int]  # indices into the plan's rows
    # [len(places), hidden_size] float32
    sums: torch.Tensor

    def to_bytes(self) -> dict[int, bytes]:
        """Return each row's sum, by its index in the plan."""
        return {place: row.tobytes() for place, row in zip(self.places, self.sums.numpy(), strict=True)}


def pool(rows: list[RowPlan], hidden: torch.Tensor, staging: Staging) -> PoolSums:
    """Launch the sums of a step and their copy to the host. Does not sync.

    hidden: [T, hidden_size] of all tokens, those of prompt chunks first, as InputBatchBuilder lays them out.
    """
    places: list[int] = []
    spans: list[tuple[int, int]] = []
    offset = 0
    for index, row in enumerate(rows):
        if row.pool_span is not None:
            first = offset + row.pool_span.start - row.start
            places.append(index)
            spans.append((first, first + row.pool_span.num_tokens))
        offset += len(row.token_ids)  # decode rows have none here, and their hidden states come last
    if all(end - first == 1 for first, end in spans):
        sums = hidden[staging.send(np.array([first for first, _ in spans]))].float()
    else:
        sums = torch.stack([hidden[first:end].sum(dim=0, dtype=torch.float32) for first, end in spans])
    return PoolSums(places, to_host(sums))


@dataclass
class PromptOutputs:
    """A step's outputs for prompts."""

    logprobs: PromptLogprobs | None = None
    sums: PoolSums | None = None

    def add_to(self, result: StepResult) -> None:
        """Add them to a step's result, once its stream is complete."""
        if self.logprobs is not None:
            result.prompt_logprobs = self.logprobs.to_lists()
        if self.sums is not None:
            result.pooled = self.sums.to_bytes()
