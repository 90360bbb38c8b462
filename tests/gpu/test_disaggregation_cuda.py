"""A prefill and a decode engine over two GPUs each answer as one GPU, and lose nothing with a rank. Needs four GPUs."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.integration.test_disaggregation import TEXT, Asking, ask
from tests.integration.test_disaggregation_ranks import rank_of
from tests.support.daemon import Daemon, wait_for
from tests.support.hand_overs import assert_handed_over, hand_overs, wait_joined

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="this machine has fewer than four GPUs"),
]

# Other tests may use the same GPUs. Sums over ranks round otherwise, which greedy float32 does not show
COMMON = ("--dtype", "float32", "--kv-cache-memory", "1GiB", "--http-workers", "1")
SPLIT = ("--disaggregate", "1p1d", "--tensor-parallel-size", "2", "--disaggregate-from", "32")
HOST = ("--kv-host-memory", "512MiB")
FIELDS = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """The split engines, and one engine on one GPU."""
    for name in ("split", "alone"):
        (tmp_path / name).mkdir()
    with (
        Daemon(*COMMON, *SPLIT, *HOST, folder=tmp_path / "split") as split,
        Daemon(*COMMON, folder=tmp_path / "alone") as alone,
    ):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Daemon.wait_ready, (split, alone)))
        wait_joined(split)
        yield split, alone


def test_answers_of_four_gpus_are_those_of_one(served: tuple[Daemon, Daemon]) -> None:
    split, alone = served
    prompts = [f"{number}: " + TEXT * 20 for number in range(6)]
    Asking(split, prompts, max_tokens=48, **FIELDS).start().assert_as_of(alone)
    assert_handed_over(split, len(prompts))
    metrics = split.metrics()
    assert metrics["quire_kv_handover_blocks_total{event=taken}"] > len(prompts)
    assert metrics["quire_kv_handover_blocks_total{event=failed}"] == 0
    wait_for(lambda: split.metrics()["quire_kv_handover_open_offers"] == 0, timeout_s=10, what="no open offer")
    assert "2 × " in split.log


def test_a_rank_that_is_killed_on_either_side_costs_no_request(served: tuple[Daemon, Daemon]) -> None:
    split, alone = served
    for name in ("prefill-0", "decode-0"):
        prompts = [f"{name} {number}: " + TEXT * 20 for number in range(6)]
        asking = Asking(split, prompts, max_tokens=400, **FIELDS).start()
        os.kill(rank_of(split, name), signal.SIGKILL)
        asking.assert_as_of(alone)
        wait_for(
            lambda name=name: split.get("/health").json()["engines"][name] == "ready",  # type: ignore[misc]
            timeout_s=90,
            what="its next process",
        )
        wait_joined(split)
    before = hand_overs(split)
    assert ask(split, "at last: " + TEXT * 6, max_tokens=8, **FIELDS)
    assert_handed_over(split, 1, before=before)
    assert "Traceback" not in split.log
