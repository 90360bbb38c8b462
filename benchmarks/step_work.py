"""StepWork: what a planned step computes, and the least that each group of its kernels must read and multiply.

    floors = step_floors(costs, [StepWork.of(plan), …], has_whole_layers=False)   # means of the steps, by group
    floors["attention"].seconds(H100)

Attention reads the keys and values of its rows, and multiplies those of prompts. GEMMs read the weights and multiply
them, whichever takes longer; experts are chosen by chance, as in benchmarks/floors.py. Sampling reads the logits once.
Norms and row operations could be inside the kernels beside them, so they have no floor of their own, as have inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.device_time import ATTENTION, LAYERS, PRODUCTS, SAMPLING, STATES
from benchmarks.floors import Card, StepCosts
from engine.core.step import StepPlan


@dataclass(frozen=True)
class StepWork:
    """One step's rows. rows: the tokens that each decoding row attends to; prompts: (tokens, tokens before them)."""

    rows: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    num_logits: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Return what a plan computes. A row of one token decodes, also if it is a prompt's."""
        spans = [(row.num_tokens, row.start) for row in plan.rows]
        return cls(
            rows=tuple(start + 1 for num_tokens, start in spans if num_tokens == 1),
            prompts=tuple((num_tokens, start) for num_tokens, start in spans if num_tokens > 1),
            num_logits=plan.num_samples,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of prompts."""
        return sum(num_tokens for num_tokens, _ in self.prompts)

    @property
    def num_tokens(self) -> int:
        """The tokens of the step."""
        return len(self.rows) + self.num_prompt_tokens


@dataclass
class Floor:
    """Bytes that one must read and FLOPs that one must compute. Parts in a row: their least times add up."""

    parts: list[tuple[float, float, float]]  # bytes, FLOPs in 16 bits and in 8

    @property
    def num_bytes(self) -> float:
        """The bytes of all parts."""
        return sum(part[0] for part in self.parts)

    @property
    def flops(self) -> float:
        """The FLOPs of all parts."""
        return sum(part[1] + part[2] for part in self.parts)

    def seconds(self, card: Card) -> float:
        """Return the least time: of each part that of its bytes or of its FLOPs, whichever is longer."""
        return sum(
            max(num_bytes / card.bytes_per_s, flops / card.flops + flops_8_bits / card.flops_8_bits)
            for num_bytes, flops, flops_8_bits in self.parts
        )


def step_floors(costs: StepCosts, works: Sequence[StepWork], *, has_whole_layers: bool) -> dict[str, Floor]:
    """Return the floors by group (benchmarks.device_time), in the mean of these steps.

    has_whole_layers: one kernel computes all layers, attention included, and GEMMs are that of the logits alone.
    """
    floors: dict[str, Floor] = {}
    for work in works:
        for group, part in _parts(costs, work, has_whole_layers=has_whole_layers):
            num_bytes, flops, flops_8_bits = (amount / len(works) for amount in part)
            if any(part):
                floors.setdefault(group, Floor([])).parts.append((num_bytes, flops, flops_8_bits))
    return floors


def _parts(costs: StepCosts, work: StepWork, *, has_whole_layers: bool) -> list[tuple[str, tuple[float, float, float]]]:
    row_bytes = sum(map(costs.kv_bytes, work.rows))
    weight_bytes = costs.weight_bytes(work.num_tokens) if work.num_tokens else 0.0
    logits = (SAMPLING, (float(costs.logits_bytes * work.num_logits), 0.0, 0.0))
    states = (STATES, (float(costs.state_bytes * (len(work.rows) + len(work.prompts))), 0.0, 0.0))
    if has_whole_layers:
        layers = (LAYERS, (weight_bytes - costs.head_bytes + row_bytes, 0.0, 0.0))
        return [layers, (PRODUCTS, (float(costs.head_bytes), 0.0, 0.0)), states, logits]
    attention = [(ATTENTION, (float(row_bytes), 0.0, 0.0))]
    for num_tokens, behind in work.prompts:
        read, flops = costs.kv_bytes(behind + num_tokens), costs.attention_flops(num_tokens, behind)
        attention.append((ATTENTION, (float(read), float(flops), 0.0)))
    flops, flops_8_bits = costs.product_flops(work.num_tokens, work.num_logits)
    return [*attention, (PRODUCTS, (weight_bytes, float(flops), float(flops_8_bits))), states, logits]
