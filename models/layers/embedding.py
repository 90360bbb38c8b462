"""Token embedding and LM head, the vocabulary split over ranks.

Each rank owns ceil(vocab_size / tp.size) rows; the last ranks' missing rows are zeros, and are cut from the logits.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kernels.linear.ops import DenseLinear
from models.parallel import TensorParallel
from models.weights.weights import Weights


class VocabEmbedding(nn.Module):
    """Rows of the embedding matrix by token id, times a constant that is rounded to their dtype as Gemma's is."""

    def __init__(
        self, w: Weights, *, vocab_size: int, hidden_size: int, tp: TensorParallel, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=w.dtype))
        self.tp = tp
        self.weight = load_vocab_rows(w, vocab_size=vocab_size, hidden_size=hidden_size, tp=tp)
        self.first_row = tp.rank * self.weight.shape[0]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] int64 → [T, hidden_size], the same on every rank."""
        hidden = self._look_up(input_ids)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def _look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return functional.embedding(input_ids, self.weight)
        rows = input_ids - self.first_row
        is_elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        hidden = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.tp.all_reduce(hidden.masked_fill(is_elsewhere[:, None], 0))


class LMHead(nn.Module):
    """Logits over the whole vocabulary. weight: [rows of this rank, hidden_size], its own or the embedding's.

    divisor: of all logits; softcap: 0, or the cap of cap * tanh(logits / cap).
    """

    def __init__(
        self, weight: torch.Tensor, *, vocab_size: int, tp: TensorParallel, divisor: float = 1.0, softcap: float = 0.0
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = weight
        self.vocab_size = vocab_size
        self.divisor = divisor
        self.softcap = softcap
        self._linear = DenseLinear()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size], the same on every rank."""
        logits = self.tp.all_gather(self._linear(hidden, self.weight, None), dim=-1)[:, : self.vocab_size]
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap > 0.0:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_vocab_rows(w: Weights, *, vocab_size: int, hidden_size: int, tp: TensorParallel) -> torch.Tensor:
    """This rank's rows of `weight`, padded with zeros to ceil(vocab_size / tp.size)."""
    num_rows = -(-vocab_size // tp.size)
    start = min(tp.rank * num_rows, vocab_size)
    stop = min(start + num_rows, vocab_size)
    rows = w.slice("weight", (vocab_size, hidden_size), dim=0, start=start, stop=stop)
    num_missing = num_rows - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, num_missing)) if num_missing > 0 else rows
