"""Sums of hidden states over spans of a step's tokens, for embeddings. Imports torch.

Only steps with a row that asks come here (RowPlan.pools). Every sum is in float32 and over its own row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.core.step import RowPlan
from engine.device.sampler import to_host
from engine.device.staging import Staging


@dataclass
class PoolSums:
    """One step's sums on the host, complete once the stream is."""

    places: list[int]  # in the plan's rows
    # [len(places), hidden_size] float32
    sums: torch.Tensor

    def to_bytes(self) -> dict[int, bytes]:
        """Return each row's sum, by its place in the plan."""
        return {place: row.tobytes() for place, row in zip(self.places, self.sums.numpy(), strict=True)}


def pool(rows: list[RowPlan], hidden: torch.Tensor, staging: Staging) -> PoolSums:
    """Launch the sums of a step and their copy to the host. Does not sync.

    hidden: [T, hidden_size] of all tokens, those of prompt chunks first, as InputBatchBuilder lays them out.
    """
    places: list[int] = []
    spans: list[tuple[int, int]] = []
    offset = 0
    for index, row in enumerate(rows):
        if row.pools is not None:
            first = offset + row.pools.start - row.start
            places.append(index)
            spans.append((first, first + row.pools.num_tokens))
        offset += len(row.token_ids)  # decode rows have none here, and their hidden states come last
    if all(end - first == 1 for first, end in spans):
        sums = hidden[staging.send(np.array([first for first, _ in spans]))].float()
    else:
        sums = torch.stack([hidden[first:end].sum(dim=0, dtype=torch.float32) for first, end in spans])
    return PoolSums(places, to_host(sums))
