"""Chooses the plots that the given reports allow, and remarks on the missing ones. Imports matplotlib."""

from collections.abc import Iterable, Sequence

from benchmarks.compare import Change, changes
from benchmarks.plots import COLOURS, Plot
from benchmarks.plots_bars import plot_changes, plot_offline
from benchmarks.plots_kernels import plot_decode, plot_prefill
from benchmarks.plots_serve import plot_histograms, plot_sweep
from benchmarks.saved import ServeRun, Source
from benchmarks.titles import figure_title

_MAX_HISTOGRAMS = 4  # per picture
_MAX_CHANGES = 30
_MAX_BATCHES = 6
_MAX_HEADLINE = 110
_MOST_TELLING = (
    "output_throughput_tok_per_s", "request_goodput_per_s", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "median_itl_ms", "p99_itl_ms", "median_e2el_ms", "p99_e2el_ms",
)  # fmt: skip


def choose_plots(sources: Sequence[Source]) -> tuple[list[Plot], list[str]]:
    """Return the plots in their order, and remarks on omitted or unreliable ones."""
    remarks = [
        line if len(sources) == 1 else f"{source.label}: {line}" for source in sources for line in _warnings(source)
    ]
    if sources[0].kind == "serve":
        plots = [*_sweep(sources), *_histograms(sources, remarks)]
    elif sources[0].kind == "offline":
        plots = [plot_offline("Workloads", {source.label: source.workloads for source in sources})]
    else:
        plots = list(_kernels(sources[-1], remarks))
    for source in sources[1:]:
        plots += _changes(sources[0], source, remarks)
    return plots, remarks


def headline(sources: Sequence[Source]) -> str:
    """Return one line that names the measurement."""
    line = _describe(sources[-1])
    return line if len(line) <= _MAX_HEADLINE else f"{line[: _MAX_HEADLINE - 1]}…"


def _describe(last: Source) -> str:
    date = str(last.report.get("date", ""))[:10] or "no date"
    if last.kind == "serve":
        load = last.runs[0].load
        server = last.report.get("server")
        device = (server.get("gpus") or server.get("device")) if isinstance(server, dict) else None
        where = f" ({device})" if device else ""
        what = f"workload {load.workload}" if load.workload else f"{load.input_len} in, {load.output_len} out"
        return f"Load on {load.model}{where}: {what}, {date}"
    if last.kind == "offline":
        return f"Offline workloads of {last.report.get('model', 'a model')}, {date}"
    machine = last.report.get("machine")
    gpu = machine.get("gpu") if isinstance(machine, dict) else None
    return f"Attention kernels on {'the CPU' if gpu in (None, 'none') else gpu}, {date}"


def _sweep(sources: Sequence[Source]) -> Iterable[Plot]:
    closed = {s.label: sorted(_closed(s.runs), key=lambda run: run.load.concurrency) for s in sources}
    closed = {label: runs for label, runs in closed.items() if runs}
    if len({run.load.concurrency for runs in closed.values() for run in runs}) > 1:
        yield plot_sweep("Throughput and latency over the number of requests at once", closed)


def _closed(runs: Iterable[ServeRun]) -> list[ServeRun]:
    return [run for run in runs if run.load.rate_per_s == 0]


def _histograms(sources: Sequence[Source], remarks: list[str]) -> Iterable[Plot]:
    missing = [f"{source.label} {run.name}" for source in sources for run in source.runs if not run.histograms]
    if missing:
        remarks.append(f"Not in the latency histograms, because the file holds none: {', '.join(missing)}.")
    if len(sources) == 1:
        runs = {_legend(run): run for run in sources[0].runs if run.histograms}
        kept = {name: runs[name] for name in _spread(list(runs), len(COLOURS), remarks)}
        groups = {"Latencies": kept} if kept else {}
    elif all(len(source.runs) == 1 for source in sources):
        groups = {"Latencies": {source.label: source.runs[0] for source in sources if source.runs[0].histograms}}
    else:
        by_name: dict[str, dict[str, ServeRun]] = {
            _legend(run): {} for source in reversed(sources) for run in source.runs
        }
        for source in sources:
            for run in source.runs:
                if run.histograms:
                    by_name[_legend(run)][source.label] = run
        alone = [name for name, runs in by_name.items() if len(runs) == 1]
        if alone:
            remarks.append(f"In one of the files alone, so without a histogram: {', '.join(alone)}.")
        groups = {f"Latencies, {name}": runs for name, runs in by_name.items() if len(runs) > 1}
        groups = {name: groups[name] for name in _spread(list(groups), _MAX_HISTOGRAMS, remarks)}
    for title, runs in groups.items():
        if runs:
            yield plot_histograms(title, runs)


def _spread(names: list[str], limit: int, remarks: list[str]) -> list[str]:
    """Return at most so many of the names, including first and last; a remark lists the others."""
    if len(names) <= limit:
        return names
    kept = [names[round(i * (len(names) - 1) / (limit - 1))] for i in range(limit)]
    remarks.append(
        f"Without a histogram of their own, for want of room: {', '.join(n for n in names if n not in kept)}."
    )
    return kept


def _legend(run: ServeRun) -> str:
    return f"{run.load.rate_per_s:g} a second" if run.load.rate_per_s else f"{run.load.concurrency} at once"


def _kernels(source: Source, remarks: list[str]) -> Iterable[Plot]:
    prefill, decode = (
        [cell for cell in source.cells if cell.part == part and cell.us] for part in ("prefill", "decode")
    )
    if prefill:
        yield plot_prefill(prefill)
    batches = sorted({cell.num_rows for cell in decode})
    if len(batches) > _MAX_BATCHES:
        batches = batches[:: -(-len(batches) // _MAX_BATCHES)]
        remarks.append(f"Decode is drawn for {', '.join(map(str, batches))} rows; the table has all.")
    if decode:
        yield plot_decode([cell for cell in decode if cell.num_rows in batches])


def _changes(old: Source, new: Source, remarks: list[str]) -> Iterable[Plot]:
    found = changes(old.report, new.report)
    if not found:
        remarks.append(f"{old.label} and {new.label} have no figure in common: nothing is compared.")
        return
    shown = [change for change in found if old.kind != "serve" or change.name.endswith(_MOST_TELLING)]
    if len(shown) > _MAX_CHANGES:
        remarks.append(f"Of {len(shown)} changes the {_MAX_CHANGES} largest are drawn; the table has all.")
        largest = sorted(shown, key=_size, reverse=True)[:_MAX_CHANGES]
        shown = [change for change in shown if change in largest]
    names = [figure_title(change.name) for change in shown]
    yield plot_changes(f"Change from {old.label} to {new.label}", shown, names)


def _size(change: Change) -> float:
    return abs(change.share) if change.share is not None else 0.0


def _warnings(source: Source) -> list[str]:
    """Return the measurement's own remarks; for a run of a sweep with its name."""
    is_sweep = len(source.runs) > 1
    return [f"{_legend(run)}: {line}" if is_sweep else line for run in source.runs for line in run.warnings]
