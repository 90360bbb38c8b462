"""Adapters in torch: what the Triton kernels must equal, here against float64."""

import pytest
import torch

from kernels.ops import LoraTokens
from tests.unit.kernels.triton_cases.lora_problem import make_problem
from tests.unit.kernels.triton_cases.ragged import relative_error


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("part_sizes", [(24,), (16, 16), (24, 8, 8)])
def test_each_token_gets_its_own_requests_adapter(is_decode, part_sizes):
    problem = make_problem(
        row_lens=[1] * 6 if is_decode else [1, 4, 1, 7, 2, 3],
        row_loras=[0, 2, 1, 3, 0, 2],
        num_adapters=3,
        rank=4,
        k=20,
        part_sizes=part_sizes,
        dtype=torch.float32,
        is_decode=is_decode,
    )
    expected = problem.expected()
    tokens = LoraTokens(num_adapters=3, max_tokens=40, device=torch.device("cpu"))
    for _ in range(2):  # what an earlier step left does not show
        tokens.gather(problem.lora_indices.flip(0), problem.req_index, problem.token_rows)
        tokens.gather(problem.lora_indices, problem.req_index, problem.token_rows)
    tokens.add(problem.out, problem.x, problem.weights)
    assert relative_error(problem.out, expected) < 1e-6
