"""Layers of one row in one kernel, whose Gluon runs on the CPU phase by phase, against their specification."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.elementwise import reference as elementwise
from kernels.row_layers import arithmetic, exchange, gluon_layers, phases
from kernels.row_layers.gluon_layers import LayerShape, RowScratch, row_layers
from tests.unit.kernels.triton_cases.gluon_on_cpu import KernelOnCpu

BF16 = torch.bfloat16
BLOCK, EPS = 16, 1e-6
TOLERANCE = 3e-2  # of the values' deviation: sums in another order may round some values the other way
SHAPES = {
    "groups_of_two": LayerShape(64, 4, 2, 16, 64, programs=4, output_parts=2),
    "one_head_each": LayerShape(64, 4, 4, 16, 128, programs=4, output_parts=4),
}


class Problem:
    """A layer of random weights and a row of some length, with its newest token."""

    def __init__(self, shape: LayerShape, length: int, *, has_head_norms: bool) -> None:
        self.shape, self.length, self.has_head_norms = shape, length, has_head_norms
        num_blocks = -(-length // BLOCK)
        width = shape.num_heads * shape.head_dim
        self.caches = torch.randn(2, num_blocks + 1, BLOCK, shape.num_kv_heads, shape.head_dim, dtype=BF16).unbind()
        self.tensors = (
            _norm(shape.hidden), _matrix(shape.num_qkv, shape.hidden), _norm(shape.head_dim), _norm(shape.head_dim),
            _matrix(shape.hidden, width), _norm(shape.hidden), _matrix(2 * shape.intermediate, shape.hidden),
            _matrix(shape.hidden, shape.intermediate), *self.caches,
        )  # fmt: skip
        self.table = torch.randperm(num_blocks)[None, :].int() + 1
        self.positions = torch.tensor([length - 1])
        self.slots = self.table[0, -1:].long() * BLOCK + (length - 1) % BLOCK
        angles = torch.outer(torch.arange(length), 100.0 ** -torch.linspace(0, 1, shape.head_dim // 2))
        self.angles = torch.cat((angles.cos(), angles.sin()), 1).to(BF16)
        self.hidden = torch.randn(1, shape.hidden, dtype=BF16)

    def specification(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer adds and the residual stream; writes the caches."""
        norm, qkv, q_norm, k_norm, output, mlp_norm, up, down, *_ = self.tensors
        normed = elementwise.rms_norm(self.hidden, norm, EPS)
        q = elementwise.norm_rope_write_kv(
            functional.linear(normed, qkv), q_norm if self.has_head_norms else None,
            k_norm if self.has_head_norms else None, EPS, self.positions, self.angles, *self.caches, self.slots,
            num_heads=self.shape.num_heads,
        )  # fmt: skip
        group = self.shape.num_heads // self.shape.num_kv_heads
        keys, values = (
            cache[self.table[0].long()].flatten(0, 1)[: self.length].float().repeat_interleave(group, 1)
            for cache in self.caches
        )
        weights = (torch.einsum("hd,thd->ht", q[0].float(), keys) * 0.25).softmax(1)
        attended = torch.einsum("ht,thd->hd", weights, values).to(BF16).flatten()[None, :]
        normed, residual = elementwise.add_rms_norm(functional.linear(attended, output), self.hidden, mlp_norm, EPS)
        return functional.linear(elementwise.silu_and_mul(functional.linear(normed, up)), down), residual

    def in_phases(self, scratch: RowScratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same by one launch of each phase."""
        addresses = torch.tensor([[tensor.data_ptr() for tensor in self.tensors]])
        results = [
            row_layers(
                self.hidden, addresses, self.shape, self.caches[0], self.table, torch.tensor([self.length]).int(),
                self.positions, self.slots, self.angles, scratch, scale=0.25, eps=EPS, head_eps=EPS,
                has_head_norms=self.has_head_norms, phase=phase,
            )
            for phase in range(5)
        ]  # fmt: skip
        return results[4][0], results[3][1]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 65, 66, 150, 600])
@pytest.mark.table(most=4)
def test_a_layer_equals_its_specification(kind, length, monkeypatch):
    problem = Problem(SHAPES[kind], length, has_head_norms=length != 66)
    modules = (arithmetic, exchange, phases, gluon_layers)
    kernel = KernelOnCpu(gluon_layers._layers_kernel, modules, problem.tensors)
    monkeypatch.setattr(gluon_layers, "_layers_kernel", kernel)
    scratch = RowScratch.allocate(problem.shape, torch.device("cpu"))
    scratch.words.fill_(0x7FC00000)  # NaN: no phase may read a word that none has written
    for cache in problem.caches:
        cache.view(-1, *cache.shape[2:])[problem.slots] = torch.nan  # nor the newest token's slot
    found = problem.in_phases(scratch)
    found_caches = [cache.clone() for cache in problem.caches]
    expected = problem.specification()
    assert scratch.epochs.tolist() == [1]
    for a, b in zip((*found, *found_caches), (*expected, *problem.caches), strict=True):
        assert float((a.float() - b.float()).abs().max() / b.float().std()) < TOLERANCE


def _norm(size: int) -> torch.Tensor:
    return torch.rand(size, dtype=BF16) + 0.5


def _matrix(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, dtype=BF16) * k**-0.5
