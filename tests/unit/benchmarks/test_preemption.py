"""benchmarks.preemption: requests are preempted, and those that are swapped leave less to compute."""

import json
import sys

import pytest

from benchmarks import preemption


def test_preempted_requests_are_computed_without_host_memory_and_swapped_with_it(tmp_path, monkeypatch, capsys):
    asked = [([i] * 200, 100) for i in range(12)]
    monkeypatch.setattr(preemption, "workload", lambda name: asked)
    file = tmp_path / "found.json"
    flags = ["--shape", "tiny", "--pool", "1200KiB", "--host-memory", "8MiB", "--runs", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["preemption", *flags, "--json", str(file)])
    assert preemption.main() == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows["computed"]["num_preemptions"] > 0
    assert not rows["computed"]["num_resumed"].get("swapped")
    assert rows["swapped or computed"]["num_resumed"]["swapped"] > 0
    assert "mixed256" in file.read_text()
    assert "preempted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shape", "huge"], "invalid choice: 'huge'"),
        (["--workload", "agent"], "invalid choice: 'agent'"),
        (["--runs", "0"], "--runs"),
    ],
)
def test_wrong_flags_are_refused(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["preemption", *flags])
    with pytest.raises(SystemExit, match="2"):
        preemption.main()
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preemption, "measure", lambda *arguments, **named: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["preemption", "--json", str(tmp_path / "none" / "found.json")])
    assert preemption.main() == 2
    assert "its folder does not exist" in capsys.readouterr().err
