"""Names of figures for tables and plots. Pure text."""

_WORDS = {
    "output_throughput_tok_per_s": "output, tok/s",
    "request_throughput_per_s": "requests/s",
    "request_goodput_per_s": "goodput, requests/s",
    "num_failed": "failed",
    "peak_vram_gib": "peak VRAM, GiB",
    "load_s": "load, s",
    "output_tok_per_s": "out, tok/s",
    "input_tok_per_s": "in, tok/s",
    "ms_per_step": "ms/step",
    "us": "µs",
}
_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}


def figure_title(name: str) -> str:
    """Return a figure's name in words: c8 median_ttft_ms is c8 TTFT p50, ms."""
    *before, last = name.split(" ")
    statistic, _, metric = last.partition("_")
    if statistic in _STATISTICS and metric.endswith("_ms"):
        last = f"{metric.removesuffix('_ms').upper()} {_STATISTICS[statistic]}, ms"
    return " ".join([*before, _WORDS.get(last, last)])
