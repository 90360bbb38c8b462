"""The host's time of an engine turn: python -m benchmarks.turns [--against CHECKOUT] [--json FILE]. Never torch.

Runs the engine's own loop at depth 2 over an executor that does nothing: rows of 20 to 83 prompt tokens only decode,
for two clients, in blocks of 16 tokens with the prefix cache. A turn is planning, commit and outputs. Its time is CPU
time of the thread without the executor's, and without the frames for the sockets, which have a column of their own.
Of each number of rows the best round counts: a round is 16 turns, in which every row crosses a page once.
--against measures another checkout as well, in turns with this one, as other work on the machine slows both.
--with-host measures this one with host memory behind the pool, too: every published block is planned to be copied.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from benchmarks.report import BenchError, format_table, host_facts, now, write_report
from engine.core.engine import Engine
from engine.core.engine_parts import EngineParts
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan, StepResult, TokenMasks
from engine.interface.config import SchedulerConfig
from engine.interface.metrics import Metrics
from engine.interface.protocol import AddRequest, ClientGone, FromEngine, SamplingParams, ToEngine, pack_token_ids
from engine.interface.transport import encode_frame

ROWS = (64, 256, 1024, 2048)
BLOCK_SIZE = 16  # tokens
VOCAB_SIZE = 151_936
_LONGEST_PROMPT = 83
_NUM_WARM_UP = 48  # turns
_NUM_CLIENTS = 2
_STOP_TOKENS = [1, 2]  # never sampled here


class IdleExecutor:
    """Samples tokens by chance, at no time of the turn."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.num_rows: int | None = None  # that sample in each step; None: as planned
        self._rng = Random(0)

    def forward(self, plan: StepPlan) -> "_IdleStep":
        """See Executor.forward."""
        return _IdleStep(self, plan)

    def close(self) -> None:
        """See Executor.close."""

    def result(self, plan: StepPlan) -> StepResult:
        """Return a step's tokens."""
        began_s = time.thread_time()
        count = self.num_rows or sum(row.num_samples for row in plan.rows)
        token_ids = [self._rng.randrange(1000, VOCAB_SIZE) for _ in range(count)]
        self.spent_s += time.thread_time() - began_s
        return StepResult(plan.step_id, token_ids)


class _IdleStep:
    def __init__(self, executor: IdleExecutor, plan: StepPlan) -> None:
        self._executor, self._plan = executor, plan

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See StepHandle.sample."""

    def is_done(self) -> bool:
        """See StepHandle.is_done. No work of the host is hidden."""
        return True

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        return self._executor.result(self._plan)


class FrameTransport:
    """Encodes what it is to send, and drops it."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.inbox: list[tuple[int, ToEngine | ClientGone]] = []

    def receive(self, timeout_s: float | None) -> Iterable[tuple[int, ToEngine | ClientGone]]:
        """Return and clear `inbox`."""
        messages, self.inbox = self.inbox, []
        return messages

    def has_arrivals(self) -> bool:
        """Return whether `inbox` has messages."""
        return bool(self.inbox)

    def send(self, client_id: int, message: FromEngine) -> None:
        """Encode the message."""
        began_s = time.thread_time()
        encode_frame(message)
        self.spent_s += time.thread_time() - began_s

    def broadcast(self, message: FromEngine) -> None:
        """Encode the message."""
        self.send(0, message)


def measure(num_rows: int, *, num_rounds: int, has_host: bool = False) -> tuple[float, float]:
    """Return the µs of a turn with num_rows decoding rows, and those of its frames."""
    num_tokens = _LONGEST_PROMPT + 2 * num_rows + 2 * _NUM_WARM_UP + (num_rounds + 1) * BLOCK_SIZE
    config = SchedulerConfig(
        num_pages=num_rows * (num_tokens // BLOCK_SIZE + 2) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_rows,
        max_num_batched_tokens=8192,
        max_model_len=num_tokens,
    )
    if has_host:
        from engine.interface.config import HostTierConfig  # which an older checkout has not

        config = msgspec.structs.replace(config, host_tier=HostTierConfig(num_slots=config.num_pages, max_copies=64))
    scheduler, executor, transport = Scheduler(config), IdleExecutor(), FrameTransport()
    engine = Engine(
        EngineParts(
            executor=executor,
            scheduler=scheduler,
            transport=transport,
            metrics=Metrics(),
            clock=time.monotonic,
            vocab_size=VOCAB_SIZE,
        )
    )
    transport.inbox = [(1 + i % _NUM_CLIENTS, request) for i, request in enumerate(_requests(num_rows, num_tokens))]
    while len(scheduler.running) < num_rows or any(request.first_token_s is None for request in scheduler.running):
        engine.run_once(0)
    executor.num_rows = num_rows
    for _ in range(_NUM_WARM_UP):
        engine.run_once(0)
    rounds = []
    for _ in range(num_rounds):
        executor.spent_s = transport.spent_s = 0.0
        began_s = time.thread_time()
        for _ in range(BLOCK_SIZE):
            engine.run_once(0)
        turns_s = time.thread_time() - began_s - executor.spent_s - transport.spent_s
        rounds.append((turns_s / BLOCK_SIZE * 1e6, transport.spent_s / BLOCK_SIZE * 1e6))
    return min(rounds)


def _requests(count: int, max_tokens: int) -> Iterable[AddRequest]:
    rng, params = Random(1), SamplingParams(max_tokens=max_tokens, stop_token_ids=_STOP_TOKENS)
    for _ in range(count):
        prompt = [rng.randrange(1000, VOCAB_SIZE) for _ in range(rng.randint(20, _LONGEST_PROMPT))]
        request_id = f"chatcmpl-{rng.getrandbits(128):032x}"
        yield AddRequest(request_id, pack_token_ids(prompt), params, time.monotonic())


def measure_in(checkout: Path, num_rows: int, *, num_rounds: int, has_host: bool) -> tuple[float, float]:
    """Do so in a process with another checkout's engine. Raises BenchError."""
    command = [sys.executable, __file__, "--child", str(num_rows), "--rounds", str(num_rounds)]
    command += ["--with-host"] if has_host else []
    env = os.environ | {"PYTHONPATH": str(checkout)}
    child = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, check=False)
    if child.returncode:
        raise BenchError(f"The measurement of {checkout} failed: {child.stderr.strip().rpartition(chr(10))[2]}")
    turn_us, frames_us = json.loads(child.stdout)
    return turn_us, frames_us


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="decoding rows (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="of 16 turns each, per process (default: 40)")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each checkout (default: 3)")
    parser.add_argument("--against", type=Path, help="folder of another checkout, to compare with")
    parser.add_argument("--with-host", action="store_true", help="measure with host memory behind the pool, too")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    """Measure all numbers of rows; print and write them."""
    checkouts = {"here": Path(__file__).resolve().parent.parent}
    if arguments.against is not None:
        checkouts["against"] = arguments.against.resolve()
    if arguments.with_host:
        checkouts["with_host"] = checkouts["here"]
    results: list[dict[str, Any]] = []
    for num_rows in arguments.rows:
        best: dict[str, tuple[float, float]] = {}
        for _ in range(arguments.repeat):
            for name, checkout in checkouts.items():
                has_host = name == "with_host"
                measured = measure_in(checkout, num_rows, num_rounds=arguments.rounds, has_host=has_host)
                best[name] = min(best.get(name, measured), measured)
        results.append(
            {"rows": num_rows}
            | {
                f"{name}_{part}_us": round(us, 1)
                for name in best
                for part, us in zip(("turn", "frames"), best[name], strict=True)
            }
        )
        print(results[-1], file=sys.stderr)
    print(format_table([list(results[0]), *([str(value) for value in row.values()] for row in results)]))
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("rounds", "repeat")}
        write_report(
            arguments.json, {"kind": "turns", "date": now(), "host": host_facts(), **settings, "rows": results}
        )


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    if options.child is not None:
        print(json.dumps(measure(options.child, num_rounds=options.rounds, has_host=options.with_host)))
    else:
        main(options)
