"""One rank of one_shot_all_reduce_cases: sums in Triton's interpreter, over inboxes in files that all ranks map."""

import math
import time
from pathlib import Path
from typing import Any

import torch

import tests.unit.kernels.triton_cases.conftest  # noqa: F401  (mends the interpreter)
from kernels.all_reduce import triton
from kernels.all_reduce.reference import sum_add_rms_norm, sum_parts
from kernels.all_reduce.triton import TritonOneShotAllReduce, inbox_shape

WIDTH = 48
NUM_PROGRAMS = 3  # fewer than rows: a program has several
# Rows and columns change from call to call, so that programs come to differ in the number of their turns
CALLS = ((2, 40, True), (1, 48, True), (7, 8, False), (2, 40, True), (5, 48, True), (1, 16, False), (3, 48, True))


def parts_of(call: int, rows: int, size: int, num_ranks: int) -> list[torch.Tensor]:
    """Every rank's part: what each rank can tell of the others without them."""
    torch.manual_seed(call)
    parts = [torch.randn(rows, size).half() for _ in range(num_ranks)]
    for part in parts:
        part[0, :3] = torch.tensor([-0.0, 0.0, math.inf if call == 4 else 1.0])
    return parts


def receive_late(*arguments: Any) -> Any:
    """What the kernel calls to read, so late that the others, who have this rank's part, are a turn ahead."""
    time.sleep(0.03)
    return _receive(*arguments)


_receive = triton._receive


def run_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Make all the calls of a rank, in a process of its own. Raises AssertionError where a sum is not as specified."""
    torch.set_num_threads(1)
    if rank == 0:
        triton._receive = receive_late
    shape = inbox_shape(num_ranks=num_ranks, width=WIDTH)
    inboxes = [
        torch.from_file(str(folder / str(peer)), shared=True, size=math.prod(shape), dtype=torch.int16).view(shape)
        for peer in range(num_ranks)
    ]
    sums = TritonOneShotAllReduce(
        inboxes, memory=None, rank=rank, width=WIDTH, num_programs=NUM_PROGRAMS, device=torch.device("cpu")
    )
    outputs = []
    for call, (rows, size, has_norm) in enumerate(CALLS):
        parts = parts_of(call, rows, size, num_ranks)
        residual, weight = torch.randn(rows, size).half(), torch.randn(size).half()
        mine = parts[rank].clone()
        assert sums.takes(mine)
        if has_norm:
            outputs += sums.add_rms_norm(mine, residual, weight, 1e-6)
            expected = sum_add_rms_norm(parts, residual, weight, 1e-6)
            assert torch.equal(mine, parts[rank]), "the part was written"
        else:
            outputs.append(sums.all_reduce(mine))
            expected = (sum_parts(parts),)
            assert outputs[-1] is mine
        for out, wanted in zip(outputs[-len(expected) :], expected, strict=True):
            torch.testing.assert_close(out, wanted, atol=4e-3, rtol=4e-3, equal_nan=True)
    torch.save(outputs, folder / f"out-{rank}.pt")
