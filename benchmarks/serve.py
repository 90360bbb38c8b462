"""`quire bench serve`: loads any OpenAI-compatible server from several processes and reports the usual figures.

A load has random prompts of one length, or the requests of a workload (--workload).
run() is the command; measure() and format_report() are its parts, for scripts that start the server themselves.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks import latency
from benchmarks.client_processes import run_clients
from benchmarks.gpu_memory import GpuMemoryWatch
from benchmarks.histogram import count
from benchmarks.load import LoadConfig, with_workload
from benchmarks.load_client import LoadResult, RequestTiming
from benchmarks.report import (
    BenchError,
    Report,
    check_outputs,
    command_line,
    format_table,
    host_facts,
    now,
    write_report,
)
from benchmarks.report_cli import read_old, show
from benchmarks.server_facts import LOCAL_HOSTS, server_facts
from benchmarks.target import find_target, settle_prompts
from benchmarks.workloads import AGENT, NAMES, WITH_PREFIX_CACHE

_EXIT_INTERRUPTED = 130
_MIN_REQUESTS, _REQUESTS_PER_CLIENT = 64, 4
_SEEDS_APART = 100_003  # more than the processes and warm-ups use
_INPUT_LEN, _OUTPUT_LEN = 512, 128
_WARM_UP_TOKENS = 8  # that the warm-up of the workload `shared` asks for, as offline
_MAX_CLIENT_CPU = 0.8  # share of a core above which the client may be the limit


def run(arguments: argparse.Namespace) -> int:
    """Run `quire bench serve` and return its exit code. Raises BenchError."""
    check_outputs(json_path=arguments.json, plot_path=arguments.plot, html_path=arguments.html)
    _check_workload(arguments)
    old = read_old(arguments.compare, "serve") if arguments.compare else None
    target = find_target(
        arguments.url, endpoint=arguments.endpoint, model=arguments.model, api_key=arguments.api_key or ""
    )
    config = msgspec.structs.replace(
        target,
        rate_per_s=arguments.rate,
        input_len=arguments.input_len or _INPUT_LEN,
        output_len=arguments.output_len or _OUTPUT_LEN,
        ignores_eos=not arguments.no_ignore_eos,
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
    )
    if arguments.workload:
        config = with_workload(config, arguments.workload)
    config = settle_prompts(config, arguments.prompt_format)
    concurrencies = arguments.concurrency or [config.concurrency]
    about = {"command": command_line(sys.argv[1:]), "server": server_facts(config)}
    runs: list[Report] = []
    report: Report = {}
    for concurrency in concurrencies:
        runs.append(about | _measure_step(config, concurrency, concurrencies, arguments))
        print(format_report(runs[-1]), flush=True)
        report = runs[0] if len(concurrencies) == 1 else make_sweep(runs)
        if arguments.json:
            write_report(arguments.json, report)
        if runs[-1]["is_interrupted"]:
            break
    if len(runs) > 1:
        print(f"\n{format_sweep(runs)}")
    show(report, old, arguments)
    return _EXIT_INTERRUPTED if runs[-1]["is_interrupted"] else int(any(run["num_failed"] for run in runs))


def _check_workload(arguments: argparse.Namespace) -> None:
    """Raise BenchError for an unknown workload, or for flags that it decides itself."""
    name = arguments.workload
    if not name:
        return
    if name not in NAMES:
        raise BenchError(f"There is no workload {name!r}: choose from {', '.join(NAMES)}.", exit_code=2)
    decided = ["num_requests", "input_len", "output_len"]
    if name == AGENT:
        decided += ["concurrency", "rate"]
    if name in WITH_PREFIX_CACHE:
        decided += ["num_warmups"]
    given = [f"--{flag.replace('_', '-')}" for flag in decided if getattr(arguments, flag)]
    if given:
        raise BenchError(f"The workload {name} decides that itself: leave {', '.join(given)} out.", exit_code=2)


def _measure_step(
    config: LoadConfig, concurrency: int, concurrencies: Sequence[int], arguments: argparse.Namespace
) -> Report:
    """Measure one load of a sweep. Each has its own prompts, because the prefix cache holds earlier ones."""
    is_sweep = len(concurrencies) > 1
    config = msgspec.structs.replace(
        config, concurrency=concurrency, seed=config.seed + _SEEDS_APART * concurrency * is_sweep
    )
    if not config.workload:
        num_requests = arguments.num_requests or max(_MIN_REQUESTS, _REQUESTS_PER_CLIENT * concurrency)
        config = msgspec.structs.replace(config, num_requests=num_requests)
    num_processes = arguments.processes or max(1, min(4, (os.cpu_count() or 1) // 2))
    print(_describe_load(config, num_processes), file=sys.stderr)
    if is_sweep:
        print(f"{'' if concurrency == concurrencies[0] else chr(10)}{concurrency} at once:")
    if arguments.num_warmups:
        warm_up = msgspec.structs.replace(config, num_requests=arguments.num_warmups, seed=config.seed + 10_000)
        run_clients(warm_up, num_processes)
    elif config.workload in WITH_PREFIX_CACHE and config.workload != AGENT:
        run_clients(msgspec.structs.replace(config, output_len=_WARM_UP_TOKENS), num_processes)
    return measure(config, num_processes=num_processes, goodput=arguments.goodput)


def measure(config: LoadConfig, *, num_processes: int, goodput: Mapping[str, float] | None = None) -> Report:
    """Send the load, sampling GPU memory if the server is on this host. Blocks; Ctrl-C ends it early with a result."""
    with GpuMemoryWatch() as watch:
        results, is_interrupted = run_clients(config, num_processes)
    report = make_report(config, results, goodput=goodput or {})
    report["is_interrupted"] = is_interrupted
    report["peak_vram_gib"] = watch.peak_gib if config.host in LOCAL_HOSTS else None
    report["warnings"] = _warnings(report)
    return report


def make_report(config: LoadConfig, results: Sequence[LoadResult], *, goodput: Mapping[str, float]) -> Report:
    """Return all figures of the finished requests, as one JSON object."""
    timings = [timing for result in results for timing in result.timings]
    good = [timing for timing in timings if timing.end_s > 0]
    failed = [timing for timing in timings if timing.error_kind]
    duration_s = _duration_s(results, good)
    num_tokens = sum(timing.num_tokens for timing in good)
    num_input_tokens = sum(timing.num_input_tokens for timing in good)
    samples = latency.samples(good)
    report: Report = {
        "benchmark": "serve",
        "date": now(),
        "host": host_facts(),
        "load": msgspec.to_builtins(msgspec.structs.replace(config, api_key="")),
        "num_client_processes": len(results),
        "num_completed": len(good),
        "num_failed": len(failed),
        "num_unfinished": len(timings) - len(good) - len(failed),
        "errors": _count_errors(failed),
        "duration_s": duration_s,
        "num_input_tokens": num_input_tokens,
        "num_cached_tokens": sum(timing.num_cached_tokens for timing in good),
        "num_output_tokens": num_tokens,
        "num_asked_tokens": sum(timing.num_asked for timing in good),
        "tokens_per_chunk": num_tokens / max(sum(timing.num_chunks for timing in good), 1),
        "are_tokens_counted_by_server": all(timing.has_usage for timing in good),
        "request_throughput_per_s": len(good) / duration_s,
        "output_throughput_tok_per_s": num_tokens / duration_s,
        "total_throughput_tok_per_s": (num_input_tokens + num_tokens) / duration_s,
        "client_cpu_share_max": max(result.cpu_s / result.wall_s for result in results),
    }
    if goodput:
        report["goodput_limits_ms"] = dict(goodput)
        report["request_goodput_per_s"] = latency.num_good(good, goodput) / duration_s
    for name, ordered in samples.items():
        report |= latency.summarise(name, ordered)
    report["histograms"] = {name: msgspec.to_builtins(count(ordered)) for name, ordered in samples.items() if ordered}
    return report


def make_sweep(runs: Sequence[Report]) -> Report:
    """Return a command's loads as one JSON object; common settings come first."""
    shared = ("benchmark", "date", "host", "command", "server")
    return {name: runs[0][name] for name in shared} | {
        "is_interrupted": runs[-1]["is_interrupted"],
        "sweep": [{name: value for name, value in run.items() if name not in shared[2:]} for run in runs],
    }


def format_report(report: Report) -> str:
    """Format the throughput, a table of latencies, and at the foot what bears on their reliability."""
    rows = [["", "mean", "median", "p99"]]
    for name in latency.METRICS:
        if f"mean_{name}" in report:
            values = [report[f"{statistic}_{name}"] for statistic in ("mean", "median", "p99")]
            rows.append([name.replace("_ms", "").upper() + ", ms", *(f"{value:,.2f}" for value in values)])
    notes = [*_circumstances(report), *_warnings(report)]
    return "\n".join([*_headline(report), *([format_table(rows)] if len(rows) > 1 else []), *notes])


def format_sweep(runs: Sequence[Report]) -> str:
    """Format a row per load."""
    columns = [(statistic, name) for name in latency.METRICS for statistic in ("median", "p99")]
    titles = [f"{name.removesuffix('_ms').upper()} {'p50' if kind == 'median' else kind}" for kind, name in columns]
    rows = [["at once", "tok/s", *titles]]
    for run in runs:
        values = [run.get(f"{kind}_{name}") for kind, name in columns]
        cells = ["–" if value is None else f"{value:,.1f}" for value in values]
        rows.append([str(run["load"]["concurrency"]), f"{run['output_throughput_tok_per_s']:,.0f}", *cells])
    return f"{format_table(rows)}\nlatencies in ms"


def _describe_load(config: LoadConfig, num_processes: int) -> str:
    """Describe the load in a sentence, printed before it begins."""
    how = f"at {config.rate_per_s:g} a second (Poisson)" if config.rate_per_s > 0 else f"{config.concurrency} at a time"
    if config.workload == AGENT:
        how = "a turn of each conversation at a time"
    unit = "tokens" if config.prompt_format == "ids" else "words"
    most = "at most " if config.workload else ""
    scheme = "https" if config.is_tls else "http"
    name = f"{config.workload}: " if config.workload else ""
    return (
        f"{name}{config.num_requests} requests, {how}, {most}{config.input_len} {unit} in, {most}{config.output_len} "
        f"tokens out, model {config.model}, {scheme}://{config.host}:{config.port}{config.path}, client processes: "
        f"{num_processes}"
    )


def _headline(report: Report) -> list[str]:
    lines = [
        f"output {report['output_throughput_tok_per_s']:,.0f} tok/s, input and output "
        f"{report['total_throughput_tok_per_s']:,.0f} tok/s, {report['request_throughput_per_s']:.2f} requests/s",
        f"{report['num_completed']} completed, {report['num_failed']} failed in {report['duration_s']:.2f} s",
    ]
    if "request_goodput_per_s" in report:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in report["goodput_limits_ms"].items())
        share = report["request_goodput_per_s"] / max(report["request_throughput_per_s"], 1e-9)
        lines.append(
            f"goodput {report['request_goodput_per_s']:.2f} requests/s, {share:.0%} of the completed ({limits})"
        )
    if report["load"]["workload"] in WITH_PREFIX_CACHE:
        lines.append(f"{_cached_share(report):.1%} of the prompts' tokens came from the prefix cache")
    return lines


def _circumstances(report: Report) -> list[str]:
    peak = report["peak_vram_gib"]
    vram = "not available" if peak is None else f"{peak:.1f} GiB (all GPUs of this host, whoever uses them)"
    return [f"peak VRAM {vram}; busiest client process {report['client_cpu_share_max']:.0%} of a core"]


def _warnings(report: Report) -> list[str]:
    lines = [f"{count} × {kind}: {example}" for kind, (count, example) in report["errors"].items()]
    num_sent = report["num_completed"] + report["num_failed"] + report["num_unfinished"]
    if report["is_interrupted"]:
        lines.append(f"Interrupted: {report['num_unfinished']} requests were not finished and are not counted.")
    elif report["load"]["workload"] == AGENT and num_sent < report["load"]["num_requests"]:
        num_unsent = report["load"]["num_requests"] - num_sent
        lines.append(f"{num_unsent} requests were not sent, because a turn before them failed.")
    if report["client_cpu_share_max"] > _MAX_CLIENT_CPU:
        lines.append("The client may be the limit: give it more --processes, or another machine.")
    if report["num_completed"] == 0:
        return lines
    if not report["are_tokens_counted_by_server"]:
        lines.append("The server reports no usage: chunks are counted as tokens.")
    elif report["tokens_per_chunk"] > 1.1:
        lines.append(
            f"A chunk holds {report['tokens_per_chunk']:.1f} tokens on average: ITL is the time between chunks."
        )
    expected = report["num_asked_tokens"]
    if report["num_output_tokens"] < 0.99 * expected:
        lines.append(f"Answers ended early: {report['num_output_tokens']:,} tokens of the {expected:,} asked for.")
    if report["load"]["workload"] not in WITH_PREFIX_CACHE and (share := _cached_share(report)) > 0.01:
        lines.append(f"{share:.0%} of the input came out of the server's prefix cache: another --seed asks anew.")
    return lines


def _cached_share(report: Report) -> float:
    return report["num_cached_tokens"] / max(report["num_input_tokens"], 1)


def _duration_s(results: Sequence[LoadResult], good: Sequence[RequestTiming]) -> float:
    """Return the time from the first request to the last end; perf_counter is one clock for all processes of a host."""
    if not good:
        return max(result.wall_s for result in results)
    return max(timing.end_s for timing in good) - min(timing.start_s for timing in good)


def _count_errors(failed: Sequence[RequestTiming]) -> dict[str, tuple[int, str]]:
    """Return for each kind its count and the first message."""
    first = {timing.error_kind: timing.error for timing in reversed(failed)}
    return {kind: (count, first[kind]) for kind, count in Counter(t.error_kind for t in failed).most_common()}
