"""Pictures of reports, PNG or SVG by the file's suffix. Imports matplotlib (extra `bench`), not its global state."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import BenchError, Report

# Okabe and Ito's colours, which colour-blind readers tell apart; each implementation keeps its own in every panel
_COLOURS = {
    "O(N²)": "#999999",
    "page loop": "#999999",
    "SDPA": "#E69F00",
    "torch": "#56B4E9",
    "flash-attn": "#009E73",
    "triton": "#D55E00",
    "triton fp8": "#CC79A7",
    "torch fp8": "#0072B2",
}
_WIDTHS = {"SDPA": 3.5, "triton": 2.0}  # so that SDPA's line shows below an equal one
_LABELS = {"triton": "triton (Quire)", "triton fp8": "triton, fp8 pool", "torch": "gather, then SDPA"}
_NEW, _OLD = "#0072B2", "#999999"
_TITLES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Inter-token latency",
    "e2el_ms": "End-to-end latency",
}


def plot_latency(path: str, report: Report, old: Report | None = None) -> None:
    """A panel per metric: the share of requests (of gaps between chunks, for ITL) that took at most so long."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(_describe(report), fontsize=10)
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, _TITLES.items(), strict=True):
        for source, colour, label in ((old, _OLD, "before"), (report, _NEW, "now")):
            curve = (source or {}).get("curves", {}).get(name)
            if curve:
                axes.plot(curve, source["curve_percents"], color=colour, label=label)
                p99 = source[f"p99_{name}"]
                axes.plot([p99], [99], "o", color=colour, markersize=4)
                if source is report:
                    median = source[f"median_{name}"]
                    axes.set_title(f"{title}: median {median:,.1f} ms, p99 {p99:,.1f} ms", fontsize=10)
        axes.set(xlabel="ms", ylabel="percent of chunks" if name == "itl_ms" else "percent of requests", ylim=(0, 101))
        axes.set_xlim(left=0)
        _tidy(axes)
        if old is not None and axes.lines:
            axes.legend(frameon=False)
    _save(figure, path)


def plot_kernels(path: str, report: Report) -> None:
    """Prefill's time and memory over the length, and decode's time over the context for each number of rows."""
    prefill = [result for result in report["results"] if result["part"] == "prefill"]
    decode = [result for result in report["results"] if result["part"] == "decode"]
    batches = sorted({result["num_rows"] for result in decode})
    figure = Figure(figsize=(11, 4.2 * (bool(prefill) + bool(decode))), layout="constrained")
    machine, heads = report["machine"], report["heads"]
    device = machine["gpu"] if heads["device"] == "cuda" else "CPU"
    figure.suptitle(
        f"Attention on {device}, {heads['num_heads']} query and {heads['num_kv_heads']} KV heads of "
        f"{heads['head_dim']}, {heads['dtype']}, torch {machine['torch']}, {machine['date'][:10]}",
        fontsize=10,
    )
    rows = iter(figure.subfigures(bool(prefill) + bool(decode), 1, squeeze=False).flat)
    if prefill:
        values = {"Prefill of one prompt: time": ("us", "µs")}
        if any(result["memory_mib"] is not None for result in prefill):
            values["Prefill: memory beside the inputs"] = ("memory_mib", "MiB")
        panels = next(rows).subplots(1, len(values), squeeze=False).flat
        for axes, (title, (name, unit)) in zip(panels, values.items(), strict=True):
            _curves(axes, prefill, name, title, unit)
            axes.set_xlabel("tokens")
        panels[0].legend(frameon=False, fontsize=8)
    if decode:
        panels = next(rows).subplots(1, len(batches), sharey=True, squeeze=False).flat
        for axes, batch in zip(panels, batches, strict=True):
            of_batch = [result for result in decode if result["num_rows"] == batch]
            title = f"Decode, {batch} row{'s' * (batch != 1)}"
            _curves(axes, of_batch, "us", title, "µs" if batch == batches[0] else "")
            axes.set_xlabel("tokens of each row")
        panels[0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _curves(axes: Axes, results: Sequence[dict], value: str, title: str, unit: str) -> None:
    """A line per implementation over num_tokens, both axes logarithmic; what has no value is not drawn."""
    for name in dict.fromkeys(result["implementation"] for result in results):
        points = [(r["num_tokens"], r[value]) for r in results if r["implementation"] == name and r[value]]
        if points:
            style = {"marker": "o", "markersize": 4, "linewidth": _WIDTHS.get(name, 1.5)}
            axes.plot(*zip(*points, strict=True), color=_COLOURS.get(name), label=_LABELS.get(name, name), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({result["num_tokens"] for result in results})
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick % 1024 == 0 else str(tick) for tick in ticks], fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    _tidy(axes)


def _describe(report: Report) -> str:
    load = report["load"]
    rate = load["rate_per_s"]
    how = f"{rate:g} requests a second (Poisson)" if rate > 0 else f"{load['concurrency']} requests at a time"
    return (
        f"{load['model']}: {how}, {load['input_len']} in, {load['output_len']} out; {report['num_completed']} "
        f"completed, {report['output_throughput_tok_per_s']:,.0f} tok/s; {report['date'][:10]}"
    )


def _tidy(axes: Axes) -> None:
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: str) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchError(f"--plot {path} cannot be written: {error.strerror}.") from error
