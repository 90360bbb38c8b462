"""Two reports of one command side by side: old, new, change, and which way is better. Never imports torch."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.latency import METRICS
from benchmarks.report import BenchError, Report, format_table
from benchmarks.saved import run_name

_SAME = 0.01  # relative changes below it are within the variation of repeated runs
# Report fields that change no figure: addresses, file names, the model's name
_INCIDENTAL = {"load.host", "load.port", "machine.date"} | {
    f"args.{name}" for name in ("workloads", "model", "shape", "json", "compare", "debug", "html", "plot")
}


class Figure(NamedTuple):
    """One number of a report."""

    name: str
    value: float
    is_higher_better: bool


class Change(NamedTuple):
    """One number of two reports. share: (new - old) / old, None where old is 0. verdict: better, worse or same."""

    name: str
    old: float
    new: float
    share: float | None
    verdict: str


def compare(old: Report, new: Report) -> str:
    """Return a table of the common figures, after a line per differing condition. Raises BenchError without any."""
    rows = [["", "old", "new", "change", ""]]
    for name, before, after, share, verdict in changes(old, new):
        rows.append([name, f"{before:,.2f}", f"{after:,.2f}", "" if share is None else f"{share:+.1%}", verdict])
    if len(rows) == 1:
        raise BenchError("--compare: the two reports have no figure in common.", exit_code=2)
    differing = [f"not the same {line}" for line in differences(old, new)]
    return "\n".join([f"compared with the run of {old.get('date', 'an unknown date')}", *differing, format_table(rows)])


def changes(old: Report, new: Report) -> list[Change]:
    """Return the figures in both reports, in the new report's order."""
    old, new = _alike(old, new)
    before = {figure.name: figure.value for figure in figures(old)}
    return [_change(figure, before[figure.name]) for figure in figures(new) if figure.name in before]


def differences(old: Report, new: Report) -> list[str]:
    """Return the conditions in both reports that differ."""
    old, new = _alike(old, new)
    was, now = _conditions(old), _conditions(new)
    return [f"{name}: {was[name]} → {now[name]}" for name in now if name in was and was[name] != now[name]]


def figures(report: Report) -> Iterator[Figure]:
    """Return the figures of any command's report; those of a sweep are named after their load."""
    for run in report.get("sweep", []):
        for figure in figures(run):
            yield figure._replace(name=f"{run_name(run['load'])} {figure.name}")
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


def _alike(old: Report, new: Report) -> tuple[Report, Report]:
    """Return a report's loads; a single load compared with a sweep is a sweep of one."""
    if ("sweep" in old) == ("sweep" in new):
        return old, new
    return _as_sweep(old), _as_sweep(new)


def _as_sweep(report: Report) -> Report:
    if "sweep" in report:
        return report
    shared = {name: report[name] for name in ("date", "host", "server") if name in report}
    return shared | {"sweep": [report]}


def _change(figure: Figure, old: float) -> Change:
    share = (figure.value - old) / old if old else None
    if figure.value == old or (share is not None and abs(share) < _SAME):
        verdict = "same"
    else:
        verdict = "better" if (figure.value > old) == figure.is_higher_better else "worse"
    return Change(figure.name, old, figure.value, share, verdict)


def _conditions(report: Report) -> dict[str, object]:
    """Return the conditions that must be equal for a comparison; addresses are excluded."""
    conditions: dict[str, object] = {}
    for part in ("host", "server", "versions", "machine", "args", "load", "heads"):
        values = report.get(part, {})
        conditions |= {f"{part}.{name}": value for name, value in values.items()} if isinstance(values, dict) else {}
    conditions |= {name: report[name] for name in ("model", "num_client_processes") if name in report}
    conditions = {name: value for name, value in conditions.items() if name not in _INCIDENTAL}
    for run in report.get("sweep", []):
        name = run_name(run["load"])
        of_run = {key: value for key, value in _conditions(run).items() if not key.startswith(("host.", "server."))}
        conditions |= {f"{name} {key}": value for key, value in of_run.items()}
    return conditions
