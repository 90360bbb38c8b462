"""Sums that ranks push to each other against their specification: real processes, and files for the GPUs' memory."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from kernels.all_reduce import triton as triton_sums
from kernels.all_reduce.triton import MAX_PUSHED_BYTES, MAX_ROWS, TritonOneShotAllReduce, clear_inbox, inbox_shape
from tests.support.rank_group import run_ranks
from tests.unit.kernels.triton_cases.one_shot_all_reduce_rank import WIDTH, run_rank

TIMEOUT_S = 100
CPU = torch.device("cpu")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.full
def test_every_rank_has_the_same_sums_turn_after_turn(num_ranks, tmp_path):
    shape = inbox_shape(num_ranks=num_ranks, width=WIDTH)
    inboxes = []
    for rank in range(num_ranks):
        path = tmp_path / str(rank)
        path.write_bytes(bytes(2 * math.prod(shape)))
        inboxes.append(torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=torch.int16))
        clear_inbox(inboxes[-1])
    empty = inboxes[0].clone()
    run_ranks(run_rank, num_ranks, tmp_path, timeout_s=TIMEOUT_S)
    first, *others = (torch.load(tmp_path / f"out-{rank}.pt") for rank in range(num_ranks))
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    for inbox in inboxes:  # what was read is empty again, or the next turns would take it for their own
        assert torch.equal(inbox, empty)


def test_a_rank_that_waits_in_vain_ends_with_an_assertion(monkeypatch):
    options = dataclasses.replace(interpreter_builder.options, debug=True)  # the interpreter ignores the launch's
    monkeypatch.setattr(interpreter_builder, "options", options)
    monkeypatch.setattr(triton_sums, "_MAX_POLLS", tl.constexpr(3))
    inboxes = [torch.empty(inbox_shape(num_ranks=2, width=16), dtype=torch.int16) for _ in range(2)]
    for inbox in inboxes:
        clear_inbox(inbox)
    sums = TritonOneShotAllReduce(inboxes, memory=None, rank=0, width=16, num_programs=1, device=CPU)
    with pytest.raises(Exception, match="did not arrive"):
        sums.all_reduce(torch.ones(1, 16, dtype=torch.float16))


def test_sums_that_do_not_fit_are_left_to_the_group():
    inboxes = [torch.empty(8, dtype=torch.int16) for _ in range(4)]
    sums = TritonOneShotAllReduce(inboxes, memory=None, rank=0, width=4096, num_programs=1, device=CPU)
    row = torch.zeros(1, 4096, dtype=torch.bfloat16)
    assert sums.takes(row)
    assert sums.takes(row.half())
    assert sums.takes(row[:, :8].contiguous())
    most = MAX_PUSHED_BYTES // (3 * row.nbytes)  # each row goes to three others
    assert sums.takes(row.repeat(most, 1))
    assert not sums.takes(row.repeat(most + 1, 1))
    assert sums.takes(row[:, :64].repeat(MAX_ROWS, 1))
    assert not sums.takes(row[:, :64].repeat(MAX_ROWS + 1, 1))
    assert not sums.takes(row.float())
    assert not sums.takes(row[:0])
    assert not sums.takes(row[0])
    assert not sums.takes(row[:, :12].contiguous())
    assert not sums.takes(row.repeat(1, 2))
    assert not sums.takes(row.repeat(2, 1)[:, ::2])
