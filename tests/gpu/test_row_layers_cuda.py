"""Layers of one row in one kernel on a GPU, whose programs wait for each other: against torch, and replayed."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.row_layers import Problem
from kernels.dispatch import is_hopper
from kernels.row_layers.gluon_layers import RowScratch

pytestmark = pytest.mark.gpu
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def problem() -> Problem:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the kernel is served on Hopper alone")
    torch.manual_seed(0)
    return Problem(NUM_LAYERS)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 600, 1025, 4000, 30000])
def test_layers_equal_their_specification(problem: Problem, length: int) -> None:
    problem.set_length(length)
    problem.hidden.normal_()
    expected = problem.specification(NUM_LAYERS)
    for found, wanted in zip(problem.one_kernel(NUM_LAYERS), expected, strict=True):
        assert float((found.float() - wanted.float()).abs().max() / wanted.float().std()) < 0.1


def test_replays_of_a_graph_give_the_same_bits(problem: Problem) -> None:
    problem.set_length(600)
    first = [x.clone() for x in problem.one_kernel(NUM_LAYERS)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = problem.one_kernel(NUM_LAYERS)
    other = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):  # programs start late where another kernel has a multiprocessor
            torch.randn(2048, 2048, device="cuda").sum()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True))


def test_two_kernels_at_once_do_not_wait_for_each_others_multiprocessors(problem: Problem) -> None:
    problem.set_length(600)
    expected = [x.clone() for x in problem.one_kernel(NUM_LAYERS)]
    other = copy.copy(problem)
    other.scratch = RowScratch.allocate(problem.shape, problem.hidden.device)
    torch.cuda.synchronize()
    streams = [(torch.cuda.Stream(), each) for each in (problem, other)]
    for _ in range(200):
        found = []
        for stream, each in streams:
            with torch.cuda.stream(stream):
                found += each.one_kernel(NUM_LAYERS)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip([*expected, *expected], found, strict=True))
