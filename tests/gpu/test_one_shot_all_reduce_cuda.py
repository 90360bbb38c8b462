"""Sums over GPUs in one kernel: values, the same bits on all ranks, graphs mixed with eager calls. Needs two GPUs."""

import pytest
import torch

from benchmarks.rank_processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two GPUs"),
]

TIMEOUT_S = 90


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_rank_has_the_sums_of_the_specification_call_after_call(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"this machine has fewer than {num_ranks} GPUs")
    assert run_ranks("tests.gpu.one_shot_all_reduce_rank", [], num_ranks=num_ranks, timeout_s=TIMEOUT_S) == 0
