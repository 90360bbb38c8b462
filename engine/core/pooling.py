"""PooledPrompt: one vector for a whole prompt, made of its hidden states as their steps are committed. Never torch.

A step gives sums over spans of positions (engine/device/pooler.py), and they are added up here, so the device keeps
nothing
between steps: a prompt may be cut, preempted and computed again, and each position counts once. The vector is not
normalised: whoever asked may cut it first.
"""

from dataclasses import dataclass

import numpy as np

from engine.core.step import PoolSpan
from engine.interface.protocol import PoolingKind


@dataclass(slots=True, eq=False)
class PooledPrompt:
    """What is committed of one prompt's vector."""

    kind: PoolingKind
    num_prompt: int  # tokens
    num_pooled_tokens: int = 0  # the first ones, which need no more hidden states
    total: np.ndarray | None = None  # [hidden_size] float32

    def __post_init__(self) -> None:
        if self.kind == "last":
            self.num_pooled_tokens = self.num_prompt - 1

    @property
    def is_whole(self) -> bool:
        """True once the vector is known."""
        return self.num_pooled_tokens == self.num_prompt

    def span(self, start: int, end: int) -> PoolSpan | None:
        """Return what is to be summed in a chunk [start, end), if anything. Later chunks may be planned by then."""
        first = max(start, self.num_pooled_tokens)
        return PoolSpan(first, end - first) if first < end else None

    def add(self, span: PoolSpan, total: bytes) -> None:
        """Take in a committed sum, of float32s."""
        part = np.frombuffer(total, dtype=np.float32)
        self.total = part if self.total is None else self.total + part
        self.num_pooled_tokens += span.num_tokens

    def vector(self) -> bytes:
        """Return the vector, as float32s."""
        assert self.total is not None
        assert self.is_whole
        count = self.num_prompt if self.kind == "mean" else 1
        return (self.total / np.float32(count)).tobytes()
