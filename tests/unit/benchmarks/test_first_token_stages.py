"""A first token by stages: what the benchmark refuses, how marks are matched to requests, and in full runs a daemon."""

import json
from pathlib import Path

import pytest

from benchmarks import first_token_stages
from benchmarks.first_token_marks import MARKS, WRITES, MarkFile, read_marks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests 0 must be at least 1"),
        (["--settle", "-1"], "--settle -1.0 must be at least 0"),
        (["--shape", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_wrong_arguments_are_refused_before_a_daemon_starts(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        first_token_stages.main(arguments)
    assert message in capsys.readouterr().err


def test_marks_of_a_process_are_read_while_it_runs(tmp_path: Path):
    marks = MarkFile(tmp_path)
    marks.add("step planned", at_ns=20)
    marks.add("device: layers", 1500.0, at_ns=10)
    assert read_marks(tmp_path) == [(10, "device: layers", 1500.0), (20, "step planned", 0.0)]


def test_a_request_has_the_first_mark_of_each_name_between_its_sending_and_its_first_token():
    marks = [
        (900, "step planned", 0.0),
        (3_000, "worker has bytes", 0.0),
        (5_000, "step planned", 0.0),
        (6_000, "step planned", 0.0),
        (7_000, "device: layers", 42.0),
        (8_000, WRITES, 1.0),
        (9_500, "step planned", 0.0),
    ]
    (found,) = first_token_stages._match([(1_000, 9_000)], marks)
    assert found == {
        "client has token": 8, "worker has bytes": 2, "step planned": 4, "device: layers": 42, WRITES: 7,
    }  # fmt: skip
    stages = first_token_stages._summarise([found])
    assert {name: figures["p50"] for name, figures in stages.items()} == {
        "client sends → worker has bytes": 2,
        "worker has bytes → step planned": 2,
        f"step planned → {WRITES}": 3,
        f"{WRITES} → client has token": 1,
        "sent until the client has it": 8,
        "device: layers": 42,
    }


def test_a_first_token_without_text_is_left_out():
    assert first_token_stages._match([(0, 9)], [(5, WRITES, 0.0)]) == []


@pytest.mark.full
def test_a_real_daemon_is_measured(tmp_path: Path):
    path = tmp_path / "out.json"
    assert first_token_stages.main(["--requests", "8", "--settle", "0", "--json", str(path)]) == 0
    stages = json.loads(path.read_text())["trees"]["this"]
    assert all(figures["p90"] > 0 for figures in stages.values())
    on_host = {name for name in MARKS if not name.startswith(("device", "graph"))}
    assert len(stages) == len(on_host) + 2
