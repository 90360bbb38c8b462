"""What is measured for the page of promises: parts and their commands, and the figures of a drain."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import promises
from benchmarks.drain import Round, figures
from benchmarks.kills import Streamed
from benchmarks.promises import PARTS, Part, run


def test_a_part_writes_its_file_by_the_option_of_its_program() -> None:
    path = Path("/x/f.json")
    assert PARTS["drain"].words(path)[:3] == [sys.executable, "-m", "benchmarks.drain"]
    assert PARTS["drain"].words(path)[-2:] == ["--json", "/x/f.json"]
    assert PARTS["soak"].words(path) == ["make", "soak", "HOURS=2", "ARGS=--json /x/f.json"]
    assert PARTS["fuzz"].words(path) == ["make", "fuzz", "ARGS=--fuzz-json /x/f.json"]


@pytest.mark.parametrize(("script", "is_new"), [("open(sys.argv[2], 'w').write('{}')", True), ("sys.exit(3)", False)])
def test_a_new_file_takes_the_place_of_the_earlier_one(tmp_path: Path, script: str, is_new: bool) -> None:
    earlier, other = tmp_path / "part-2020-01-01.json", tmp_path / "part-of-it-2020-01-01.json"
    earlier.write_text("{}")
    other.write_text("{}")
    part = Part("part", f'python -c "import sys; {script}"')
    assert run(part, tmp_path) == (0 if is_new else 3)
    assert earlier.exists() is not is_new
    assert other.exists()
    assert (part.newest(tmp_path) != earlier) is is_new


def test_an_unknown_part_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["promises", "drain", "kill"])
    with pytest.raises(SystemExit):
        promises.main()
    assert "unknown part 'kill'; there are kills, " in capsys.readouterr().err


def test_a_drain_is_judged_by_its_streams_and_its_end() -> None:
    def stream(text: str, *, is_whole: bool = True) -> Streamed:
        return Streamed("plain", 0.0, 200, [1.0], {"t": text}, is_whole, "" if is_whole else "server_shutting_down")

    one = Round([stream("a"), stream("b"), stream("a", is_whole=False)], Counter({"503": 3}), 0, 2.5, 1.0)
    found = figures([one, one], {"plain": {"t": "a"}})
    assert (found["streams"], found["cut"], found["different"]) == (6, 2, 2)
    assert found["errors"] == {"server_shutting_down": 2}
    assert found["exit_codes"] == {"0": 2}
    assert found["new_requests"] == {"503": 6}
    assert json.dumps(found)


@pytest.mark.parametrize(("gpus", "asked", "is_measured"), [([], [], False), (["A GPU"], [], True), ([], None, True)])
def test_what_needs_a_gpu_is_measured_where_there_is_one_or_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], asked: list[str] | None, is_measured: bool
) -> None:
    measured: list[Part] = []
    monkeypatch.setattr(promises, "gpu_names", lambda: gpus)
    monkeypatch.setattr(promises, "run", lambda part, folder: measured.append(part))
    monkeypatch.setattr(sys, "argv", ["promises", *(["kills-gpu"] if asked is None else asked)])
    assert promises.main() == 0
    assert (PARTS["kills-gpu"] in measured) is is_measured
    assert (PARTS["drain"] in measured) is (asked is not None)
