"""Plots as PNG, SVG, or SVG inside a page with light and dark colours. Imports matplotlib (extra `bench`).

A Plot draws into any matplotlib figure: its own in a page, a part of one in a picture. Its settings apply only while it
is drawn and saved. Text from reports is never interpreted as mathematics.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report import BenchError

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

AnyFigure = Figure | SubFigure

# Okabe and Ito's colours, distinguishable with colour blindness
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BETTER, WORSE, SAME = COLOURS[2], COLOURS[1], "#8a8f98"
INK, MUTED, GRID = "#1f2328", "#656c76", "#e4e6ea"
# The page's names of the colours: its style sheet defines each for light and dark
VARIABLES = {
    **{colour: f"--series-{i}" for i, colour in enumerate(COLOURS)},
    SAME: "--same",
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
}
_WIDTH_IN = 10.0
_DPI = 120
_STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "quire",  # equal plots give equal bytes
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.08,
}


@dataclass(frozen=True)
class Plot:
    """A title, a text alternative, and the drawing function."""

    title: str
    words: str
    height_in: float
    draw: Callable[[AnyFigure], None]


def write_picture(path: str, headline: str, plots: Sequence[Plot]) -> None:
    """Draw all plots below each other, as PNG or SVG by the file's suffix. Raises BenchError."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn for a missing glyph
        figure = Figure(figsize=(_WIDTH_IN, 0.5 + sum(plot.height_in + 0.35 for plot in plots)))
        figure.suptitle(headline, fontsize=11, fontweight="bold")
        parts = figure.subfigures(len(plots), 1, squeeze=False, height_ratios=[plot.height_in + 0.35 for plot in plots])
        for part, plot in zip(parts.flat, plots, strict=True):
            part.suptitle(plot.title, fontsize=10, color=MUTED)
            plot.draw(part)
        try:
            figure.savefig(path, dpi=_DPI)
        except OSError as error:
            raise BenchError(f"--plot {path} cannot be written: {error.strerror}.") from error


def to_svg(plot: Plot) -> str:
    """Draw a plot as an <svg> element whose colours are the page's variables and whose size the page sets."""
    file = io.StringIO()
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure(figsize=(_WIDTH_IN, plot.height_in))
        plot.draw(figure)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], count=1, flags=re.DOTALL)
    svg = re.sub(
        r'^<svg [^>]*viewBox="([^"]*)"[^>]*>',
        r'<svg viewBox="\1" role="img" xmlns:xlink="http://www.w3.org/1999/xlink">',
        svg,
    )
    return re.sub("|".join(VARIABLES), lambda match: f"var({VARIABLES[match[0]]})", svg)


def log_axis(axes: Axes, which: str, *, ticks: Sequence[float] = ()) -> None:
    """Make an axis, x or y, logarithmic with plain numbers: some per decade, or these ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    if ticks:
        axis.set_ticks(list(ticks), [plain(tick) for tick in ticks])
    else:
        low, high = axis.get_view_interval()
        ratio = high / max(low, 1e-9)
        subs = (1, 1.5, 2, 3, 5, 7) if ratio < 15 else (1, 2, 5) if ratio < 3000 else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_formatter(NullFormatter())
    axis.minorticks_off()


def plain(value: float) -> str:
    """Format a number for an axis or a table: three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
