"""Two reports of one command side by side: old, new, change, and which way is better. Never imports torch."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.latency import METRICS
from benchmarks.report import BenchError, Report, format_table

_SAME = 0.01  # changes below it are within what repeated runs differ by
# Parts of a report that change no figure: addresses, names of files, what the model's own name says
_INCIDENTAL = {"load.host", "load.port", "machine.date"} | {
    f"args.{name}" for name in ("workloads", "model", "shape", "json", "compare", "debug")
}


class Figure(NamedTuple):
    """One number of a report."""

    name: str
    value: float
    is_higher_better: bool


def compare(old: Report, new: Report) -> str:
    """A table of the figures that both have, below a line per condition that differs. Raises BenchError if none is."""
    before = {figure.name: figure.value for figure in figures(old)}
    rows = [["", "old", "new", "change", ""]]
    for figure in figures(new):
        if figure.name in before:
            rows.append(_row(figure, before[figure.name]))
    if len(rows) == 1:
        raise BenchError(
            "--compare: the two reports have no figure in common; both must be of one command.", exit_code=2
        )
    was, now = _conditions(old), _conditions(new)
    differing = [f"not the same {n}: {was[n]} → {now[n]}" for n in now if n in was and was[n] != now[n]]
    return "\n".join([f"compared with the run of {old.get('date', 'an unknown date')}", *differing, format_table(rows)])


def figures(report: Report) -> Iterator[Figure]:
    """The figures of a report of any command."""
    for name, is_higher_better in (
        ("output_throughput_tok_per_s", True),
        ("request_throughput_per_s", True),
        ("request_goodput_per_s", True),
        *((f"{statistic}_{metric}", False) for metric in METRICS for statistic in ("mean", "median", "p99")),
        ("num_failed", False),
        ("peak_vram_gib", False),
        ("load_s", False),
    ):
        if isinstance(report.get(name), int | float):
            yield Figure(name, report[name], is_higher_better)
    for workload, result in report.get("workloads", {}).items():
        yield Figure(f"{workload} output_tok_per_s", result["output_tok_per_s"], True)
        yield Figure(f"{workload} input_tok_per_s", result["input_tok_per_s"], True)
        yield Figure(f"{workload} ms_per_step", result["ms_per_step"], False)
    for result in report.get("results", []):
        if result.get("us") is not None:
            yield Figure(f"{result['case']} {result['implementation']} us", result["us"], False)


def _row(figure: Figure, old: float) -> list[str]:
    change = (figure.value - old) / old if old else None
    if figure.value == old or (change is not None and abs(change) < _SAME):
        verdict = "same"
    else:
        verdict = "better" if (figure.value > old) == figure.is_higher_better else "worse"
    percent = "" if change is None else f"{change:+.1%}"
    return [figure.name, f"{old:,.2f}", f"{figure.value:,.2f}", percent, verdict]


def _conditions(report: Report) -> dict[str, object]:
    """What must be equal for figures to be compared; addresses are not of it."""
    conditions: dict[str, object] = {}
    for part in ("host", "versions", "machine", "args", "load", "heads"):
        values = report.get(part, {})
        conditions |= {f"{part}.{name}": value for name, value in values.items()} if isinstance(values, dict) else {}
    conditions |= {name: report[name] for name in ("model", "num_client_processes") if name in report}
    return {name: value for name, value in conditions.items() if name not in _INCIDENTAL}
