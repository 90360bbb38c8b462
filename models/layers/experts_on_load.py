"""Readers of dense experts one at a time, for quantising them on load: no more than one is dense on the device.

A checkpoint has each expert's matrices by themselves, or two tensors of all experts; families differ in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from models.layers.routing import ExpertNames
from models.parallel import ExpertShare
from models.quantization.linear_method import LinearPart, ReadExpert
from models.quantization.shards import read_dense
from models.weights.weights import Weights


def read_separate(w: Weights, parts: Sequence[LinearPart]) -> ReadExpert:
    """Return a reader of `experts.N.<part>` below w."""
    return lambda expert: [read_dense(w / f"experts.{expert}", part) for part in parts]


def read_merged(
    w: Weights, names: ExpertNames, ups: Sequence[LinearPart], down: LinearPart, share: ExpertShare
) -> tuple[ReadExpert, ReadExpert]:
    """Return readers of gates and ups, and of downs, from the tensors of all experts (see ExpertNames)."""
    size, hidden_size = ups[0].out_features, ups[0].in_features
    shapes = [(len(ups) * size, hidden_size), (hidden_size, size)]
    if names.are_transposed:
        shapes = [(inputs, outputs) for outputs, inputs in shapes]
    all_ups = slices(w, names.all_gate_up, (share.num_experts, *shapes[0]))
    all_downs = slices(w, names.all_down, (share.num_experts, *shapes[1]))
    width = size // share.size
    start = share.rank * width

    def read_up(expert: int) -> list[torch.Tensor]:
        whole = all_ups(expert).T if names.are_transposed else all_ups(expert)
        return [half[start : start + width].contiguous() for half in whole.split(size)]

    def read_down(expert: int) -> list[torch.Tensor]:
        whole = all_downs(expert).T if names.are_transposed else all_downs(expert)
        return [whole[:, start : start + width].contiguous()]

    return read_up, read_down


def slices(w: Weights, name: str, shape: tuple[int, ...]) -> Callable[[int], torch.Tensor]:
    """Return a reader of single experts of a tensor of all; random ones are drawn at once, as each would draw all."""
    if w.is_random:
        whole = w.tensor(name, shape)
        return lambda expert: whole[expert]
    return lambda expert: w.slice(name, shape, dim=0, start=expert, stop=expert + 1)[0]
