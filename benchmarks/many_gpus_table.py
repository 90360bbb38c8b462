"""The table of benchmarks.many_gpus: one line for each script, then the figures by kind. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_scripts import DONE, Planned
from benchmarks.report import Report, format_table

_LOADS = ("before", "after", "one", "all", "all routed", "calm", "calm routed")


def format_plan(plan: Sequence[Planned], *, num_gpus: int, limit_s: float) -> str:
    """Return what runs when, on which GPUs and for how long, and if all of it fits into the limit."""
    rows = [["script", "part", "GPUs", "s", "from", "to"]]
    for each in plan:
        script = each.script
        place = [f"{each.start_s:.0f}", f"{each.end_s:.0f}"] if each.gpus else ["left out", ""]
        rows.append([script.name, script.part, ",".join(each.gpus) or "–", f"{script.needed_s:.0f}", *place])
    end_s = max((each.end_s for each in plan), default=0.0)
    left_out = [each.script.name for each in plan if not each.gpus]
    words = f"All end after {end_s:.0f} of {limit_s:.0f} s on {num_gpus} GPUs."
    if left_out:
        words = f"After {end_s:.0f} of {limit_s:.0f} s on {num_gpus} GPUs no time is left for {', '.join(left_out)}."
    return f"{format_table(rows)}\n\n{words}"


def format_summary(report: Report) -> str:
    """Return the ends of all scripts and their figures as text."""
    found: dict[str, Report] = report["scripts"]
    ends = [["script", "GPUs", "end", "s", "expected"]]
    for name, script in found.items():
        expected_s = script.get("expected_s")  # which earlier files have not
        times = [f"{script['seconds']:.0f}", "–" if expected_s is None else f"{expected_s:.0f}"]
        ends.append([name, str(len(script["gpus"])), script["status"], *times])
    parts = [
        format_table(ends),
        _missing(report),
        _tests(found),
        _offline(found),
        _sums(found),
        _moe(found),
        _served(found),
    ]
    return "\n\n".join(part for part in parts if part)


def _results(found: dict[str, Report], *parts: str) -> dict[str, Report]:
    """Return the results of these parts' scripts, by their names."""
    return {name: each["result"] for name, each in found.items() if each["part"] in parts and each.get("result")}


def _missing(report: Report) -> str:
    """Return what has not been measured to its end."""
    missing = [f"{name} ({script['status']})" for name, script in report["scripts"].items() if script["status"] != DONE]
    return f"not measured, or not to the end: {', '.join(missing)}" if missing else ""


def _tests(found: dict[str, Report]) -> str:
    ends = [end for result in _results(found, "tests", "more-tests").values() for end in result.values()]
    failed = [
        test
        for result in _results(found, "tests", "more-tests").values()
        for test, end in result.items()
        if end in ("FAILED", "ERROR")
    ]
    counts = ", ".join(f"{ends.count(end)} {end.lower()}" for end in ("PASSED", "FAILED", "ERROR", "SKIPPED"))
    return "\n".join([f"tests: {counts}", *failed]) if ends else ""


def _offline(found: dict[str, Report]) -> str:
    """Return a line per model: the usual figure of each workload."""
    offline = _results(found, "offline", "mixtures", "mixtures-2", "mixtures-4")  # the last in earlier files
    results = {name: result for name, result in offline.items() if "workloads" in result}
    if not results:
        return ""
    workloads = list(dict.fromkeys(name for result in results.values() for name in result["workloads"]))
    rows = [["offline", *map(_title, workloads), "load, s", "GiB"]]
    for name, result in results.items():
        runs = result["workloads"]
        figures = [_figure(runs[workload]) if workload in runs else "–" for workload in workloads]
        peak = result["peak_vram_gib"]  # None also if it did not come to its end
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
        for key in _LOADS:
            if key in result:
                rows.append([f"{name} {key}", *_load(result[key])])
        if router := result.get("router"):
            servers = ", ".join(map(str, router.get("requests_by_server", ())))
            facts = f"{router['name']} {router['version']}, {router['policy']}"
            notes.append(f"{name}: routed by {facts}; requests by server: {servers or 'not counted'}.")
        if "loss" in result:
            loss = result["loss"]
            notes.append(
                f"{name}: a rank killed: {result.get('named')} Not ready after {loss['noticed_s']} s, ready again after"
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
