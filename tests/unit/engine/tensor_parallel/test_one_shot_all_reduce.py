"""Who sums small tensors over ranks: on what is no GPU, the process group alone."""

import pytest
import torch
from torch import distributed

from engine.tensor_parallel import process_group
from engine.tensor_parallel.process_group import (
    join_ranks,
    least,
    share_one_shot_all_reduce,
    unconnected_one_shot_all_reduce,
)
from tests.support.rank_group import run_ranks

CPU = torch.device("cpu")


def meet(rank, size, rendezvous):
    tp = join_ranks(rank=rank, size=size, rendezvous=rendezvous, device=CPU, hidden_size=64)
    assert tp.one_shot_all_reduce is None
    assert share_one_shot_all_reduce(tp.group, CPU, width=64) is None
    assert least(tp, 5 + rank, CPU) == 5
    distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_on_the_cpu_agree_to_leave_all_sums_to_their_group(tmp_path):
    run_ranks(meet, 2, str(tmp_path / "meet"))


@pytest.mark.parametrize(
    ("size", "device", "width", "expected"),
    [
        (2, "cuda", 64, True),
        (8, "cuda", 64, True),
        (1, "cuda", 64, False),
        (16, "cuda", 64, False),  # more than one switch joins
        (2, "cuda", 60, False),  # no whole 16 bytes
        (2, "cpu", 64, False),
    ],
)
def test_kernels_are_rehearsed_where_the_gpus_reach_each_other(monkeypatch, size, device, width, expected):
    made = []
    monkeypatch.setattr(process_group, "HAS_TRITON", True)
    monkeypatch.setattr(
        process_group, "TritonOneShotAllReduce", lambda inboxes, **_: made.append(inboxes) or inboxes, raising=False
    )
    monkeypatch.setattr(process_group, "has_pdl", lambda device: True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: shape)
    assert (unconnected_one_shot_all_reduce(size, torch.device(device, 0), width=width) is not None) == expected
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: other != size - 1)
    made.clear()
    assert unconnected_one_shot_all_reduce(size, torch.device(device, 0), width=width) is None
    assert not made
