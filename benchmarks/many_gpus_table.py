"""The table of benchmarks.many_gpus: one line for each script, then the figures by kind. Never imports torch."""

from __future__ import annotations

from benchmarks.report import Report, format_table


def format_summary(report: Report) -> str:
    """Return the ends of all scripts and their figures as text."""
    found: dict[str, Report] = report["scripts"]
    ends = [["script", "GPUs", "end", "s"]]
    for name, script in found.items():
        ends.append([name, str(len(script["gpus"])), script["status"], f"{script['seconds']:.0f}"])
    parts = [format_table(ends), _tests(found), _offline(found), _sums(found), _moe(found), _served(found)]
    return "\n\n".join(part for part in parts if part)


def _results(found: dict[str, Report], *parts: str) -> dict[str, Report]:
    """Return the results of these parts' scripts, by their names."""
    return {name: each["result"] for name, each in found.items() if each["part"] in parts and each.get("result")}


def _tests(found: dict[str, Report]) -> str:
    ends = [end for result in _results(found, "tests").values() for end in result.values()]
    failed = [
        test
        for result in _results(found, "tests").values()
        for test, end in result.items()
        if end in ("FAILED", "ERROR")
    ]
    counts = ", ".join(f"{ends.count(end)} {end.lower()}" for end in ("PASSED", "FAILED", "ERROR", "SKIPPED"))
    return "\n".join([f"tests: {counts}", *failed]) if ends else ""


def _offline(found: dict[str, Report]) -> str:
    """Return a line per model: the usual figure of each workload."""
    results = {name: result for name, result in _results(found, "offline", "mixtures", "mixtures-4").items()
               if "workloads" in result}  # fmt: skip
    if not results:
        return ""
    workloads = list(dict.fromkeys(name for result in results.values() for name in result["workloads"]))
    rows = [["offline", *map(_title, workloads), "load, s", "GiB"]]
    for name, result in results.items():
        runs = result["workloads"]
        figures = [_figure(runs[workload]) if workload in runs else "–" for workload in workloads]
        peak = result["peak_vram_gib"]
        rows.append([name, *figures, f"{result['load_s']:.0f}", "–" if peak is None else f"{peak:.0f}"])
    return format_table(rows)


def _title(workload: str) -> str:
    units = {"single": "ms/token", "alone": "ms/token", "prefill16": "tok/s in"}
    return f"{workload}, {units.get(workload, 'tok/s')}"


def _figure(run: Report) -> str:
    if run["num_requests"] == 1:
        return f"{run['ms_per_step']:.2f}"
    is_prefill = run["num_output_tokens"] == run["num_requests"]
    return f"{run['input_tok_per_s' if is_prefill else 'output_tok_per_s']:,.0f}"


def _sums(found: dict[str, Report]) -> str:
    rows = [["sums, us", "hidden", "rows", "NCCL and norm", "one kernel", "NCCL", "one kernel"]]
    for name, result in _results(found, "sums").items():
        for each in result["sums"]:
            times = [each.get(key) for key in ("nccl_norm_us", "fused_us", "nccl_us", "push_us")]
            sizes = [str(each["hidden_size"]), str(each["rows"])]
            rows.append([name, *sizes, *("–" if us is None else f"{us:.1f}" for us in times)])
    return format_table(rows) if len(rows) > 1 else ""


def _moe(found: dict[str, Report]) -> str:
    rows = [["experts of a rank", "ranks", "tokens", "pairs of the busiest", "whole, us", "parts, us"]]
    for name, result in _results(found, "mixtures").items():
        if name != "moe-ranks":
            continue
        for each in result["results"]:
            parts = "–" if each["parts_us"] is None else f"{each['parts_us']:.1f}"
            sizes = [each["shape"], str(each["ranks"]), str(each["tokens"])]
            rows.append([*sizes, f"{each['busiest']:.0%}", f"{each['whole_us']:.1f}", parts])
    return format_table(rows) if len(rows) > 1 else ""


def _served(found: dict[str, Report]) -> str:
    rows = [["served", "at once", "tok/s", "TPOT p50, ms", "TTFT p50, ms", "failed"]]
    notes = []
    for name, result in _results(found, "served", "replicas").items():
        for key in ("before", "after", "one", "all"):
            if key in result:
                rows.append([f"{name} {key}", *_load(result[key])])
        if "loss" in result:
            loss = result["loss"]
            notes.append(
                f"{name}: a rank killed: {result['named']} Not ready after {loss['noticed_s']} s, ready again after"
                f" {loss['ready_s']} s, {loss['num_failed']} streams cut ({loss['errors']}),"
                f" {loss['num_completed']} completed."
            )
    return "\n".join([format_table(rows), *notes]) if len(rows) > 1 else ""


def _load(run: Report) -> list[str]:
    times = [run.get("median_tpot_ms"), run.get("median_ttft_ms")]
    return [
        str(run["load"]["concurrency"]),
        f"{run['output_throughput_tok_per_s']:,.0f}",
        *("–" if ms is None else f"{ms:.2f}" for ms in times),
        str(run["num_failed"]),
    ]
