"""A row of the dashboard as a picture, from what Prometheus answers to its queries. Ours, not Grafana's rendering.

Draws the JSON of the panels that Grafana reads (deploy/grafana/dashboards). Imports matplotlib, not its global state.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from deploy.grafana.panels import Json
from tests.monitoring.prometheus import Series
from tests.monitoring.units import text_of

Ask = Callable[[str], list[Series]]

_COLUMN_INCH, _ROW_INCH = 0.5, 0.31
_HEAD_INCH = 0.42
_PAGE, _CARD, _INK, _FAINT = "#F3F4F6", "#FFFFFF", "#1F2430", "#6B7280"
# Okabe and Ito's, which colour-blind readers tell apart
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8A8A", "#B8A600")
_OF_PERCENTILES = {"p50": "#009E73", "p95": "#E69F00", "p99": "#D55E00"}
_OF_STEPS = {"green": "#1A7F4B", "orange": "#C77700", "red": "#C62828", "transparent": "none"}


def draw_row(path: Path, title: str, panels: Sequence[Json], ask: Ask) -> None:
    """Write a row's picture. ask: runs a query over the time to be shown."""
    top = min(panel["gridPos"]["y"] for panel in panels)
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    height = (bottom - top) * _ROW_INCH + _HEAD_INCH
    figure = Figure(figsize=(24 * _COLUMN_INCH, height), facecolor=_PAGE)
    figure.text(0.1 / 12, 1 - 0.27 / height, title, fontsize=13, fontweight="bold", color=_INK)
    for panel in panels:
        place = panel["gridPos"]
        left, wide = place["x"] * _COLUMN_INCH, place["w"] * _COLUMN_INCH
        high = place["h"] * _ROW_INCH
        low = height - _HEAD_INCH - (place["y"] - top) * _ROW_INCH - high
        _card(figure, panel, (left + 0.04, low + 0.04, wide - 0.08, high - 0.08), ask)
    _save(figure, path)


def _card(figure: Figure, panel: Json, box: tuple[float, float, float, float], ask: Ask) -> None:
    """Draw a panel into a box of inches: left, bottom, width, height."""
    figure_wide, figure_high = figure.get_size_inches()
    left, low, wide, high = box

    def place(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        return (x / figure_wide, y / figure_high, w / figure_wide, h / figure_high)

    x, y, w, h = place(*box)
    card = FancyBboxPatch((x, y), w, h, boxstyle="square,pad=0", fc=_CARD, ec="#DDE0E6", lw=0.8, zorder=-1)
    figure.add_artist(card)
    at = ((left + 0.1) / figure_wide, (low + high - 0.2) / figure_high)
    size = 7.5 if panel["gridPos"]["w"] < 6 else 9
    figure.text(*at, panel["title"], fontsize=size, fontweight="bold", color=_INK)
    found = [(target, series) for target in panel["targets"] for series in ask(target["expr"])]
    if panel["type"] == "stat":
        _stat(figure.add_axes(place(left, low, wide, high - 0.25)), panel, found)
        return
    axes = figure.add_axes(place(left + 0.62, low + 0.42, wide - 0.77, high - 0.75))
    if not found:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No data", ha="center", va="center", color=_FAINT, fontsize=10)
        return
    (_heatmap if panel["type"] == "heatmap" else _timeseries)(axes, panel, found)
    _time_axis(axes, found)


def _stat(axes: Axes, panel: Json, found: list[tuple[Json, Series]]) -> None:
    axes.set_axis_off()
    if not found:
        axes.text(0.5, 0.5, "No data", ha="center", va="center", color=_FAINT, fontsize=10)
        return
    target, series = found[0]
    defaults = panel["fieldConfig"]["defaults"]
    value = series.values[-1]
    if panel["options"]["textMode"] == "name":
        axes.text(0.5, 0.5, _name(target, series), ha="center", va="center", fontsize=10, color=_INK)
        return
    colour = _INK
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            colour = _OF_STEPS[step["color"]]
    axes.plot(series.times_s, series.values, color=colour, lw=0.8, alpha=0.5)
    axes.fill_between(series.times_s, series.values, color=colour, alpha=0.10, lw=0)
    axes.set_xlim(series.times_s[0], series.times_s[-1] + 0.1)
    axes.set_ylim(0, max(*series.values, value, 1e-9) * 2.2)  # the curve stays below the number
    text = text_of(value, defaults["unit"], defaults.get("decimals"))
    axes.text(0.5, 0.62, text, ha="center", va="center", fontsize=19, color=colour, transform=axes.transAxes)


def _timeseries(axes: Axes, panel: Json, found: list[tuple[Json, Series]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    if len(found) > 4:  # the legend of so many is too long, and zeros show nothing
        found = [(target, series) for target, series in found if any(series.values)] or found[:1]
    names = [_name(target, series) for target, series in found]
    colours = [_OF_PERCENTILES.get(name, _COLOURS[i % len(_COLOURS)]) for i, name in enumerate(names)]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        times = sorted({at for _, series in found for at in series.times_s})
        values = [np.interp(times, series.times_s, series.values, left=0, right=0) for _, series in found]
        axes.stackplot(times, values, colors=colours, labels=names, alpha=0.75, lw=0)
    else:
        for (_, series), name, colour in zip(found, names, colours, strict=True):
            axes.plot(series.times_s, series.values, color=colour, lw=1.3, label=name)
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if step["value"] is not None:
            axes.axhline(step["value"], color=_OF_STEPS[step["color"]], lw=0.8, ls="--")
    top = axes.get_ylim()[1] if any(any(series.values) for _, series in found) else 1
    axes.set_ylim(0, defaults.get("max", top) * 1.03)
    ticks = _ticks(axes, is_binary=defaults["unit"] == "bytes")
    axes.set_yticks(ticks, [text_of(tick, defaults["unit"], None) for tick in ticks])
    axes.grid(color="#ECEEF2", lw=0.7)
    axes.set_axisbelow(True)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.12),
        ncols=8,
        fontsize=7,
        frameon=False,
        handlelength=1,
        columnspacing=1.2,
        handletextpad=0.5,
        borderaxespad=0.2,
        labelcolor=_INK,
    )


def _heatmap(axes: Axes, panel: Json, found: list[tuple[Json, Series]]) -> None:
    """Cells of buckets: what Prometheus adds up is taken apart again."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    bounds = sorted((float(series.labels["le"]), series) for _, series in found)
    times = np.array(sorted({at for _, series in bounds for at in series.times_s}))
    stacked = np.array([np.interp(times, series.times_s, series.values, left=0, right=0) for _, series in bounds])
    cells = np.clip(np.diff(stacked, axis=0, prepend=0), 0, None)
    used = np.flatnonzero(cells.max(axis=1) > 0.01)
    low, high = max(0, used[0] - 1), min(len(bounds), used[-1] + 2)
    cells = np.ma.masked_less(cells[low:high], 0.01)
    edges = np.arange(low, high + 1)
    step_s = times[1] - times[0]
    axes.pcolormesh(
        np.append(times, times[-1] + step_s), edges, cells, cmap="Oranges", norm=PowerNorm(0.5, 0), rasterized=True
    )
    every = max(1, (high - low) // 7)
    marks = list(range(low, high, every))
    axes.set_yticks([mark + 1 for mark in marks], [text_of(bounds[mark][0], unit, None) for mark in marks])
    axes.set_ylim(low, high)
    axes.grid(axis="y", color="#F0F1F4", lw=0.6)
    axes.set_axisbelow(True)


def _time_axis(axes: Axes, found: list[tuple[Json, Series]]) -> None:
    start_s = min(series.times_s[0] for _, series in found)
    end_s = max(series.times_s[-1] for _, series in found)
    axes.set_xlim(start_s, end_s)
    marks = np.arange(start_s, end_s, 30 if end_s - start_s < 300 else 60)
    axes.set_xticks(marks, [f"{int(mark - start_s) // 60}:{int(mark - start_s) % 60:02}" for mark in marks])
    axes.tick_params(labelsize=7, colors=_FAINT, length=0, pad=5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _ticks(axes: Axes, *, is_binary: bool) -> list[float]:
    low, high = axes.get_ylim()
    if is_binary:
        step = 2 ** math.floor(math.log2(high / 3))
        return list(np.arange(0, high, step))
    return [float(tick) for tick in axes.yaxis.get_major_locator().tick_values(low, high) if 0 <= tick <= high][:7]


def _name(target: Json, series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), target["legendFormat"])


def _save(figure: Figure, path: Path) -> None:
    """Save with 128 colours, which looks the same and takes a third of the bytes."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    Image.open(picture).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
