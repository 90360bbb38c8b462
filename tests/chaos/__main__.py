"""make chaos: attacks a server of its own, act by act, and checks after each that it is what it was before.

    python -m tests.chaos [--seed N] [--acts leave overload …] [--scale F] [--json FILE]

Prints a table and ends with 1 if anything was wrong. The same seed gives the same crowds, sizes and order; what the
clocks of two processes decide between them is not repeated. Only loopback, only processes of its own; minutes.
"""

import argparse
import asyncio
import json
import os
import platform
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos import crowds, kills
from tests.chaos.bombs import explode, heavy_bodies
from tests.chaos.client import Answer
from tests.chaos.ledger import account
from tests.chaos.target import FLAGS, HealthWatch, Target
from tests.support.daemon import peak_bytes

Act = Callable[[Target], Awaitable[list[Answer]]]
ACTS: dict[str, Act] = {
    "leave": crowds.leave,
    "overload": crowds.overload,
    "dawdle": crowds.dawdle,
    "say nothing": crowds.say_nothing,
    "bombs": explode,
    "heavy bodies": heavy_bodies,
    "stop engine": kills.stop_engine,
    "stop worker": kills.stop_worker,
    "kill engine": kills.kill_engine,
    "kill worker": kills.kill_worker,
    "kill checkers": kills.kill_checkers,
    "storm": crowds.storm,
    "kill launcher": kills.kill_launcher,
}
_KILLED = {"kill engine": "engine", "kill worker": "worker", "kill launcher": "launcher"}
_MAY_CUT = {"kill worker", "kill launcher"}  # with the process that held the connection
_UNHEALTHY = {"stop engine": {503}, "kill launcher": {0}, "kill worker": {0}}  # what /health may be besides 200


@dataclass
class Row:
    """The result of one act. restart_s: from a kill until the server answered again."""

    act: str
    seed: int
    num_requests: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    longest_health_s: float = 0.0
    restart_s: float | None = None
    seconds: float = 0.0
    memory_mib: dict[str, int] = field(default_factory=dict)  # after it, of the largest process of each role
    peak_mib: dict[str, int] = field(default_factory=dict)  # during it
    account: list[str] = field(default_factory=list)  # the lines of the ledger, as sentences
    slowest: list[tuple[float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Run the acts; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--acts", nargs="+", choices=ACTS, default=list(ACTS), metavar="ACT", help=", ".join(ACTS))
    parser.add_argument("--scale", type=float, default=1.0, help="size of the crowds; below 1 it is a rehearsal")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    print(f"seed {args.seed}: python -m tests.chaos --seed {args.seed} --scale {args.scale:g}", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        target = Target(Path(folder), seed=args.seed, scale=args.scale)
        try:
            for name in args.acts:
                # an act draws the same whether or not others go before it
                target.rng.seed(f"{args.seed} {name}")
                rows.append(perform(name, target, seed=args.seed))
                print(_summary(rows[-1]), flush=True)
        finally:
            left = target.end()
    print("\n" + table(rows))
    if args.json:
        args.json.write_text(json.dumps(_report(rows, args.seed, args.scale), indent=1) + "\n")
    faults = [f"{row.act}: {fault}" for row in rows for fault in row.faults] + left
    print("\n".join(faults) if faults else "nothing wrong", flush=True)
    return 1 if faults else 0


def perform(name: str, target: Target, *, seed: int) -> Row:
    """Run one act against the server, and check it then."""
    row, started_s = Row(name, seed), time.monotonic()
    target.faults, target.slowest, target.restart_s = [], [], None
    before = target.metrics()
    target.reset_peaks()
    answers: list[Answer] = []
    with HealthWatch(target.address) as health:
        try:
            answers = asyncio.run(_awaited(ACTS[name](target)))
        except TimeoutError as error:  # of a wait
            row.faults.append(str(error))
    row.seconds = round(time.monotonic() - started_s, 1)
    normal = target.ask_normally()
    after = target.metrics()
    killed = _KILLED.get(name, "")
    if killed == "launcher":  # another server, which counts from 0; its health is watched by its own start
        before = {}
    lines = account(before, after, [*answers, *normal], killed=killed)
    row.num_requests, row.outcomes = len(answers), dict(Counter(answer.outcome for answer in answers).most_common())
    row.longest_health_s, row.account = round(health.longest_s, 3), [str(line) for line in lines]
    row.restart_s = None if target.restart_s is None else round(target.restart_s, 1)
    row.memory_mib, row.peak_mib = target.memory_mib(), target.memory_mib(peak_bytes)
    row.slowest = sorted(target.slowest)[:-4:-1]
    cut = [answer for answer in answers if answer.end == "cut"]
    if cut and name not in _MAY_CUT:
        row.faults.append(f"{len(cut)} of {len(answers)} answers lost, the first: {cut[0].path} {cut[0].error}")
    if sick := set(health.statuses) - {200} - _UNHEALTHY.get(name, set()):
        row.faults.append(f"/health was {sorted(sick)}")
    row.faults += [*target.faults, *(str(line) for line in lines if not line.is_true), *target.check(after, normal)]
    return row


async def _awaited(act: Awaitable[list[Answer]]) -> list[Answer]:
    return await act


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table. Memory: of the largest process, during the act → after it."""
    titles = ("act", "seed", "requests", "outcome", "longest `/health`", "restart", "worker, MiB", "engine, MiB")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        outcomes = ", ".join(f"{number} × {outcome}" for outcome, number in row.outcomes.items())
        restart = "" if row.restart_s is None else f"{row.restart_s} s"
        verdict = f"; **{len(row.faults)} faults**" if row.faults else ""
        sizes = [f"{row.peak_mib.get(role)} → {row.memory_mib.get(role)}" for role in ("worker", "engine")]
        cells = (
            row.act,
            row.seed,
            row.num_requests,
            outcomes + verdict,
            f"{row.longest_health_s:.2f} s",
            restart,
            *sizes,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _summary(row: Row) -> str:
    end = "ok" if not row.faults else "\n  ".join(["FAULTS", *row.faults])
    return f"{row.act}: {row.num_requests} requests in {row.seconds} s, {row.outcomes}: {end}"


def _report(rows: list[Row], seed: int, scale: float) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "seed": seed,
        "scale": scale,
        "server_flags": FLAGS,
        "acts": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
