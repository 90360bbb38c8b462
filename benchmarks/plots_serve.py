"""Plots of `quire bench serve`: distributions of latencies, and figures over concurrency. Imports matplotlib."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.histogram import Histogram, to_bars
from benchmarks.plots import COLOURS, INK, MUTED, AnyFigure, Plot, log_axis, plain
from benchmarks.saved import ServeRun

TITLES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Inter-token latency",
    "e2el_ms": "End-to-end latency",
}
_MIN_BARS, _MAX_BARS = 12, 40
_LOG_FROM = 4.0  # ratio of longest to shortest above which the axis is logarithmic
Runs = Mapping[str, ServeRun]  # by name in the legend


def plot_histograms(title: str, runs: Runs) -> Plot:
    """Draw a panel per metric: the share of requests (for ITL, of gaps between chunks) per latency."""
    words = "; ".join(
        f"{name}: median {_ms(run.statistic(f'median_{metric}'))}, p99 {_ms(run.statistic(f'p99_{metric}'))}"
        for metric, name in TITLES.items()
        for run in list(runs.values())[-1:]
    )

    def draw(figure: AnyFigure) -> None:
        for axes, metric in zip(figure.subplots(2, 2).flat, TITLES, strict=True):
            _draw_histogram(axes, metric, runs)
        entries = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(COLOURS))

    return Plot(title, words, 5.7, draw)


def plot_sweep(title: str, sweeps: Mapping[str, Sequence[ServeRun]]) -> Plot:
    """Draw throughput and latencies over the number of requests at once; a colour per source."""
    last = list(sweeps.values())[-1]
    words = "; ".join(f"{run.name}: {run.output_throughput_tok_per_s:,.0f} tok/s" for run in last)

    def draw(figure: AnyFigure) -> None:
        panels = figure.subplots(2, 2).flat
        concurrencies = sorted({run.load.concurrency for runs in sweeps.values() for run in runs})
        for axes, metric in zip(panels, ("", "ttft_ms", "itl_ms", "e2el_ms"), strict=True):
            for colour, (label, runs) in zip(COLOURS, sweeps.items(), strict=False):
                _draw_line(axes, metric, runs, colour, label=label if len(sweeps) > 1 else "")
            axes.set_title(f"{TITLES[metric]}, ms" if metric else "Output throughput, tok/s")
            axes.set_xlabel("requests at once")
            _scale(axes, concurrencies, is_latency=bool(metric))
            if metric:
                _explain_lines(axes)
            elif len(sweeps) == 1:
                _label_points(axes, last)
        if len(sweeps) > 1:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(sweeps))

    return Plot(title, words, 5.4 if len(sweeps) == 1 else 5.7, draw)


def _draw_histogram(axes: Axes, metric: str, runs: Runs) -> None:
    found = {label: (run.histograms or {}).get(metric) for label, run in runs.items()}
    histograms: list[Histogram] = [histogram for histogram in found.values() if histogram is not None]
    axes.set_title(TITLES[metric])
    axes.set_xlabel("ms")
    axes.set_ylabel("% of chunks" if metric == "itl_ms" else "% of requests")
    if not histograms:
        axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center", color=MUTED)
        return
    num_values = max(sum(histogram.counts) for histogram in histograms)
    bars = to_bars(histograms, max_bars=min(_MAX_BARS, max(_MIN_BARS, round(2 * num_values**0.5))))
    shares = iter(bars.shares)
    for colour, (label, histogram) in zip(COLOURS, found.items(), strict=False):
        if histogram is None:
            continue
        share = next(shares)
        axes.stairs(share, bars.edges_ms, fill=True, color=colour, alpha=0.75 if len(runs) == 1 else 0.15)
        if len(runs) > 1:
            axes.stairs(share, bars.edges_ms, color=colour, linewidth=1.5, label=label)
    axes.set_ylim(0, 1.08 * max(map(max, bars.shares)))
    axes.set_xlim(bars.edges_ms[0], bars.edges_ms[-1])
    if bars.edges_ms[-1] > _LOG_FROM * bars.edges_ms[0]:
        log_axis(axes, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
    if len(runs) == 1:
        _mark(axes, metric, next(iter(runs.values())))


def _mark(axes: Axes, metric: str, run: ServeRun) -> None:
    """Draw lines at median and p99, with their values in the title."""
    marks = {"median": run.statistic(f"median_{metric}"), "p99": run.statistic(f"p99_{metric}")}
    for (name, value), style in zip(marks.items(), ("-", "--"), strict=True):
        if value is not None:
            axes.axvline(value, color=INK, linewidth=1.2, linestyle=style, label=name)
    axes.set_title(f"{TITLES[metric]}: median {_ms(marks['median'])}, p99 {_ms(marks['p99'])}")


def _draw_line(axes: Axes, metric: str, runs: Sequence[ServeRun], colour: str, *, label: str) -> None:
    if not metric:
        points = [(run.load.concurrency, run.output_throughput_tok_per_s) for run in runs]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=label)
        return
    for statistic, style in (("median", "-"), ("p99", "--")):
        values = [(run.load.concurrency, run.statistic(f"{statistic}_{metric}")) for run in runs]
        points = [(concurrency, value) for concurrency, value in values if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=4)


def _scale(axes: Axes, concurrencies: Sequence[int], *, is_latency: bool) -> None:
    values = [value for line in axes.lines for value in np.asarray(line.get_ydata(), float).tolist() if value > 0]
    if is_latency and values and max(values) > 30 * min(values):
        log_axis(axes, "y")
    else:
        axes.set_ylim(0, 1.15 * max(values, default=1.0))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    if len(concurrencies) > 1:
        log_axis(axes, "x", ticks=concurrencies)
    else:
        axes.set_xticks(concurrencies)


def _explain_lines(axes: Axes) -> None:
    lines = [axes.plot([], [], color=MUTED, linestyle=style)[0] for style in ("-", "--")]
    axes.legend(lines, ["median", "p99"], loc="upper left")


def _label_points(axes: Axes, runs: Sequence[ServeRun]) -> None:
    for run in runs:
        value = run.output_throughput_tok_per_s
        axes.annotate(
            plain(value), (run.load.concurrency, value), (0, 6), textcoords="offset points", ha="center", fontsize=8
        )


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{plain(value)} ms"
