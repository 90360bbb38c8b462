"""Prefix hits with host memory behind the pool: python -m benchmarks.host_policy [--json FILE]. Never torch.

Runs agents' sessions (benchmarks/checkpoint_policy.py), beside requests that come once, on the engine's own scheduler
and caches; the device is a step time, and copies take none but what they may. More blocks leave the pool than may be
copied. Compared is which blocks are copied: all that are published, as a disk needs them; those that leave the pool, as
the engine does without one; and two variants of that. Shown is how many of the prompt tokens are found that a pool
without a limit finds.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.checkpoint_policy import Application, Policy, Session, Simulation, begin_sessions, draw_sessions
from benchmarks.report import format_table, now, write_report
from engine.core.leaving_blocks import LeavingBlocks
from engine.core.request import Request
from engine.interface.config import HostTierConfig

_COPIES_BESIDE = 4  # pages in a step with decode rows
_UNASKED_SHARE = 1 / 15
_ALL_PAGES = 400_000


class RankedByBlock(LeavingBlocks):
    """Drops some blocks of each request, instead of some requests."""

    def rank(self, request: Request, num_hit_tokens: int) -> float:
        """See LeavingBlocks.rank."""
        super().rank(request, num_hit_tokens)
        return 0.0

    def observe_commit(self, now: float) -> None:
        """See LeavingBlocks.observe_commit. While something is left of the credit, all ranks are below it."""
        super().observe_commit(now)
        assert self._pool.ranks is not None
        for block in self._pool.order.first_awaited(64):
            if not self._pool.ranks[block]:
                self._pool.ranks[block] = self._rng.random()

    _rng = Random(7)


class RankedByRequest(LeavingBlocks):
    """Knows nothing of conversations: each request has a rank of its own."""

    def rank(self, request: Request, num_hit_tokens: int) -> float:
        """See LeavingBlocks.rank."""
        return super().rank(request, 0)


@dataclass(frozen=True)
class Row:
    """A row of the table. leaving: None: all published blocks are copied."""

    has_host: bool = True
    leaving: type[LeavingBlocks] | None = LeavingBlocks
    has_limit: bool = True


ROWS = {
    "a pool without a limit": Row(has_host=False, has_limit=False),
    "no host memory": Row(has_host=False),
    "all published blocks": Row(leaving=None),
    "blocks that leave the pool": Row(),
    "… some blocks of each request": Row(leaving=RankedByBlock),
    "… without conversations' ranks": Row(leaving=RankedByRequest),
}


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate one row of the table."""
    row, rng, page_s = ROWS[name], Random(arguments.seed), arguments.page_ms / 1e3
    drawn = draw_sessions(Random(arguments.seed), num_sessions=arguments.sessions, num_turns=arguments.turns)
    sessions = begin_sessions(rng, drawn, gap_s=arguments.gap)
    end_s = sessions[-1][0] + 15 * arguments.turns
    alone = Application([], drops_thinking=False)
    once_s = 0.0
    while arguments.once and once_s < end_s:
        sessions.append((once_s, Session(alone, Random(rng.random()), 1)))
        once_s += rng.expovariate(arguments.once)
    tier = HostTierConfig(
        num_slots=arguments.host_pages,
        max_copies=2 * _COPIES_BESIDE,
        max_copies_beside=_COPIES_BESIDE,
        copies_per_token=0.125 * 40e-6 / page_s,
        unasked_share=_UNASKED_SHARE,
        page_s=page_s,
        copies_leaving=row.leaving is not None,
    )
    num_pages = arguments.pool_pages if row.has_limit else _ALL_PAGES
    began_s = time.perf_counter()
    simulation = Simulation(Policy(0), num_pages=num_pages, rng=rng, host_tier=tier if row.has_host else None)
    tiers = simulation.scheduler.kv.tiers
    if tiers.host is not None and row.leaving is not None:
        kv = simulation.scheduler.kv
        tiers.host.leaving = row.leaving(tier, kv.layout, kv.pool, tiers.host.index)
    simulation.run(sessions)
    print(f"{name}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    return {
        "copied": name,
        "num_prompt_tokens": simulation.num_asked,
        "num_found_tokens": simulation.num_found,
        "num_host_tokens": 0 if tiers.host is None else tiers.host.num_found_tokens,
        "num_stored": 0 if tiers.host is None else tiers.host.num_stored,
        "num_missed": 0 if tiers.host is None else tiers.host.num_missed,
        "num_evictions": sum(simulation.scheduler.kv.pool.num_evictions),
    }


def main() -> None:
    """Simulate all rows; print and write them."""
    arguments = _parser().parse_args()
    rows = [measure(name, arguments) for name in arguments.rows or ROWS]
    most = rows[0]["num_found_tokens"]
    head = ["copied", "found", "of that from the host", "blocks copied", "evicted from the pool"]
    lines = [
        [
            row["copied"],
            f"{row['num_found_tokens'] / most:.1%}",
            f"{row['num_host_tokens'] / most:.1%}",
            f"{row['num_stored']:,}",
            f"{row['num_evictions']:,}",
        ]
        for row in rows
    ]
    print(format_table([head, *lines]))
    if arguments.json:
        names = ("sessions", "turns", "gap", "once", "page_ms", "pool_pages", "host_pages", "seed")
        settings = {name: getattr(arguments, name) for name in names}
        write_report(arguments.json, {"kind": "host-policy", "date": now(), **settings, "rows": rows})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_policy", description=__doc__)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=12, help="of a session (default: 12)")
    parser.add_argument("--gap", type=float, default=6.0, help="mean seconds between starts of sessions (default: 6)")
    parser.add_argument("--once", type=float, default=4.0, help="requests a second that come once (default: 4)")
    parser.add_argument("--page-ms", type=float, default=0.5, help="of a copy: slow, so that few are allowed (0.5)")
    parser.add_argument("--pool-pages", type=int, default=4000, help="of 16 tokens (default: 4000)")
    parser.add_argument("--host-pages", type=int, default=4000)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="not all; the first is what others are shares of")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the results")
    return parser


if __name__ == "__main__":
    main()
