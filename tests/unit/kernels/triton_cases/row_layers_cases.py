"""Layers of one row in one kernel, whose Gluon runs on the CPU, against their specification.

One layer runs phase by phase; several run as on a GPU, where all programs are there at once and wait for words.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.elementwise import reference as elementwise
from kernels.row_layers import arithmetic, exchange, gluon_layers, phases
from kernels.row_layers.gluon_layers import LayerShape, RowScratch, row_layers
from tests.support import gluon_on_cpu
from tests.support.gluon_interpreter import run_at_once
from tests.support.gluon_on_cpu import KernelOnCpu, Pointer, Tile

BF16 = torch.bfloat16
BLOCK, EPS = 16, 1e-6
TOLERANCE = 3e-2  # of the values' deviation: sums in another order may round some values the other way
SHAPES = {
    "groups_of_two": LayerShape(64, 4, 2, 16, 64, programs=4, output_parts=2),
    "one_head_each": LayerShape(64, 4, 4, 16, 128, programs=4, output_parts=4),
}
MODULES = (arithmetic, exchange, phases, gluon_layers)


class Problem:
    """A layer of random weights and a row of some length, with its newest token."""

    def __init__(self, shape: LayerShape, length: int, *, has_head_norms: bool) -> None:
        self.shape, self.has_head_norms = shape, has_head_norms
        num_blocks = -(-length // BLOCK)
        width = shape.num_heads * shape.head_dim
        self.caches = torch.randn(2, num_blocks + 1, BLOCK, shape.num_kv_heads, shape.head_dim, dtype=BF16).unbind()
        self.tensors = (
            _norm(shape.hidden), _matrix(shape.num_qkv, shape.hidden), _norm(shape.head_dim), _norm(shape.head_dim),
            _matrix(shape.hidden, width), _norm(shape.hidden), _matrix(2 * shape.intermediate, shape.hidden),
            _matrix(shape.hidden, shape.intermediate), *self.caches,
        )  # fmt: skip
        self.table = torch.randperm(num_blocks)[None, :].int() + 1
        self.set_length(length)
        angles = torch.outer(torch.arange(length), 100.0 ** -torch.linspace(0, 1, shape.head_dim // 2))
        self.angles = torch.cat((angles.cos(), angles.sin()), 1).to(BF16)
        self.hidden = torch.randn(1, shape.hidden, dtype=BF16)

    def set_length(self, length: int) -> None:
        """Let the row be so long, at most as long as it was at first."""
        self.length = length
        block, place = divmod(length - 1, BLOCK)
        self.positions = torch.tensor([length - 1])
        self.slots = self.table[0, block : block + 1].long() * BLOCK + place

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
    kernel = KernelOnCpu(gluon_layers._layers_kernel, MODULES, problem.tensors)
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


class Words:
    """The words of programs that run as threads. A wait that can have no end raises an error in every program."""

    def __init__(self, num_programs: int) -> None:
        self._changed = threading.Condition()
        self._num_programs = num_programs  # that have not ended
        self._num_waiting = 0  # since the last post
        self._num_posts = 0
        self._is_over = False

    def post(self, pointers: Pointer, values: Tile, epoch: Tile) -> None:
        """See kernels.row_layers.exchange.post."""
        words = values.tensor.contiguous().view(torch.int32).long() & 0xFFFFFFFF | int(epoch) << 32
        with self._changed:
            gluon_on_cpu._store(pointers, Tile(words))
            self._num_posts += 1
            self._num_waiting = 0
            self._changed.notify_all()

    def receive(self, pointers: Pointer, mask: Tile, epoch: Tile, PACK: int, WAITS: bool) -> Tile:
        """See kernels.row_layers.exchange.receive."""
        assert WAITS
        with self._changed:
            words = gluon_on_cpu._load(pointers, mask, int(epoch) << 32).tensor
            while bool((words >> 32 != int(epoch)).any()):
                self._wait()
                words = gluon_on_cpu._load(pointers, mask, int(epoch) << 32).tensor
        return Tile(words.int().view(torch.float32))

    def receive_pairs(self, pointers: Pointer, others: Pointer, *arguments: Any) -> tuple[Tile, Tile]:
        """See kernels.row_layers.exchange.receive_pairs."""
        return self.receive(pointers, *arguments), self.receive(others, *arguments)

    def end(self) -> None:
        """A program has ended."""
        with self._changed:
            self._num_programs -= 1
            self._check()

    def _wait(self) -> None:
        """Wait for another post."""
        known = self._num_posts
        self._num_waiting += 1
        self._check()
        while self._num_posts == known and not self._is_over:
            self._changed.wait()
        if self._num_posts == known:
            raise TimeoutError("all programs wait for words that nobody posts")

    def _check(self) -> None:
        if self._num_waiting == self._num_programs:
            self._is_over = True
            self._changed.notify_all()


class ProgramsAtOnce(KernelOnCpu):
    """Launches a kernel whose programs wait for each other's words: each in a thread."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int, launch_cooperative_grid: bool, **constants: Any) -> None:
            assert launch_cooperative_grid
            values = [gluon_on_cpu._pointer(each) if isinstance(each, torch.Tensor) else each for each in arguments]
            words = Words(grid[0])
            known = {"fresh_zero": lambda: 0, "prefetch_bytes": lambda *_: None, "prefetch_lines": lambda *_: None}
            known |= {name: getattr(words, name) for name in ("post", "receive", "receive_pairs")}

            def run(program: int) -> None:
                language = gluon_on_cpu._language([program], grid, num_warps, self._addressed)
                functions = gluon_on_cpu._functions(self._modules, language)
                for function in functions.values():
                    function.__globals__.update(known)
                try:
                    functions[self._kernel](*values, **constants)
                finally:
                    words.end()

            run_at_once(run, grid[0])

        return launch


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("length", [66, 600])
def test_programs_that_wait_for_each_other_compute_all_layers_launch_after_launch(kind, length, monkeypatch):
    layers = [Problem(SHAPES[kind], length, has_head_norms=True) for _ in range(3)]
    first = layers[0]
    for layer in layers[1:]:
        layer.table, layer.angles = first.table, first.angles
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    kernel = ProgramsAtOnce(gluon_layers._layers_kernel, MODULES, tensors)
    monkeypatch.setattr(gluon_layers, "_layers_kernel", kernel)
    addresses = torch.tensor([[tensor.data_ptr() for tensor in layer.tensors] for layer in layers])
    scratch = RowScratch.allocate(first.shape, torch.device("cpu"))
    scratch.words.fill_(0x7FC00000)
    scratch.epochs.fill_(2**31 - 3)  # epochs go on below zero
    for num_launches, num_tokens in enumerate((length, 20), 1):  # the second one leaves splits without keys
        for layer in layers:
            layer.set_length(num_tokens)
        first.hidden = torch.randn(1, first.shape.hidden, dtype=BF16)
        found = row_layers(
            first.hidden, addresses, first.shape, first.caches[0], first.table, torch.tensor([num_tokens]).int(),
            first.positions, first.slots, first.angles, scratch, scale=0.25, eps=EPS, head_eps=EPS,
            has_head_norms=True,
        )  # fmt: skip
        assert scratch.epochs.tolist() == [2**31 - 3 + 3 * num_launches - 2**32]
        found_caches = [cache.clone() for layer in layers for cache in layer.caches]
        expected = first.specification()
        for layer in layers[1:]:
            layer.hidden = sum(expected)
            expected = layer.specification()
        expected_caches = [cache for layer in layers for cache in layer.caches]
        for a, b in zip((*found, *found_caches), (*expected, *expected_caches), strict=True):
            assert float((a.float() - b.float()).abs().max() / b.float().std()) < 2 * TOLERANCE


def _norm(size: int) -> torch.Tensor:
    return torch.rand(size, dtype=BF16) + 0.5


def _matrix(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, dtype=BF16) * k**-0.5
