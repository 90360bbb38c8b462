"""docs/reference/promises.md: what the server promises, and the newest measurement of each. make reference-pages.

A table comes from files of benchmarks/results and names the commands that wrote them (benchmarks/promises.py). A
promise without a measurement of its own has no row.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.promises import PARTS

ROOT = Path(__file__).parent.parent
PATH = ROOT / "docs" / "reference" / "promises.md"
Report = dict[str, Any]
_HEAD = """\
# Promises

What the server promises its clients, and what was measured of it.
`python -m benchmarks.promises` measures all of it, `python -m benchmarks.promises PART` a part; \
`make reference-pages` writes this page from the newest files.
The measurements ran beside other programs on the same cores, so the times are upper bounds.
"""
_KILLS = """\
## A request outlives its engine

When the engine dies, [open requests go on](life-cycle.md#open-requests-go-on) with the tokens of an undisturbed run.
The engine is killed (SIGKILL) when it has served for 5 s, under streams of nine kinds: {kinds}.
With `--standby` it is killed no sooner than the [standby](life-cycle.md#standby) is loaded.
With 200 streams no request is refused for the length of the queue (`--max-queue-wait 0`).
A stream is cut if it ends without its last event; it differs if its text is not that of the undisturbed answer.
A stream's pause is from the kill until its first event by the next engine.
In this time the next engine starts, and computes prompts and answers of all open requests once more.
"""
_KILLS_GPU = """\
### On a GPU

With `--standby`, under streams of which half are greedy and half are sampled with a seed.
A replay computes the tokens that a client has in one step, where the earlier engine computed them one by one.
Sums are rounded in another order then, and where two tokens are about equally likely another one may be chosen.
Without a kill that happens as well, whenever other requests share a step.
The tables have how often, with random weights, which make it frequent: \
their two most likely tokens are apart by {gaps} in log-probability (median), \
and bf16 rounds logits of this size to steps of 0.03.
"""
_TEXTS_GPU = """
Of each stream the tokens are compared with those of an undisturbed run, from the replay on.
A cell has the equal streams, of those that were equal until the replay, and tokens for each difference.
A stream that is replayed alone is also compared with a request without a kill whose prompt has its tokens until then.
Without graphs (`--enforce-eager`) both have the same steps, and must have the same bits.
With graphs a step is padded to the smallest that is captured, of which there are few soon after a takeover.
"""
_DRAIN = """\
## A drain cuts nobody

SIGTERM comes while all streams are open; they have the [drain timeout](life-cycle.md#drain) of {timeout} s to end.
New requests get a 503, and no connection once the workers have ended.
"""
_OVERLOAD = """\
## An overloaded server serves at its capacity

At {load:g} times the capacity, requests are refused whose first token \
[would come later than](../explanation/queues.md) `--max-queue-wait`, {limit:g} s.
Goodput is requests in a second whose first token came within {limit:g} s.
The simulation runs the engine's loop and scheduler with the step times of an H100, equal on every machine.
"""
_FAIRNESS = """\
## A key's flood delays no other key

One key sends 500 requests at once; another one sends a request each second.
Less than twice the time alone is wanted.
On the simulated H100 a request [waits](../explanation/queues.md#figures) for the step in flight and its own; \
measured steps are those of Llama-3.1-8B.
Of 32 steps one is [without answers](../explanation/queues.md#turns), at most.
"""
_FAIRNESS_GPU = """\
### A flood on a GPU

The engine's own loop, with random weights and without HTTP workers, in two floods of {seconds:g} s; \
the other key sends two requests a second ([more runs](../explanation/queues.md#figures)).
"""
_FUZZ = """\
## Hostile input is answered below 500

`make fuzz` draws inputs with Hypothesis from a corpus of attacks: {examples:,} for each property.
"""
_SOAK = """\
## Memory does not grow

A steady mixed load of ten kinds of requests; the slope is \
that of the line of least squares after the warm-up ([endurance](attacks.md#endurance)).
"""
_ATTACKS = """\
## Attacks leave the server as it was

After each [act](attacks.md#acts-of-make-chaos) normal requests get the same text, \
the counters agree with the clients, and no block of the KV cache is held.
"""


def page() -> str:
    """Return what the page should be."""
    killed = {name: _report(f"kills{name}") for name in ("-200-streams", "", "-standby")}
    drained, simulated = _report("drain"), _report("overload")
    overloaded = {"simulated H100": simulated}
    if PARTS["overload-daemon"].has_file():
        overloaded["demo model, CPU"] = _report("overload-daemon")
    kinds = ", ".join(killed[""]["figures"]["streams_of_each_kind"])
    timeout = f"{drained['settings']['drain_timeout_s']:g}"
    limit_s = simulated["limited"]["max_queue_wait_s"]
    return "\n".join(
        [
            _HEAD,
            _KILLS.format(kinds=kinds),
            *kill_rows(list(killed.values())),
            *_sources("kills-200-streams", "kills", "kills-standby"),
            *_kills_on_a_gpu(),
            _DRAIN.format(timeout=timeout),
            *drain_rows(drained),
            *_sources("drain"),
            _OVERLOAD.format(load=simulated["load"], limit=limit_s),
            *overload_rows(overloaded, limit_s),
            *_sources("overload", *["overload-daemon"] * (len(overloaded) - 1)),
            _FAIRNESS,
            *fairness_rows(overloaded),
            "",
            *_fairness_on_a_gpu(),
            _FUZZ.format(examples=_report("fuzz")["max_examples"]),
            *fuzz_rows(_report("fuzz")),
            *_sources("fuzz"),
            _SOAK,
            *soak_rows(_report("soak")),
            *_sources("soak"),
            _ATTACKS,
            *attack_rows(_report("attacks")),
            *_sources("attacks"),
        ]
    )


def kill_rows(reports: Sequence[Report]) -> Iterator[str]:
    """Yield a table with a column for each run of benchmarks.kills."""
    figures = [report["figures"] for report in reports]
    flags = [" ".join(report["server_flags"]) for report in reports]
    yield _row(["", *(f"demo model, CPU{flag and f', `{flag}`'}" for flag in flags)])
    yield _row(["---"] * (1 + len(reports)))
    yield _row(["kills", *(f"{each['kills']}" for each in figures)])
    yield _row(["streams at once", *(f"{report['settings']['streams']}" for report in reports)])
    yield _row(["streams", *(f"{each['streams']:,}" for each in figures)])
    yield _row(["streams that were cut", *(f"**{each['cut']}**" for each in figures)])
    yield _row(["streams with another text", *(f"**{each['different']}**" for each in figures)])
    for field, label in (
        ("without_an_engine_s", "without an engine, p50 / p99, s"),
        ("until_the_first_stream_goes_on_s", "until the first stream goes on, p50 / p99, s"),
        ("pause_of_a_stream_s", "pause of a stream, p50 / p99, s"),
        ("until_a_standby_is_loaded_s", "until the next standby is loaded, p50 / p99, s"),
    ):
        spreads = [each.get(field) for each in figures]
        yield _row([label, *(f"{each['p50']:.2f} / {each['p99']:.2f}" if each else "–" for each in spreads)])
    yield _row(["cores, and processes that wanted one", *map(_load, reports)])


def gpu_kill_rows(reports: Sequence[Report]) -> Iterator[str]:
    """Yield a table with a column for each run of benchmarks.standby_gpu."""
    kills = [report["kills"] for report in reports]
    yield _row(["", *(f"{_model(report)}, {report['gpus'][0].removeprefix('NVIDIA ')}" for report in reports)])
    yield _row(["---"] * (1 + len(reports)))
    yield _row(["kills", *(f"{len(each)}" for each in kills)])
    yield _row(["streams at once", *(f"{report['settings']['streams']}" for report in reports)])
    yield _row(["tokens of each", *(f"{report['settings']['tokens']}" for report in reports)])
    yield _row(["streams", *(f"{report['streams'] + len(report['alone']):,}" for report in reports)])
    cut = [report["cut"] + sum(kind["cut"] for kind in report["alone"].values()) for report in reports]
    yield _row(["streams that were cut", *(f"**{each}**" for each in cut)])
    for field, label in (
        ("ready_s", "without an engine, least / most, s"),
        ("first_stream_s", "until the first stream goes on, least / most, s"),
        ("last_stream_s", "until the last stream goes on, least / most, s"),
        ("standby_loaded_s", "until the next standby is loaded, least / most, s"),
    ):
        seconds = [[kill[field] for kill in each] for each in kills]
        yield _row([label, *(f"{min(each):.2f} / {max(each):.2f}" for each in seconds)])


def gpu_text_rows(reports: Sequence[Report]) -> Iterator[str]:
    """Yield a table of the tokens beside undisturbed ones, with two columns for each run of benchmarks.standby_gpu."""
    columns = [(report, kind) for report in reports for kind in ("greedy", "sampled")]
    yield _row(["", *(f"{_model(report)}, {kind}" for report, kind in columns)])
    yield _row(["---"] * (1 + len(columns)))
    for place, group, label in (
        ("at_once", "undisturbed_again", "at once, undisturbed again"),
        ("at_once", "not_replayed", "beside replays, not replayed"),
        ("at_once", "replayed", "replayed, of those equal until then"),
        ("alone", "undisturbed_again", "alone, undisturbed again"),
        ("alone", "replayed", "alone, replayed"),
        ("alone", "as_a_prompt", "alone, replayed, beside its tokens as a prompt"),
    ):
        yield _row([label, *(_equal(report[place][kind][group]) for report, kind in columns)])
    yield _row(
        [
            "the same: equal log-probabilities",
            *(_share(report["alone"][kind]["as_a_prompt"]["share_of_logprobs_equal"]) for report, kind in columns),
        ]
    )


def drain_rows(report: Report) -> Iterator[str]:
    """Yield the table of benchmarks.drain."""
    figures, settings = report["figures"], report["settings"]
    exits = figures["until_the_server_ended_s"]
    refused = ", ".join(f"{number:,} × {name}" for name, number in figures["new_requests"].items())
    yield _row(["", "demo model, CPU"])
    yield _row(["---"] * 2)
    yield _row(["SIGTERMs, exit codes", f"{figures['rounds']}, {', '.join(sorted(figures['exit_codes']))}"])
    yield _row(["streams at once", f"{settings['streams']}"])
    yield _row(["streams", f"{figures['streams']}"])
    yield _row(["streams that were cut", f"**{figures['cut']}**"])
    yield _row(["streams with another text", f"**{figures['different']}**"])
    yield _row(["until the server has ended, p50 / most, s", f"{exits['p50']:.2f} / {exits['max']:.2f}"])
    yield _row(["new requests meanwhile", refused])
    yield _row(["cores, and processes that wanted one", _load(report)])


def overload_rows(reports: dict[str, Report], limit_s: float) -> Iterator[str]:
    """Yield a table with two columns for each run: with the limit of the wait, and without."""
    runs = [(name, report, report[kind]) for name, report in reports.items() for kind in ("limited", "unlimited")]
    limits = [f"`--max-queue-wait {run['max_queue_wait_s'] or 0:g}`" for _, _, run in runs]
    yield _row(["", *(f"{name}, {limit}" for (name, _, _), limit in zip(runs, limits, strict=True))])
    yield _row(["---"] * (1 + len(runs)))
    yield _row(["capacity, requests a second", *(_capacity(report, run) for _, report, run in runs)])
    yield _row(["load, requests a second", *(f"{run['requests_per_s']:.1f}" for _, _, run in runs)])
    yield _row(
        [
            f"first tokens within {limit_s:g} s, of the capacity",
            *(f"**{_share(r['goodput_ratio'])}**" for _, _, r in runs),
        ]
    )
    yield _row(["refused", *(_share(run["refused_share"]) for _, _, run in runs)])
    yield _row(["of those accepted, late", *(_share(run["late_share"]) for _, _, run in runs)])
    longest = [run["refusal_max_s"] if run["refused_share"] else None for _, _, run in runs]
    yield _row(["longest time to a refusal, s", *("–" if each is None else f"{each:.2f}" for each in longest)])
    if len(reports) > 1:
        loads = [f"{run['load_average']:.0f}" if "load_average" in run else "–" for _, _, run in runs]
        yield _row(["processes that wanted a core", *loads])


def fairness_rows(reports: dict[str, Report]) -> Iterator[str]:
    """Yield a table with a column for each run."""
    runs = {name: report["fairness"] for name, report in reports.items()}
    simulated = reports["simulated H100"]
    runs["simulated H100, measured steps"] = simulated["fairness_measured_steps"]
    runs["simulated CPU"] = simulated["fairness_cpu"]
    fairness = list(runs.values())
    yield _row(["time to the first token", *runs])
    yield _row(["---"] * (1 + len(runs)))
    yield _row(["alone, median, s", *(f"{each['alone_p50_s']:.3f}" for each in fairness)])
    yield _row(["beside 500 requests of another key, median, s", *(f"{each['beside_p50_s']:.3f}" for each in fairness)])
    yield _row(["ratio", *(f"**{each['fairness_ratio']:.2f}**" for each in fairness)])


def gpu_fairness_rows(report: Report) -> Iterator[str]:
    """Yield a table with a column for each flood of benchmarks.flood whose steps were launched late, as served."""
    alone = [run for run in report["runs"] if not run["has_flood"]]
    beside = [run for run in report["runs"] if run["has_flood"] and run["delays_launches"]]
    device = f"{report['model']}, {report['versions']['gpu'].removeprefix('NVIDIA ')}"
    ratios = [there["ttft_p50_s"] / here["ttft_p50_s"] for here, there in zip(alone, beside, strict=True)]
    yield _row(["time to the first token", *(f"{device}, flood {number}" for number in range(1, len(beside) + 1))])
    yield _row(["---"] * (1 + len(beside)))
    yield _row(["alone, median, s", *(f"{run['ttft_p50_s']:.4f}" for run in alone)])
    yield _row(["beside 500 requests of another key, median, s", *(f"{run['ttft_p50_s']:.4f}" for run in beside)])
    yield _row(["ratio", *(f"**{ratio:.2f}**" for ratio in ratios)])
    counts = [f"{here['num_requests']}, {there['num_requests']}" for here, there in zip(alone, beside, strict=True)]
    yield _row(["requests alone, beside", *counts])


def fuzz_rows(report: Report) -> Iterator[str]:
    """Yield a table of the inputs by kind."""
    yield _row(["input", "number"])
    yield _row(["---"] * 2)
    for kind, number in report["inputs"].items():
        yield _row([kind, f"{number:,}"])
    replies = ", ".join(f"{number:,} × {name}" for name, number in report["statuses"].items())
    yield _row(["replies", replies])
    yield _row(["replies with 5xx", f"**{report['num_5xx']}**"])
    yield _row(["tests that failed", f"**{report['failed_tests']}**"])


def soak_rows(report: Report) -> Iterator[str]:
    """Yield a table of the processes that live through the whole run."""
    num_requests = sum(number for kind in report["requests"].values() for number in kind["outcomes"].values())
    yield _row(["", *(process["process"].rsplit(" ", 1)[0] for process in report["processes"])])
    yield _row(["---"] * (1 + len(report["processes"])))
    yield _row(["slope, MiB an hour", *(f"{process['slope_mib_h']:+.1f}" for process in report["processes"])])
    yield _row(["memory at the end, MiB", *(f"{process['last_mib']:.0f}" for process in report["processes"])])
    yield ""
    yield f"{report['hours']:g} hours, {num_requests:,} requests, {len(report['faults'])} faults."


def attack_rows(report: Report) -> Iterator[str]:
    """Yield a table of all acts together."""
    acts = report["acts"]
    outcomes = [(name, number) for act in acts for name, number in act["outcomes"].items()]
    cut = sum(number for name, number in outcomes if name == "cut")
    wrong = sum(number for name, number in outcomes if name.startswith("500"))
    yield _row(["", "demo model, CPU"])
    yield _row(["---"] * 2)
    yield _row(["acts, requests", f"{len(acts)}, {sum(act['num_requests'] for act in acts):,}"])
    yield _row(["streams cut, all by a SIGKILL of their HTTP worker", f"{cut}"])
    yield _row(["replies with 500", f"**{wrong}**"])
    yield _row(["restart after SIGKILL, longest, s", f"{max(act['restart_s'] or 0 for act in acts):.1f}"])


def _kills_on_a_gpu() -> list[str]:
    names = [name for name in PARTS if name.startswith("kills-gpu") and PARTS[name].has_file()]
    if not names:
        return []
    reports = [_report(name) for name in names]
    flat = [each for each in reports if not each["server_flags"]]
    gaps = ", ".join(f"{each['gap_of_two_most_likely_p50']:.2g} ({_model(each)})" for each in flat)
    return [
        _KILLS_GPU.format(gaps=gaps),
        *gpu_kill_rows(reports),
        _TEXTS_GPU,
        *gpu_text_rows(reports),
        *_sources(*names),
    ]


def _fairness_on_a_gpu() -> list[str]:
    if not PARTS["flood-gpu"].has_file():
        return []
    report = _report("flood-gpu")
    return [_FAIRNESS_GPU.format(seconds=report["seconds"]), *gpu_fairness_rows(report), *_sources("flood-gpu")]


def _model(report: Report) -> str:
    flags = "".join(f", `{flag}`" for flag in report["server_flags"])
    return f"{'demo model' if report['shape'] == 'demo' else report['shape']}{flags}"


def _equal(figures: Report) -> str:
    """Return how many streams are equal, of those that were until the replay, and tokens for each that is not."""
    num_kept = figures["streams"] - figures["differed_before"]
    per_difference = figures["tokens_for_a_difference"]
    return (
        f"{figures['equal']} of {num_kept}{f'; {per_difference:,.0f}' if per_difference else ''}" if num_kept else "–"
    )


def _report(name: str) -> Report:
    found: Report = json.loads(PARTS[name].newest().read_bytes())
    return found


def _sources(*names: str) -> list[str]:
    """Return the files and the commands of parts, with empty lines around."""
    paths = [PARTS[name].newest() for name in names]
    links = ", ".join(f"[{path.name}](../../benchmarks/results/{path.name})" for path in paths)
    commands = [PARTS[name].command for name in names]
    return ["", f"Files: {links}" if len(paths) > 1 else f"File: {links}", "", "```", *commands, "```", ""]


def _load(report: Report) -> str:
    return f"{report['machine']['cpus']}, {report['machine']['load_average']:.0f}"


def _capacity(report: Report, run: Report) -> str:
    measured = run.get("capacity_per_s", [report.get("capacity_per_s")])
    return " and ".join(f"{each:.1f}" for each in measured)


def _share(part: float) -> str:
    return f"{part:.0%}".replace("%", " %")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
