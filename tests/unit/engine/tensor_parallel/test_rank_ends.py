"""Ranks that cannot start, fail or are killed: it is told once, with the reason, and nothing of them stays."""

import os
import queue
import signal
from pathlib import Path

import msgspec
import pytest

from engine.interface.config import EngineConfig
from engine.interface.control import Stage
from engine.interface.errors import StartupError
from engine.offline import OfflineEngine
from engine.tensor_parallel.ranks import RankHost, Ranks
from tests.integration.conftest import needs_proc
from tests.unit.engine.tensor_parallel.test_ranks import config_of
from tests.unit.engine.test_lora import base  # noqa: F401  (a fixture)

TIMEOUT_S = 60

Said = queue.Queue[tuple[str, int]]


def host_of(folder: Path) -> tuple[RankHost, Said]:
    """A host that survives the end of ranks; and what it is told of that."""
    said: Said = queue.Queue()
    return RankHost(lambda message, exit_code: said.put((message, exit_code)), folder), said


def start_second(config: EngineConfig, folder: Path) -> tuple[Ranks, Said]:
    """Start the second rank alone, which waits for the first; and what is said of its end."""
    host, said = host_of(folder)
    return Ranks(config, host, max_model_len=100), said


def test_a_killed_rank_is_told_with_the_signal_and_leaves_no_file(base: Path, tmp_path: Path) -> None:  # noqa: F811
    ranks, said = start_second(config_of(base, [], tensor_parallel_size=2), tmp_path)
    try:
        assert list(tmp_path.iterdir())
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert said.get(timeout=TIMEOUT_S) == ("Rank 1 was killed by SIGKILL (out of memory?).", 1)
        assert not list(tmp_path.iterdir())
    finally:
        ranks.close()


@pytest.mark.slow
def test_what_fails_for_a_lost_rank_waits_until_that_is_told(base: Path, tmp_path: Path) -> None:  # noqa: F811
    ranks, said = start_second(config_of(base, [], tensor_parallel_size=2), tmp_path)
    try:
        ranks.await_blame()  # returns while all live
        assert said.empty()
        os.kill(ranks.pids[0], signal.SIGKILL)
        ranks.await_blame()
        assert said.qsize() == 1
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_fault_of_a_rank_that_loads_is_told_as_one(base: Path, tmp_path: Path) -> None:  # noqa: F811
    ranks, said = start_second(config_of(base, [], tensor_parallel_size=2, dtype="none"), tmp_path)
    try:
        told = "Rank 1: KeyError while loading: 'none' (--debug shows where)."
        assert said.get(timeout=TIMEOUT_S) == (told, 3)
    finally:
        ranks.close()


def children() -> set[str]:
    """The pids of this process's children, by whichever thread."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@needs_proc
@pytest.mark.full
def test_a_load_that_fails_here_ends_the_other_ranks_and_can_be_tried_again(
    base: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    host, said = host_of(tmp_path)
    config, before, started = config_of(base, [], tensor_parallel_size=2), children(), set()

    def fail(stage: Stage) -> None:
        if stage.name == "weights":
            started.update(children() - before)
            raise StartupError("No.")

    for _ in range(2):
        with pytest.raises(StartupError, match="No"):
            OfflineEngine.load(config, fail, host=host)
    assert len(started) == 2
    assert not started & children()
    assert not list(tmp_path.iterdir())
    assert said.empty()


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    ranks, said = start_second(config_of(model, [], tensor_parallel_size=2), tmp_path)
    try:
        message, exit_code = said.get(timeout=TIMEOUT_S)
        assert message.startswith("Rank 1: ")
        assert "config.json" in message
        assert exit_code == 3
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 3}, "num_heads 4 does not split over 3 ranks"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "--device cuda"),
    ],
)
def test_what_cannot_be_split_is_refused_before_any_rank_starts(
    base: Path,  # noqa: F811
    changes: dict[str, object],
    words: str,
) -> None:
    with pytest.raises(StartupError, match=words):
        OfflineEngine.load(msgspec.structs.replace(config_of(base, []), **changes))
