"""Rehearsals of make chaos and make soak: small crowds, seconds of load, every check of the real thing."""

import json
from pathlib import Path

import pytest

from tests.chaos.__main__ import ACTS
from tests.chaos.__main__ import main as chaos
from tests.integration.conftest import needs_proc
from tests.soak.__main__ import main as soak
from tests.soak.load import KINDS

pytestmark = needs_proc


def rehearse(path: Path, *acts: str) -> dict:
    code = chaos(["--seed", "7", "--scale", "0.05", "--json", str(path), "--acts", *acts])
    report = json.loads(path.read_text())
    assert [row["faults"] for row in report["acts"]] == [[]] * len(acts)
    assert code == 0
    return report


@pytest.mark.full
def test_a_crowd_that_leaves_and_bombs_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = rehearse(tmp_path / "report.json", "leave", "bombs")
    assert report["acts"][0]["outcomes"] == {"left": report["acts"][0]["num_requests"]}
    assert "seed 7: python -m tests.chaos --seed 7 --scale 0.05" in capsys.readouterr().out


@pytest.mark.full
def test_every_other_act_changes_nothing(tmp_path: Path) -> None:
    report = rehearse(tmp_path / "report.json", *(act for act in ACTS if act not in ("leave", "bombs")))
    assert [row["act"] for row in report["acts"] if row["restart_s"]] == ["kill engine", "kill worker", "kill launcher"]


@pytest.mark.full
def test_a_short_soak_asks_every_kind_and_measures_every_process(tmp_path: Path) -> None:
    # an engine still takes memory in its first minute
    flags = ["--hours", "0.004", "--rate", "6", "--every", "0.5", "--noise-mib", "100", "--seed", "7"]
    assert soak([*flags, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["requests"]) == set(KINDS)
    roles = {process["process"].rpartition(" ")[0] for process in report["processes"]}
    assert {"launcher", "engine", "worker"} <= roles


@pytest.mark.full
def test_a_server_that_does_not_answer_as_before_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.target.Target.check", lambda *_: ["another text"])
    path = tmp_path / "report.json"
    assert chaos(["--seed", "7", "--scale", "0.05", "--acts", "overload", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["acts"][0]["faults"] == ["another text"]
