"""Plots of attention kernels and their baselines, as `quire bench kernels` timed them. Imports matplotlib."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from benchmarks.plots import COLOURS, SAME, AnyFigure, Plot, log_axis
from benchmarks.saved import KernelResult

# each implementation has the same colour in every panel
_COLOUR_OF = {
    "O(N²)": SAME,
    "page loop": SAME,
    "SDPA": COLOURS[4],
    "torch": COLOURS[5],
    "flash-attn": COLOURS[2],
    "triton": COLOURS[1],
    "triton fp8": COLOURS[3],
    "torch fp8": COLOURS[0],
}
_WIDTHS = {"SDPA": 3.5, "triton": 2.0}  # so that SDPA's line stays visible below an equal one
_LABELS = {"triton": "triton (Quire)", "triton fp8": "triton, fp8 pool", "torch": "gather, then SDPA"}
_MAX_TICKS = 8


def plot_prefill(results: Sequence[KernelResult]) -> Plot:
    """Draw time, and memory if it was measured, over the prompt's length."""
    panels = {"time, µs": "us"}
    if any(result.memory_mib is not None for result in results):
        panels["memory beside the inputs, MiB"] = "memory_mib"

    def draw(figure: AnyFigure) -> None:
        for axes, (title, value) in zip(
            figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True
        ):
            _curves(axes, results, value)
            axes.set_title(title)
            axes.set_xlabel("tokens of the prompt")
        figure.axes[0].legend()

    return Plot("Prefill of one prompt", _words(results), 3.8, draw)


def plot_decode(results: Sequence[KernelResult]) -> Plot:
    """Draw time over the context, a panel per number of rows."""
    batches = sorted({result.num_rows for result in results})

    def draw(figure: AnyFigure) -> None:
        for axes, batch in zip(figure.subplots(1, len(batches), sharey=True, squeeze=False).flat, batches, strict=True):
            _curves(axes, [result for result in results if result.num_rows == batch], "us")
            axes.set_title(f"{batch} row{'s' * (batch != 1)}{', µs' * (batch == batches[0])}")
            axes.set_xlabel("tokens of each row")
        figure.axes[0].legend()

    return Plot("Decode", _words(results), 3.8, draw)


def _curves(axes: Axes, results: Sequence[KernelResult], value: str) -> None:
    """Draw a line per implementation over num_tokens, both axes logarithmic; cells without a value are skipped."""
    for name in dict.fromkeys(result.implementation for result in results):
        points = [(r.num_tokens, r.us if value == "us" else r.memory_mib) for r in results if r.implementation == name]
        points = [point for point in points if point[1]]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=_COLOUR_OF.get(name, SAME), label=_LABELS.get(name, name),
                marker="o", markersize=4, linewidth=_WIDTHS.get(name, 1.5),
            )  # fmt: skip
    log_axis(axes, "y")
    ticks = sorted({result.num_tokens for result in results})
    log_axis(axes, "x")
    shown = ticks[:: -(-len(ticks) // _MAX_TICKS)]
    axes.set_xticks(shown, [f"{tick // 1024}k" if tick % 1024 == 0 else str(tick) for tick in shown])


def _words(results: Sequence[KernelResult]) -> str:
    return "; ".join(
        f"{r.case} {_LABELS.get(r.implementation, r.implementation)}: {r.us:,.1f} µs" for r in results if r.us
    )
