"""Decode steps beside copies from and to host memory: python -m benchmarks.kv_copies [--shape NAME] [--json FILE].

[--rows 32] [--rounds 8] [--device cpu]

Random weights, the engine's loop without HTTP. Steps carry 1 ms of copies to the host, from it, or both, launched
before the step's inputs or behind them, and copies to the host by the pace of those that nobody waits for. Runs of ten
steps of each kind take turns, each between two runs without copies: a difference is one to the mean of these two, so
rows that grow change nothing. Bytes are checked before anything is timed.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.kv_tiers import _SHAPES, Conversations
from benchmarks.report import format_table, host_facts, now, write_report
from engine.core.copy_costs import CopyCosts
from engine.core.step import StepPlan
from engine.interface.config import EngineConfig
from engine.startup.host_memory import host_tier_config

_RUN, _SETTLING = 10, 3  # steps of a run, and those at its start that are not counted: launched before, or beside them
_NONE = "none"
KINDS = ("out", "in", "both", "in, before inputs", "both, before inputs", "out, paced")
_COPIES_S = 0.001


class Copies:
    """Adds copies to the steps of an engine, and notes when each step is launched."""

    def __init__(self, chats: Conversations) -> None:
        loaded, engine = chats.offline.loaded, chats.offline.engine
        tiers = engine.scheduler.kv.tiers
        assert tiers.host is not None
        assert loaded.runner.host_pages is not None
        self.page_s = tiers.host.page_s or _COPIES_S
        self.launches: list[tuple[str, float, int]] = []  # kind, seconds of the clock, pages copied
        self.kind = _NONE
        config = host_tier_config(10**6, page_s=self.page_s, tokens_per_s=None)
        assert config is not None
        self.costs = CopyCosts(config)
        pool = engine.scheduler.kv.pool
        self.num_pages = min(max(int(_COPIES_S / self.page_s), 1), pool.num_free // 8)  # rows need the others
        self._pages = [pool.take(0) for _ in range(2 * self.num_pages)]
        self._runner, self._forward = loaded.runner, loaded.runner.forward
        self._host, self._staging = loaded.runner.host_pages, loaded.runner._state.staging
        tiers.plan = lambda *_, **__: None  # type: ignore[method-assign]  # no copies but those of this benchmark
        self.check()
        loaded.runner.forward = self.forward  # type: ignore[method-assign]

    def check(self) -> None:
        """Raise AssertionError if a page does not come back from the host as it went."""
        rows, (first, second) = self._runner._kv_pool.rows, (self._pages[0], self._pages[-1])
        with torch.inference_mode():
            rows[:, first] = 3.0
            rows[:, second] = 0.0
            for plan in (
                StepPlan(0, [], copies_to_host=[(first, 0)]),
                StepPlan(0, [], copies_from_host=[(0, second)]),
            ):
                self._host.begin(plan, self._staging)
                self._host.join()
            assert bool((rows[:, second] == 3.0).all()), "a page came back with other bytes"

    def forward(self, plan: StepPlan) -> Any:
        """Launch a step with the copies of the kind whose turn it is."""
        launched_s, num = time.perf_counter(), self.num_pages
        self.costs.observe_commit(launched_s)
        out = [(page, slot) for slot, page in enumerate(self._pages[:num])]
        back = [(num + place, page) for place, page in enumerate(self._pages[num:])]
        kind, _, how = self.kind.partition(", ")
        if how == "paced":
            out = out[: self.costs.most_unasked(most=num, num_prompt_tokens=0, num_decodes=plan.num_rows)]
            self.costs.spend(len(out))
        out, back = out if kind in ("out", "both") else [], back if kind in ("in", "both") else []
        self.launches.append((self.kind, launched_s, len(out) + len(back)))
        if how == "before inputs":
            with torch.inference_mode():
                self._host.begin(StepPlan(0, [], copies_to_host=out, copies_from_host=back), self._staging)
        else:
            plan.copies_to_host, plan.copies_from_host = out, back
        return self._forward(plan)


def differences(launches: list[tuple[str, float, int]]) -> dict[str, dict[str, float]]:
    """Return for each kind how its steps differ from those without copies around them: ms, share, pages of a step."""
    runs = []
    for first in range(0, len(launches) - _RUN, _RUN):
        run = launches[first : first + _RUN + 1]
        step_s = (run[_RUN][1] - run[_SETTLING][1]) / (_RUN - _SETTLING)
        runs.append((run[0][0], step_s, statistics.mean(num_pages for _, _, num_pages in run[_SETTLING:_RUN])))
    found: dict[str, list[tuple[float, float, float]]] = {}
    for before, own, after in zip(runs, runs[1:], runs[2:], strict=False):
        if own[0] != _NONE and before[0] == after[0] == _NONE:
            plain_s = (before[1] + after[1]) / 2
            found.setdefault(own[0], []).append((own[1] - plain_s, own[1] / plain_s - 1, own[2]))
    result = {}
    for kind, pairs in found.items():
        more_s, shares, pages = zip(*pairs, strict=True)
        quartiles = statistics.quantiles(more_s, n=4) if len(more_s) > 1 else [more_s[0]] * 3
        result[kind] = {
            "pairs": len(pairs),
            "ms_more": statistics.median(more_s) * 1e3,
            "ms_more_lower_quartile": quartiles[0] * 1e3,
            "ms_more_upper_quartile": quartiles[2] * 1e3,
            "share": statistics.median(shares),
            "pages": statistics.mean(pages),
        }
    return result


def measure(config: EngineConfig, *, num_rows: int, num_rounds: int) -> dict[str, Any]:
    """Decode rows for as many steps as the rounds take; return the differences of each kind."""
    turns = [name for kind in KINDS for name in (_NONE, kind)] * num_rounds + [_NONE]
    chats = Conversations(config, 128)
    try:
        copies = Copies(chats)
        engine, transport = chats.offline.engine, chats.offline.transport
        for _ in range(num_rows):
            transport.inbox.append((0, chats._request(chats.tokens(128), len(turns) * _RUN + 80)))
        for _ in range(40):  # prompts, and the first steps
            engine.run_once()
            transport.outbox.clear()
        copies.launches.clear()
        while transport.inbox or not engine.is_idle:
            turn = len(copies.launches) // _RUN
            if turn >= len(turns):
                break
            copies.kind = turns[turn]
            engine.run_once()
            transport.outbox.clear()
        plain = [
            after - at
            for (kind, at, _), (_, after, _) in zip(copies.launches, copies.launches[1:], strict=False)
            if kind == _NONE
        ]
        return {
            "page_us": copies.page_s * 1e6,
            "pages_of_a_full_step": copies.num_pages,
            "ms_without": statistics.median(plain) * 1e3,
            "kinds": differences(copies.launches),
        }
    finally:
        chats.close()


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_copies", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="sizes of the model (llama-3.1-8b)")
    parser.add_argument("--rows", type=int, default=32, help="that decode (32)")
    parser.add_argument("--rounds", type=int, default=8, help="of all kinds (8)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    num_tokens = arguments.rounds * 2 * len(KINDS) * _RUN + 512
    config = EngineConfig(
        model=str(_SHAPES / arguments.shape),
        load_format="dummy",
        device=arguments.device,
        max_model_len=num_tokens,
        max_num_seqs=arguments.rows,
        overlap_depth=2 if arguments.device != "cpu" else 1,
        enable_prefix_caching=True,
        kv_host_memory_bytes=2**30,
    )
    row = measure(config, num_rows=arguments.rows, num_rounds=arguments.rounds)
    table = [["copies", "ms more", "quartiles", "%", "pages a step"]]
    for kind, found in row["kinds"].items():
        quartiles = f"{found['ms_more_lower_quartile']:.3f} to {found['ms_more_upper_quartile']:.3f}"
        table.append([kind, f"{found['ms_more']:.3f}", quartiles, f"{found['share']:.1%}", f"{found['pages']:.1f}"])
    print(f"a step without copies: {row['ms_without']:.3f} ms; a page: {row['page_us']:.1f} µs")
    print(format_table(table))
    if arguments.json:
        report = {
            "benchmark": "kv_copies",
            "date": now(),
            "host": host_facts(),
            "model": arguments.shape,
            "rows": {"copies": row},
        }
        write_report(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
