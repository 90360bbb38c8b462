"""Bar plots: changes between two reports, and workloads of `quire bench offline`. Imports matplotlib."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.compare import Change
from benchmarks.plots import BETTER, COLOURS, INK, SAME, WORSE, AnyFigure, Plot, plain
from benchmarks.saved import OfflineResult

_MAX_SHARE = 1.0  # longest bar; its label shows the actual number
_COLOUR_OF = {"better": BETTER, "worse": WORSE, "same": SAME}
_PANELS = {
    "output_tok_per_s": "Tokens out per second",
    "input_tok_per_s": "Tokens in per second",
    "ms_per_step": "ms per step",
}


def plot_changes(title: str, changes: Sequence[Change], names: Sequence[str]) -> Plot:
    """Draw a bar per figure, to the right if it grew; its label says whether that is better. names: of the figures."""
    words = "; ".join(f"{name} {_percent(change)}" for name, change in zip(names, changes, strict=True))

    def draw(figure: AnyFigure) -> None:
        axes = figure.subplots()
        for i, change in enumerate(changes):
            share = max(-_MAX_SHARE, min(_MAX_SHARE, change.share or 0.0))
            axes.barh(i, 100 * share, height=0.6, color=_COLOUR_OF[change.verdict])
            side = -1 if share < 0 else 1
            axes.annotate(
                _percent(change), (100 * share, i), (4 * side, 0), textcoords="offset points", fontsize=8, va="center",
                ha="left" if side > 0 else "right",
            )  # fmt: skip
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(names)), list(names))
        axes.set_ylim(len(names) - 0.4, -0.6)
        reach = 100 * max([0.05, *(min(abs(change.share or 0.0), _MAX_SHARE) for change in changes)])
        axes.set_xlim(-1.35 * reach, 1.35 * reach)
        axes.set_xlabel("change, %")
        axes.grid(axis="y", visible=False)

    return Plot(title, words, 0.9 + 0.27 * len(changes), draw)


def plot_offline(title: str, sources: Mapping[str, Mapping[str, OfflineResult]]) -> Plot:
    """Draw rates and step times per workload; a colour per source."""
    workloads = list(dict.fromkeys(name for results in sources.values() for name in results))
    last = list(sources.values())[-1]
    words = "; ".join(f"{name}: {result.output_tok_per_s:,.0f} tok/s out" for name, result in last.items())

    def draw(figure: AnyFigure) -> None:
        height = 0.8 / len(sources)
        for axes, (field, panel) in zip(figure.subplots(1, 3, sharey=True), _PANELS.items(), strict=True):
            for i, (colour, (label, results)) in enumerate(zip(COLOURS, sources.items(), strict=False)):
                values = [_field(results.get(name), field) for name in workloads]
                places = [j + (i - (len(sources) - 1) / 2) * height for j in range(len(workloads))]
                bars = axes.barh(places, values, height=height * 0.9, color=colour, label=label)
                axes.bar_label(bars, [plain(value) if value else "" for value in values], padding=3, fontsize=8)
            axes.set_title(panel)
            axes.set_yticks(range(len(workloads)), workloads)
            axes.set_ylim(len(workloads) - 0.45, -0.55)
            axes.margins(x=0.25)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
            axes.grid(axis="y", visible=False)
        if len(sources) > 1:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(sources))

    return Plot(title, words, 1.1 + 0.3 * len(workloads) * max(len(sources), 1.5), draw)


def _field(result: OfflineResult | None, field: str) -> float:
    if result is None:
        return 0.0
    return {
        "output_tok_per_s": result.output_tok_per_s,
        "input_tok_per_s": result.input_tok_per_s,
        "ms_per_step": result.ms_per_step,
    }[field]


def _percent(change: Change) -> str:
    if change.share is None:
        return f"{plain(change.old)} → {plain(change.new)}, {change.verdict}"
    return "same" if change.verdict == "same" else f"{change.share:+.1%} {change.verdict}"
