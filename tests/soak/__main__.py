"""make soak HOURS=…: a steady mixed load on a server of its own, and the slope of each process's memory.

    python -m tests.soak --hours 2 [--rate 4] [--seed N] [--json FILE]

Prints two tables, of the requests and of the processes, and ends with 1 if a process grows faster than --most-mib-h, if
/metrics disagrees with the clients, or if the server is not at the end what it was at the start.
"""

import argparse
import asyncio
import json
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.client import Answer
from tests.chaos.ledger import account
from tests.chaos.target import FLAGS, Target
from tests.soak.growth import Growth, Sampler, faults, warm_up_s
from tests.soak.load import Load

_FLAGS = (*FLAGS, "--pooling", "last")  # so that the demo model embeds, too
_REPORT_S = 60.0
_EXPECTED = {"client that leaves": {"left"}, "wrong request": {"400"}}


@dataclass(frozen=True)
class Kind:
    """What became of the requests of one kind."""

    outcomes: dict[str, int]
    median_s: float
    longest_s: float


def main(arguments: list[str] | None = None) -> int:
    """Run the load; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of all clients together")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--most-mib-h", type=float, default=16.0, help="limit of a process's growth")
    parser.add_argument("--noise-mib", type=float, default=48.0, help="growth after the warm-up that proves nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        target = Target(Path(folder), seed=args.seed, flags=_FLAGS)
        sampler, found = Sampler(), []
        try:
            before = target.metrics()
            load = Load(target.address, seed=args.seed, rate_per_s=args.rate)
            started_s = time.monotonic()
            asyncio.run(_run(target, load, sampler, seconds=args.hours * 3600, every_s=args.every))
            hours = (time.monotonic() - started_s) / 3600
            found = _check(target, before, load.answers)
        finally:
            found += target.end()
    growths = sampler.growths()
    found += faults(growths, most_mib_h=args.most_mib_h, noise_mib=args.noise_mib)
    print(f"\n{hours:.3f} hours, {args.rate:g} requests/s; warm-up {warm_up_s(hours * 3600):.0f} s\n")
    kinds = summary(load.answers)
    print(request_table(kinds) + "\n\n" + process_table(growths) + "\n")
    if args.json:
        args.json.write_text(json.dumps(_report(args, hours, kinds, growths, found), indent=1) + "\n")
    print("\n".join(found) if found else "nothing wrong", flush=True)
    return 1 if found else 0


def summary(answers: Mapping[str, list[Answer]]) -> dict[str, Kind]:
    """Return what became of the requests of each kind."""
    found = {}
    for kind, seen in answers.items():
        times = [answer.seconds for answer in seen] or [0.0]
        outcomes = dict(Counter(answer.outcome for answer in seen).most_common())
        found[kind] = Kind(outcomes, round(statistics.median(times), 3), round(max(times), 3))
    return found


def request_table(kinds: Mapping[str, Kind]) -> str:
    """Return the kinds as a Markdown table."""
    lines = ["| kind | requests | outcome | median | longest |", "|---|---|---|---|---|"]
    for name, kind in kinds.items():
        outcomes = ", ".join(f"{number:,} × {outcome}" for outcome, number in kind.outcomes.items())
        num_requests = sum(kind.outcomes.values())
        lines.append(f"| {name} | {num_requests:,} | {outcomes} | {kind.median_s:.2f} s | {kind.longest_s:.2f} s |")
    return "\n".join(lines)


def process_table(growths: list[Growth]) -> str:
    """Return what became of the processes, as a Markdown table."""
    lines = ["| process | after the warm-up | end | most | slope | open files |", "|---|---|---|---|---|---|"]
    for one in growths:
        lines.append(
            f"| {one.process} | {one.first_mib} MiB | {one.last_mib} MiB | {one.most_mib} MiB "
            f"| {one.slope_mib_h:+.1f} MiB/h | {one.first_files} → {one.last_files} |"
        )
    return "\n".join(lines)


async def _run(target: Target, load: Load, sampler: Sampler, *, seconds: float, every_s: float) -> None:
    running = asyncio.create_task(load.run(seconds))
    report_s = time.monotonic() + _REPORT_S
    while not running.done():
        sampler.sample(target.processes())
        if time.monotonic() > report_s:
            sizes = {series.role: series.samples[-1][1] >> 20 for series in sampler.series.values()}
            print(f"{sum(map(len, load.answers.values()))} requests, MiB: {sizes}", flush=True)
            report_s += _REPORT_S
        await asyncio.wait([running], timeout=every_s)
    running.result()


def _check(target: Target, before: Mapping[str, float], answers: Mapping[str, list[Answer]]) -> list[str]:
    normal = target.ask_normally()
    after = target.metrics()
    seen = [one for each in answers.values() for one in each]
    found = [str(line) for line in account(before, after, [*seen, *normal]) if not line.is_true]
    for kind, each in answers.items():
        wrong = [one for one in each if one.outcome not in _EXPECTED.get(kind, {"200"})]
        if wrong:
            found.append(f"{kind}: {len(wrong)} of {len(each)} ended otherwise: {wrong[0].outcome} {wrong[0].error}")
    restarts = [name for name in ("engine", "worker") if after[f"quire_{name}_restarts_total"]]
    return [*found, *(f"the {name} was restarted" for name in restarts), *target.check(after, normal)]


def _report(
    args: argparse.Namespace,
    hours: float,
    kinds: Mapping[str, Kind],
    growths: list[Growth],
    found: list[str],
) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "hours": round(hours, 4),
        "rate_per_s": args.rate,
        "seed": args.seed,
        "server_flags": _FLAGS,
        "warm_up_s": round(warm_up_s(hours * 3600)),
        "most_mib_h": args.most_mib_h,
        "requests": {name: asdict(kind) for name, kind in kinds.items()},
        "processes": [asdict(growth) for growth in growths],
        "faults": found,
    }


if __name__ == "__main__":
    sys.exit(main())
