"""docs/how-to/scaling.md and several-gpus.md: commands that the program takes, and right sums."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import _parser

ROOT = Path(__file__).parent.parent
TEXT = "".join((ROOT / "docs/how-to" / name).read_text() for name in ("scaling.md", "several-gpus.md"))
RATES = ("output_throughput_tok_per_s", "output_tok_per_s", "input_tok_per_s")


def commands() -> list[str]:
    """Every `quire …` of the shell blocks."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
    return re.findall(r"(?m)^(?:\w+=\S+ )?(quire .*?)(?:\s+#.*|\s+&)?$", blocks)


def test_there_are_commands_of_each_kind() -> None:
    assert {tuple(command.split()[1:3]) for command in commands()} == {
        ("serve", "MODEL"),
        ("doctor", "MODEL"),
        ("bench", "steps"),
        ("bench", "plan"),
    }


@pytest.mark.parametrize("command", commands())
def test_a_command_is_the_programs(command: str) -> None:
    _parser().parse_args(shlex.split(command)[1:])


def test_hours_per_million_tokens_are_those_of_the_throughput_that_was_measured() -> None:
    rows = re.findall(r"\| (?:(\d) )?(H\d00)[^|]*\| ([\d,]+) \| (0\.\d+) \|$", TEXT, re.MULTILINE)
    measured = {(gpus, round(rate)) for gpus, rate in throughputs()}
    assert len(rows) == 12
    for count, gpu, cell, hours in rows:
        num_gpus, throughput = int(count or 1), int(cell.replace(",", ""))
        assert float(hours) == pytest.approx(num_gpus * 1e6 / 3600 / throughput, rel=0.02)
        assert (f"{count}x" * bool(count) + gpu.lower(), throughput) in measured


def throughputs() -> Iterator[tuple[str, float]]:
    """Every throughput in benchmarks/results, with the GPUs that the name of its file says."""
    for path in (ROOT / "benchmarks/results").glob("o[nf]*line-*.json"):
        (gpus,) = re.findall(r"-((?:\d+x)?h\d00)-", path.name)
        report = json.loads(path.read_text())
        for load in [*report.get("online", {}).values(), *report.get("workloads", {}).values()]:
            yield from ((gpus, load[name]) for name in RATES if name in load)
