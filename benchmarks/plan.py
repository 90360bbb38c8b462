"""`quire bench plan`: predicts a fleet's figures under a load, from one machine's step times. Never imports torch.

--against takes the load of a `quire bench serve --json` and shows measured figures beside predicted ones.
"""

import argparse
import dataclasses
import statistics
import sys

import msgspec

from benchmarks import latency
from benchmarks.fleet import Fleet, Load
from benchmarks.report import BenchError, Report, check_outputs, format_table, now, write_report
from benchmarks.saved import read_sources
from benchmarks.step_times import StepTimes, read_step_times
from engine.interface.errors import RequestError

_MOST_REPLICAS = 256


def run(arguments: argparse.Namespace) -> int:
    """Run `quire bench plan`; return its exit code: 1 if no number of replicas meets the limits. Raises BenchError."""
    check_outputs(json_path=arguments.json, plot_path=None, html_path=None)
    times = _with_limits(read_step_times(arguments.steps), arguments)
    measured = _read_measured(arguments.against) if arguments.against else None
    load = _load_of(arguments) if measured is None else _load_of_report(measured)
    if arguments.replicas:
        report = plan(times, load, arguments, num_replicas=arguments.replicas)
    elif arguments.goodput and load.rate_per_s:
        report = fewest_replicas(times, load, arguments)
    else:
        raise BenchError("--replicas auto needs --rate, and the limits to meet: --goodput.", exit_code=2)
    print(format_plan(report, measured))
    if arguments.json:
        write_report(arguments.json, report)
    return int(not arguments.replicas and report["good_share"] < arguments.share)


def fewest_replicas(times: StepTimes, load: Load, arguments: argparse.Namespace) -> Report:
    """Plan the smallest fleet that meets the limits for enough requests, or the first that more do not help."""
    too_few, report = 0, plan(times, load, arguments, num_replicas=1)
    while report["good_share"] < arguments.share:
        too_few, share = report["num_replicas"], report["good_share"]
        if too_few >= _MOST_REPLICAS:
            return report
        report = plan(times, load, arguments, num_replicas=2 * too_few)
        if report["good_share"] == share and report["rows_mean"] < 1.5:
            return report
    while report["num_replicas"] - too_few > 1:
        middle = plan(times, load, arguments, num_replicas=(report["num_replicas"] + too_few) // 2)
        if middle["good_share"] >= arguments.share:
            report = middle
        else:
            too_few = middle["num_replicas"]
    return report


def plan(times: StepTimes, load: Load, arguments: argparse.Namespace, *, num_replicas: int) -> Report:
    """Simulate once; return its figures under the names of `quire bench serve`. Raises BenchError."""
    print(f"{load.num_requests} requests, replicas: {num_replicas} …", file=sys.stderr)
    overhead_s = arguments.overhead_ms / 1e3
    fleet = Fleet(times, load, num_replicas=num_replicas, policy=arguments.policy, overhead_s=overhead_s)
    try:
        report = make_report(times, load, fleet.run())
    except RequestError as error:
        raise BenchError(f"A request of this load would be refused: {error.message}", exit_code=2) from error
    if arguments.goodput:
        num_good = latency.num_good(fleet.timings, arguments.goodput)
        report["goodput_limits_ms"] = dict(arguments.goodput)
        report["good_share"] = num_good / len(fleet.timings)
        report["request_goodput_per_s"] = num_good / fleet.duration_s
    if arguments.price is not None:
        usd_per_s = arguments.price * num_replicas / 3600
        report["usd_per_hour_and_replica"] = arguments.price
        report["usd_per_million_output_tokens"] = 1e6 * usd_per_s / report["output_throughput_tok_per_s"]
    return report


def make_report(times: StepTimes, load: Load, fleet: Fleet) -> Report:
    """Return all figures of a simulated run."""
    duration_s, replicas = fleet.duration_s, fleet.replicas
    num_tokens = sum(timing.num_tokens for timing in fleet.timings)
    queue_ms = sorted(1e3 * waited_s for waited_s in fleet.queue_s)
    report: Report = {
        "benchmark": "plan",
        "date": now(),
        "model": times.model,
        "device": times.device,
        "load": dataclasses.asdict(load),
        "num_replicas": len(replicas),
        "num_completed": len(fleet.timings),
        "duration_s": duration_s,
        "num_input_tokens": sum(timing.num_input_tokens for timing in fleet.timings),
        "num_cached_tokens": sum(timing.num_cached_tokens for timing in fleet.timings),
        "num_output_tokens": num_tokens,
        "request_throughput_per_s": len(fleet.timings) / duration_s,
        "output_throughput_tok_per_s": num_tokens / duration_s,
        "median_queue_ms": latency.percentile(queue_ms, 50),
        "p99_queue_ms": latency.percentile(queue_ms, 99),
        "busy_share": statistics.fmean(replica.busy_s for replica in replicas) / duration_s,
        "rows_mean": num_tokens / sum(replica.num_steps for replica in replicas),
        "max_kv_usage": max(replica.most_pages for replica in replicas) / (times.scheduler.num_pages - 1),
        "num_preemptions": sum(replica.scheduler.num_preemptions for replica in replicas),
    }
    for name, ordered in latency.samples(fleet.timings).items():
        report |= latency.summarise(name, ordered)
    return report


def format_plan(report: Report, measured: Report | None) -> str:
    """Return a headline and the figures; with a measured report also its figures and the differences."""
    lines = [
        f"{report['model']} on {report['num_replicas']} × {report['device']}: device busy {report['busy_share']:.0%}, "
        f"{report['rows_mean']:.1f} tokens a step, KV cache at most {report['max_kv_usage']:.0%}, "
        f"{report['num_preemptions']} preemptions"
    ]
    if "good_share" in report:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in report["goodput_limits_ms"].items())
        lines.append(f"{report['good_share']:.1%} of the requests meet {limits}")
    if "usd_per_million_output_tokens" in report:
        lines.append(f"{report['usd_per_million_output_tokens']:.3f} per million output tokens at this load")
    names = ["output_throughput_tok_per_s", "request_throughput_per_s", "median_queue_ms", "p99_queue_ms"]
    names += [f"{statistic}_{name}" for name in latency.METRICS for statistic in ("median", "p99")]
    rows = [["", "predicted"] if measured is None else ["", "predicted", "measured", "apart"]]
    for name in names:
        if name not in report:
            continue
        row = [name, f"{report[name]:,.2f}"]
        if measured is not None:
            value = measured.get(name)
            row += ["-", "-"] if not value else [f"{value:,.2f}", f"{report[name] / value - 1:+.0%}"]
        rows.append(row)
    return "\n".join([*lines, format_table(rows)])


def _with_limits(times: StepTimes, arguments: argparse.Namespace) -> StepTimes:
    """Return the step times, with the scheduler limits of the given flags."""
    given = {
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "max_decode_step_tokens": arguments.max_decode_step_tokens,
        "num_pages": arguments.kv_tokens and arguments.kv_tokens // times.scheduler.block_size + 1,
    }
    scheduler = msgspec.structs.replace(times.scheduler, **{name: value for name, value in given.items() if value})
    return msgspec.structs.replace(times, scheduler=scheduler)


def _load_of(arguments: argparse.Namespace) -> Load:
    return Load(
        num_requests=arguments.num_requests,
        rate_per_s=arguments.rate,
        concurrency=arguments.concurrency,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        shared_prefix=arguments.shared_prefix,
        seed=arguments.seed,
    )


def _read_measured(path: str) -> Report:
    """Read the report of one load. Raises BenchError."""
    (source,) = read_sources([path])
    if source.kind != "serve":
        raise BenchError(f"--against {path} is of quire bench {source.kind}, not serve.", exit_code=2)
    runs = source.report.get("sweep", [source.report])
    if len(runs) > 1:
        loads = ", ".join(run.name for run in source.runs)
        raise BenchError(f"--against {path} has {len(runs)} loads ({loads}): it takes a report of one.", exit_code=2)
    for place, names in (("load", ("num_requests", "seed")), ("report", ("num_input_tokens", "num_output_tokens"))):
        for name in names:
            if name not in (runs[0]["load"] if place == "load" else runs[0]):
                raise BenchError(f"--against {path} has no {name!r} in its {place}.", exit_code=2)
    return runs[0]


def _load_of_report(measured: Report) -> Load:
    """Return the measured load; prompts have the average length that the server counted. Raises BenchError."""
    sent, num_completed = measured["load"], measured["num_completed"]
    if not num_completed:
        raise BenchError("--against has a report without a finished request.", exit_code=2)
    input_len = round(measured["num_input_tokens"] / num_completed) or sent["input_len"]
    output_len = round(measured["num_output_tokens"] / num_completed)
    return Load(
        num_requests=sent["num_requests"],
        rate_per_s=sent["rate_per_s"],
        concurrency=sent["concurrency"],
        input_len=(input_len, input_len),
        output_len=(output_len, output_len),
        seed=sent["seed"],
    )
