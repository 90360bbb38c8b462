"""benchmarks.record: its scripts exist, their flags are known, and their files differ."""

import argparse
import importlib.util

import pytest

from benchmarks import profile_step, record
from benchmarks.offline import _SHAPES
from benchmarks.workloads import workload
from server.commands.bench.flags import add_offline_flags


def test_every_script_writes_a_file_of_its_own():
    names = [script.name for script in record.scripts()]
    assert len(set(names)) == len(names)


def test_every_module_exists():
    modules = {script.command[0] for script in record.scripts()}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_offline_scripts_name_known_flags_shapes_and_workloads():
    known = {path.name for path in _SHAPES.iterdir()}
    parser = argparse.ArgumentParser()
    add_offline_flags(parser)
    for script in record.scripts():
        if script.kind == "offline":
            arguments = parser.parse_args(script.command[3:])
            assert arguments.shape in known
            assert all(workload(name) for name in set(arguments.workloads) - {"long128k", "prefill"})


def test_profiles_name_known_flags_and_shapes():
    known = {path.name for path in _SHAPES.iterdir()}
    profiles = [script for script in record.scripts() if script.kind == "profile"]
    assert len(profiles) > 10
    for script in profiles:
        arguments = profile_step.parser().parse_args(script.command[1:])
        assert arguments.shape in known
        assert profile_step.kinds(arguments)


def test_list_prints_the_commands_of_the_chosen_shapes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["record", str(tmp_path / "new"), "--list", "--shapes", "gpt-oss-1", "gemma-2"])
    assert record.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["offline-gpt-oss-120b-mxfp4", "offline-gemma-2-9b"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("max_seconds", ["0", "60"])
def test_no_script_begins_after_the_time_is_over(capsys, monkeypatch, tmp_path, max_seconds):
    begun = []

    class Ended:
        returncode = 0

    monkeypatch.setattr(record.subprocess, "run", lambda command: begun.append(command) or Ended)
    monkeypatch.setattr("sys.argv", ["record", str(tmp_path), "--shapes", "gemma-2", "--max-seconds", max_seconds])
    assert record.main() == (1 if max_seconds == "0" else 0)
    assert len(begun) == (0 if max_seconds == "0" else 1)
    assert ("no time was left for: offline-gemma-2-9b" in capsys.readouterr().err) == (max_seconds == "0")
