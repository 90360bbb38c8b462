"""docs/reference/promises.md: what the server promises, and the newest measurement of each. make reference-pages.

A row comes from a file of benchmarks/results and names the command that wrote it. A promise without a measurement of
its own has no row.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PATH = ROOT / "docs" / "reference" / "promises.md"
_RESULTS = ROOT / "benchmarks" / "results"
_HEAD = """\
# Promises

What the server promises its clients, and what was measured of it.
Each table names its command and its file; `make reference-pages` writes this page from the newest files.
"""
_KILLS = """\
## A request outlives its engine

When the engine dies, [open requests go on](life-cycle.md#open-requests-go-on) with the tokens of an undisturbed run.
The engine is killed (SIGKILL) whenever it has served for some seconds, under streams of nine kinds: {kinds}.
A stream is cut if it ends without its last event; it differs if its text is not that of the undisturbed answer.
A stream's pause is from the kill until its first event by the next engine.
In this time the next engine starts, and computes prompts and answers of all open requests once more.
"""


def page() -> str:
    """Return what the page should be."""
    runs = {name: newest(f"kills{suffix}-cpu") for name, suffix in (("", ""), ("`--standby`", "-standby"))}
    kinds = ", ".join(next(iter(runs.values()))[1]["figures"]["streams_of_each_kind"])
    return "\n".join([_HEAD, _KILLS.format(kinds=kinds), *kill_rows(runs), ""])


def newest(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the newest file of a measurement, and what it says."""
    path = max(_RESULTS.glob(f"{name}-[0-9]*.json"))
    return path, json.loads(path.read_bytes())


def kill_rows(runs: dict[str, tuple[Path, dict[str, Any]]]) -> Iterator[str]:
    """Yield a table with a column for each run of benchmarks.kills, by the flags of its server."""
    reports = [report for _, report in runs.values()]
    figures = [report["figures"] for report in reports]
    yield _row(["", *(f"demo model, CPU{flags and ', '}{flags}" for flags in runs)])
    yield _row(["---"] * (1 + len(runs)))
    yield _row(["kills", *(f"{each['kills']}" for each in figures)])
    yield _row(["streams at once", *(f"{report['settings']['streams']}" for report in reports)])
    yield _row(["streams", *(f"{each['streams']}" for each in figures)])
    yield _row(["streams that were cut", *(f"**{each['cut']}**" for each in figures)])
    yield _row(["streams with another text", *(f"**{each['different']}**" for each in figures)])
    for field, label in (
        ("without_an_engine_s", "without an engine, p50 / p99, s"),
        ("until_the_first_stream_goes_on_s", "until the first stream goes on, p50 / p99, s"),
        ("pause_of_a_stream_s", "pause of a stream, p50 / p99, s"),
    ):
        yield _row([label, *(f"{each[field]['p50']:.2f} / {each[field]['p99']:.2f}" for each in figures)])
    load = [f"{report['machine']['load_average']:.0f}" for report in reports]
    cores = [f"{report['machine']['cpus']}, {at}" for report, at in zip(reports, load, strict=True)]
    yield _row(["cores, and processes that wanted one", *cores])
    yield _row(["file", *(f"[{path.name}](../../benchmarks/results/{path.name})" for path, _ in runs.values())])
    yield ""
    yield "```"
    for _, report in runs.values():
        settings, flags = report["settings"], report["server_flags"]
        names = {"streams": "streams", "seconds": "seconds", "every": "every_s"}
        words = [f"--{flag} {settings[name]:g}" for flag, name in names.items()]
        yield " ".join(["python -m benchmarks.kills", *words, *flags])
    yield "```"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
