"""A report as one HTML page: plots as inline SVG, tables of figures, and the conditions of the measurement.

The page needs no other file and no script, and follows the reader's light or dark setting. The template (report.html)
escapes all text from a report; matplotlib escapes a plot's SVG.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from benchmarks.compare import changes, differences
from benchmarks.plots import VARIABLES, Plot, plain, to_svg
from benchmarks.report import BenchError
from benchmarks.saved import ServeRun, Source
from benchmarks.titles import figure_title

_MAX_TEXT = 600  # characters of a fact; a command line may be long
_PARTS = ("host", "server", "versions", "machine", "facts", "heads", "load", "args")
_PART_NAMES = {"host": "machine", "args": "flag"}
_UNITS = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
_DARK = {
    "--series-0": "#58a6e8", "--series-1": "#ff8a4c", "--series-2": "#2fc79a", "--series-3": "#e3a1cb",
    "--series-4": "#f2b93b", "--series-5": "#8fd0f5", "--same": "#8b929c", "--ink": "#e6e8eb", "--muted": "#a2a9b3",
    "--grid": "#33383f",
}  # fmt: skip


class Table(NamedTuple):
    """Text in rows, beginning with each row's name. verdicts: better, worse or same per row, or empty."""

    title: str
    heading: list[str]
    rows: list[list[str]]
    verdicts: list[str]


def write_page(
    path: str, headline: str, plots: Sequence[Plot], remarks: Sequence[str], sources: Sequence[Source]
) -> None:
    """Write the page. Raises BenchError."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    html = template.render(
        headline=headline,
        light={name: colour for colour, name in VARIABLES.items()},
        dark=_DARK,
        plots=[(plot.title, plot.words, Markup(to_svg(plot))) for plot in plots],  # nosec B704 # matplotlib's own text
        remarks=remarks,
        tables=[table for source in sources for table in _figures(source, is_alone=len(sources) == 1)],
        comparisons=[_comparison(sources[0], source) for source in sources[1:]],
        differing=[(source.label, differences(sources[0].report, source.report)) for source in sources[1:]],
        facts=_facts(sources),
    )
    try:
        Path(path).write_text(html, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--html {path} cannot be written: {error.strerror}.") from error


def _figures(source: Source, *, is_alone: bool) -> list[Table]:
    suffix = "" if is_alone else f": {source.label}"
    if source.kind == "serve":
        heading = ["load", "completed", "failed", "tok/s", "requests/s"]
        heading += [f"{name.removesuffix('_ms').upper()} {q}" for name in _UNITS for q in ("p50", "p99")]
        has_goodput = any(run.request_goodput_per_s is not None for run in source.runs)
        heading += ["goodput, requests/s"] * has_goodput
        rows = [_serve_row(run, has_goodput=has_goodput) for run in source.runs]
        return [Table(f"Figures{suffix}, latencies in ms", heading, rows, [])]
    if source.kind == "offline":
        heading = ["workload", "requests", "tokens in", "tokens out", "best, s", "tok/s in", "tok/s out", "ms/step"]
        rows = [
            [name, f"{r.num_requests:,}", f"{r.num_input_tokens:,}", f"{r.num_output_tokens:,}", f"{r.seconds:.2f}",
             plain(r.input_tok_per_s), plain(r.output_tok_per_s), f"{r.ms_per_step:.3f}"]
            for name, r in source.workloads.items()
        ]  # fmt: skip
        return [Table(f"Figures{suffix}", heading, rows, [])]
    names = list(dict.fromkeys(cell.implementation for cell in source.cells))
    times = {(cell.case, cell.implementation): cell.us for cell in source.cells}
    cases = dict.fromkeys(cell.case for cell in source.cells)
    rows = [[case, *(_number(times.get((case, name))) for name in names)] for case in cases]
    return [Table(f"Times in µs{suffix}", ["case", *names], rows, [])]


def _serve_row(run: ServeRun, *, has_goodput: bool) -> list[str]:
    load = f"{run.load.rate_per_s:g} a second" if run.load.rate_per_s else f"{run.load.concurrency} at once"
    rates = (run.output_throughput_tok_per_s, run.request_throughput_per_s)
    latencies = [run.statistic(f"{kind}_{name}") for name in _UNITS for kind in ("median", "p99")]
    numbers = [*rates, *latencies, *([run.request_goodput_per_s] if has_goodput else [])]
    return [load, f"{run.num_completed:,}", f"{run.num_failed:,}", *map(_number, numbers)]


def _number(value: float | None) -> str:
    return "–" if value is None else plain(value)


def _comparison(old: Source, new: Source) -> Table:
    found = changes(old.report, new.report)
    rows = [
        [
            figure_title(change.name),
            plain(change.old),
            plain(change.new),
            "" if change.share is None else f"{change.share:+.1%}",
            change.verdict,
        ]
        for change in found
    ]
    heading = ["figure", old.label, new.label, "change", ""]
    return Table(f"From {old.label} to {new.label}", heading, rows, [change.verdict for change in found])


def _facts(sources: Sequence[Source]) -> Table:
    """Return the conditions, a column per source; a fact that no source saved is omitted."""
    columns = [_facts_of(source) for source in sources]
    names = dict.fromkeys(name for facts in columns for name in facts)
    rows = [[name, *(facts.get(name, "not recorded") for facts in columns)] for name in names]
    labels = [source.label for source in sources] if len(sources) > 1 else [""]
    return Table("What was measured, and where", ["", *labels], rows, [])


def _facts_of(source: Source) -> dict[str, str]:
    report = source.report
    facts = {"command": report.get("command", "not recorded"), "date": report.get("date", "not recorded")}
    inner = report.get("sweep")
    first = inner[0] if isinstance(inner, list) else {}
    for part in _PARTS:
        values = report.get(part, first.get(part))
        if isinstance(values, dict):
            facts |= {
                f"{_PART_NAMES.get(part, part)}: {name.replace('_', ' ')}": value for name, value in values.items()
            }
    shown = {str(name): _text(value) for name, value in facts.items() if value not in (None, "", [], {})}
    if len(source.runs) > 1:
        shown |= {"load: concurrency": ", ".join(str(run.load.concurrency) for run in source.runs)}
        shown.pop("load: num requests", None)
        shown.pop("load: seed", None)
    return shown


def _text(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
