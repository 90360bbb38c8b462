"""Adapters grouped and added by Triton's interpreter, against float64 and the torch specification."""

from __future__ import annotations

import pytest
import torch

from kernels.lora.reference import add_lora as add_by_torch
from kernels.lora.triton import LoraTiles, _num_splits, _num_tiles, _tile_size, add_lora, group_tokens
from tests.unit.kernels.triton_cases.lora_problem import make_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

MIXED = {"row_lens": [1, 1, 5, 1, 30, 3], "row_loras": [2, 0, 3, 1, 2, 0], "num_adapters": 3}
DECODES = {"row_lens": [1] * 21, "row_loras": [1, 0, 2] * 7, "num_adapters": 2, "is_decode": True}


def _tiles(problem, *, max_tokens=512):
    num_adapters = problem.weights.a.shape[0]
    tiles = LoraTiles.allocate(num_adapters=num_adapters, max_tokens=max_tokens, device=torch.device("cpu"))
    for buffer in (tiles.tokens, tiles.loras, tiles.rows):
        buffer.fill_(7)  # what an earlier step left
    group_tokens(problem.lora_indices, problem.req_index, problem.token_rows, tiles)
    return tiles


@pytest.mark.parametrize("rows", [MIXED, DECODES])
@pytest.mark.parametrize(
    ("rank", "k", "part_sizes"), [(16, 64, (48, 16, 16)), (32, 600, (40, 40)), (128, 1100, (70,)), (16, 8, (8,))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_token_gets_its_own_adapter(rows, rank, k, part_sizes, dtype):
    problem = make_problem(**rows, rank=rank, k=k, part_sizes=part_sizes, dtype=dtype)
    expected, by_torch = problem.expected(), problem.out.clone()
    add_by_torch(by_torch, problem.x, problem.weights, problem.loras)
    add_lora(problem.out, problem.x, problem.weights, _tiles(problem))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert relative_error(by_torch, expected) < tolerance
    assert relative_error(problem.out, expected) < tolerance


def test_many_tokens_in_large_tiles():
    row_lens = [200, 1, 63, 64, 150]
    problem = make_problem(
        row_lens=row_lens,
        row_loras=[1, 2, 2, 0, 3],
        num_adapters=3,
        rank=16,
        k=64,
        part_sizes=(32, 16),
        dtype=torch.float32,
    )
    expected = problem.expected()
    add_lora(problem.out, problem.x, problem.weights, _tiles(problem))
    assert relative_error(problem.out, expected) < 1e-5


def test_a_step_without_adapters_adds_nothing():
    problem = make_problem(
        row_lens=[3, 1], row_loras=[0, 0], num_adapters=2, rank=16, k=32, part_sizes=(16,), dtype=torch.float32
    )
    before, tiles = problem.out.clone(), _tiles(problem)
    assert not tiles.rows[: _num_tiles(4, 2)].any()
    add_lora(problem.out, problem.x, problem.weights, tiles)
    assert torch.equal(problem.out, before)


@pytest.mark.parametrize("num_adapters", [1, 2, 5, 33])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 100, 256, 257, 1500])
def test_tiles_hold_each_adapted_token_once(num_tokens, num_adapters):
    generator = torch.Generator().manual_seed(num_tokens)
    loras = torch.randint(0, num_adapters + 1, (num_tokens,), generator=generator)
    problem = make_problem(
        row_lens=[1] * num_tokens, row_loras=loras.tolist(), num_adapters=num_adapters, rank=16, k=8, part_sizes=(8,),
        dtype=torch.float32,
    )  # fmt: skip
    tiles, size = _tiles(problem, max_tokens=num_tokens), _tile_size(num_tokens)
    found = []
    for tile in range(_num_tiles(num_tokens, num_adapters)):
        rows = int(tiles.rows[tile])
        tokens = tiles.tokens[tile * size : tile * size + rows].tolist()
        assert rows <= size
        assert all(loras[token] == tiles.loras[tile] for token in tokens)
        found += tokens
    assert sorted(found) == loras.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("num_programs", [1, 3, 40, 1000])
@pytest.mark.parametrize("k", [8, 300, 1024, 14336])
def test_splits_are_never_empty(num_programs, k):
    splits = _num_splits(num_programs, k)
    assert 1 <= splits <= 16
    assert splits == 1 or k // splits >= 256
