"""The host's time of a load that evicts all the time: python -m benchmarks.evictions [--json FILE]. Never torch.

Runs the engine's own loop at depth 2 over an executor that does nothing, with a clock of its own, which steps move on
as those of Qwen3 0.6B on an H100. Clients send one prompt after another, none of which comes again, so that each
block leaves the pool unasked for. Compared are no host memory, host memory to which all published blocks are copied,
as a disk behind it needs them, and host memory for blocks that leave the pool alone. Of each: CPU time of the thread
for each request, without the executor's and the frames for the sockets; the best of several rounds counts.
"""

import argparse
import sys
import time
from random import Random
from typing import Any

import msgspec

from benchmarks.report import format_table, host_facts, now, write_report
from benchmarks.turns import BLOCK_SIZE, VOCAB_SIZE, FrameTransport, IdleExecutor
from engine.core.engine import Engine
from engine.core.engine_parts import EngineParts
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.interface.config import HostTierConfig, SchedulerConfig
from engine.interface.metrics import Metrics
from engine.interface.protocol import AddRequest, SamplingParams, pack_token_ids

STEP_S, PROMPT_TOKEN_S = 0.0014, 5e-6
PAGE_S = 68e-6  # 1.75 MiB at 27 GB/s
HOST = HostTierConfig(
    num_slots=4681,  # 8 GiB
    max_copies=29,
    max_copies_beside=14,
    copies_per_token=0.125 * PROMPT_TOKEN_S / PAGE_S,
    unasked_share=0.03 / 0.45,
    page_s=PAGE_S,
    token_s=PROMPT_TOKEN_S,
)
TIERS = {"off": None, "all published blocks": HOST, "blocks that leave the pool": HOST}


class SteppedClock:
    """Seconds that steps move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class SteppedExecutor(IdleExecutor):
    """Takes a step's time on a clock."""

    def __init__(self, clock: SteppedClock) -> None:
        super().__init__()
        self._clock = clock
        self.num_with_copies = self.num_to_host = 0

    def forward(self, plan: StepPlan) -> Any:
        """See Executor.forward."""
        began_s = time.thread_time()
        num_prompt_tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        self._clock.now_s += STEP_S + PROMPT_TOKEN_S * num_prompt_tokens
        self.num_with_copies += bool(plan.copies_to_host)
        self.num_to_host += len(plan.copies_to_host)
        self.spent_s += time.thread_time() - began_s
        return super().forward(plan)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve rounds of requests; return the figures of the best round."""
    tier = TIERS[name]
    if tier is not None and name == "blocks that leave the pool":
        tier = msgspec.structs.replace(tier, copies_leaving=True)
    num_clients = arguments.concurrency
    num_tokens = arguments.input_len + arguments.output_len
    config = SchedulerConfig(
        num_pages=2 * num_clients * -(-num_tokens // BLOCK_SIZE) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_clients,
        max_num_batched_tokens=8192,
        max_model_len=num_tokens + 1,
        host_tier=tier,
    )
    clock, transport, rng = SteppedClock(), FrameTransport(), Random(1)
    scheduler, executor = Scheduler(config), SteppedExecutor(clock)
    parts = EngineParts(
        executor=executor,
        scheduler=scheduler,
        transport=transport,
        metrics=Metrics(),
        clock=clock,
        vocab_size=VOCAB_SIZE,
    )
    engine = Engine(parts)
    params = SamplingParams(max_tokens=arguments.output_len)
    num_sent = 0
    rounds = []
    for number in range(arguments.rounds + 2):
        executor.spent_s = transport.spent_s = 0.0
        executor.num_with_copies = executor.num_to_host = 0
        num_turns, spent_s, began_s = 0, 0.0, clock.now_s
        end = num_sent + arguments.requests
        while num_sent < end or (number == arguments.rounds + 1 and not engine.is_idle):
            while len(scheduler.requests) + len(transport.inbox) < num_clients and num_sent < end:
                prompt = pack_token_ids([rng.randrange(1000, VOCAB_SIZE) for _ in range(arguments.input_len)])
                transport.inbox.append((0, AddRequest(f"chatcmpl-{num_sent:032x}", prompt, params, clock())))
                num_sent += 1
            turn_s = time.thread_time()
            engine.run_once(0)
            spent_s += time.thread_time() - turn_s
            num_turns += 1
        us = (spent_s - executor.spent_s - transport.spent_s) / arguments.requests * 1e6
        rounds.append((us, num_turns, executor.num_with_copies, executor.num_to_host, clock.now_s - began_s))
    us, num_turns, num_with_copies, num_to_host, seconds = min(rounds[1:-1])
    return {
        "host_memory": name,
        "us_per_request": us,
        "us_per_turn": us * arguments.requests / num_turns,
        "num_turns": num_turns,
        "num_turns_with_copies": num_with_copies,
        "num_pages_to_host": num_to_host,
        "simulated_s": seconds,
        "num_blocks": arguments.requests * (num_tokens // BLOCK_SIZE),
    }


def main() -> None:
    """Measure all in turns; print and write them."""
    arguments = _parser().parse_args()
    best: dict[str, dict[str, Any]] = {}
    for _ in range(arguments.repeat):
        for name in arguments.tiers or TIERS:
            row = measure(name, arguments)
            best[name] = min(best.get(name, row), row, key=lambda found: found["us_per_request"])
            print(row, file=sys.stderr)
    head = ["host memory", "µs a request", "µs a turn", "turns", "with copies", "pages copied", "of blocks"]
    rows = [
        [
            name,
            f"{row['us_per_request']:,.0f}",
            f"{row['us_per_turn']:,.0f}",
            *(f"{row[key]:,}" for key in ("num_turns", "num_turns_with_copies", "num_pages_to_host", "num_blocks")),
        ]
        for name, row in best.items()
    ]
    print(format_table([head, *rows]))
    if arguments.json:
        names = ("concurrency", "requests", "rounds", "repeat", "input_len", "output_len")
        settings = {name: getattr(arguments, name) for name in names}
        report = {"kind": "evictions", "date": now(), "host": host_facts(), **settings, "rows": [*best.values()]}
        write_report(arguments.json, report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evictions", description=__doc__)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="of a round (default: 256)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2, help="engines of each kind, in turns (default: 2)")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--tiers", nargs="+", choices=list(TIERS), help="not all")
    parser.add_argument("--json", help="file for the results")
    return parser


if __name__ == "__main__":
    main()
