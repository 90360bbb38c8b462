"""Ranks of a measurement end together: when all are done, when one fails, when time is up."""

import os
import time

import pytest

from benchmarks.rank_processes import run_ranks

RANK = """
import os, sys, time
rank, size, rendezvous, folder, kind = sys.argv[1:]
with open(f"{folder}/{rank}.part", "w") as file:
    file.write(f"{os.getpid()} {size} {rendezvous}")
os.rename(file.name, f"{folder}/{rank}")  # a rank that is killed in between leaves no half of it
if kind == "fails" and rank == "1":
    sys.exit(7)
if kind != "ends":
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run three such ranks; → (exit code, what each wrote)."""
    (tmp_path / "some_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(kind, timeout_s):
        code = run_ranks("some_rank", [str(tmp_path), kind], num_ranks=3, timeout_s=timeout_s)
        return code, [path.read_text().split() for path in sorted(tmp_path.glob("[0-9]"))]

    return run


def test_all_ranks_are_told_their_place_and_where_to_meet(run):
    code, wrote = run("ends", 60)
    assert code == 0
    assert [size for _, size, _ in wrote] == ["3"] * 3
    assert len({rendezvous for _, _, rendezvous in wrote}) == 1


@pytest.mark.parametrize(("kind", "timeout_s", "expected"), [("fails", 60, 7), ("hangs", 1.5, 124)])
@pytest.mark.slow
def test_none_outlives_a_failed_rank_or_the_deadline(run, kind, timeout_s, expected):
    started_s = time.monotonic()
    code, wrote = run(kind, timeout_s)
    assert code == expected
    assert time.monotonic() - started_s < 50
    for pid, _, _ in wrote:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
