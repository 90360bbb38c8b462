"""Reports as `quire bench` saves them, made of chosen figures."""

from typing import Any

import msgspec

from benchmarks.histogram import count

METRICS = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def serve_report(
    *, concurrency: int = 8, slowness: float = 1.0, rate_per_s: float = 0.0, **others: Any
) -> dict[str, Any]:
    """A load of `concurrency` requests; `slowness` scales every latency."""
    values = [slowness * (10 + i % 7) for i in range(100)]
    load = {"model": "m", "concurrency": concurrency, "rate_per_s": rate_per_s, "input_len": 16, "output_len": 8}
    report = {
        "benchmark": "serve",
        "date": "2026-11-22T10:00:00+00:00",
        "load": load,
        "num_completed": 100,
        "num_failed": 0,
    }
    report |= {"request_throughput_per_s": 5 / slowness, "output_throughput_tok_per_s": 40 * concurrency / slowness}
    report |= {f"{statistic}_{metric}": 13.0 * slowness for metric in METRICS for statistic in ("median", "p99")}
    report["histograms"] = {metric: msgspec.to_builtins(count(values)) for metric in METRICS}
    return report | others


def sweep_report(*concurrencies: int, **others: Any) -> dict[str, Any]:
    """Loads of one command."""
    runs = [serve_report(concurrency=concurrency, **others) for concurrency in concurrencies]
    return {"benchmark": "serve", "date": "2026-11-22", "command": "quire bench serve", "sweep": runs}


def offline_report(*, rate: float = 100.0) -> dict[str, Any]:
    """Two workloads."""
    result = {"num_requests": 1, "num_input_tokens": 128, "num_output_tokens": 512, "seconds": 2.0}
    result |= {"input_tok_per_s": 64.0, "output_tok_per_s": rate, "ms_per_step": 1e3 / rate}
    return {
        "benchmark": "offline",
        "date": "2026-11-22",
        "model": "m",
        "workloads": {"single": result, "batch8": result},
    }


def kernels_report(*, us: float = 10.0) -> dict[str, Any]:
    """Prefill and decode in two implementations, one of which has no time for one case."""
    cells = []
    for part, rows, tokens in (("prefill", 1, 128), ("prefill", 1, 256), ("decode", 8, 128), ("decode", 8, 1024)):
        for name in ("triton", "page loop"):
            cell = {"part": part, "case": f"{part} {rows} × {tokens}", "implementation": name, "num_rows": rows}
            cells.append(
                cell | {"num_tokens": tokens, "us": None if (name, tokens) == ("page loop", 1024) else us * tokens}
            )
    return {"benchmark": "kernels", "date": "2026-11-22", "machine": {"gpu": "none"}, "results": cells}
