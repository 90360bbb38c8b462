"""Prefix hits of agents with recurrent layers: python -m benchmarks.checkpoint_policy [--trace NAME]. Never torch.

Runs an agents' trace on the engine's own scheduler and caches. --trace names one that was recorded
(benchmarks/recorded_trace.py). Without it, one is drawn: sessions of five applications, with turns of tool results and
users, thinking that two of the applications drop from earlier turns, and a second branch from an earlier turn. Tokens
have values, so what a later turn finds is what the real caches would give it; the device is a step time.
Compared are attention layers alone (the bound), recurrent layers with states saved in prompts alone, and in answers as
well, which is what the engine does, at several sizes of the pool; with --variants other policies, too.
"""

import argparse
import heapq
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.recorded_trace import FOLDER, Conversation, draw_conversations, read_rows
from benchmarks.report import format_table, now, write_report
from engine.core.cache_layout import GroupLayout
from engine.core.checkpoints import Checkpoints
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan, StepResult
from engine.interface.config import CacheGroup, HostTierConfig, SchedulerConfig
from engine.interface.protocol import SamplingParams

PAGE_BYTES = 320 << 10  # 16 tokens of the 10 attention layers of a Qwen3.5-35B-A3B, in 16 bits
STATE_PAGES = 197  # of its 30 recurrent layers
CHECKPOINT_STEP = 64  # tokens
MAX_CONTEXT = 24 << 10  # tokens
STEP_S, PROMPT_TOKEN_S = 0.012, 40e-6
BOUND, IN_PROMPTS, BUILT = "attention alone", "states in prompts", "states in prompts and answers"


class LruCheckpoints(Checkpoints):
    """States that are reused in the order of their use alone."""

    def _supersede(self, request: Request, group: GroupLayout) -> None:
        pass


@dataclass(frozen=True)
class Policy:
    """Which states are saved, and what they weigh."""

    state_pages: int = STATE_PAGES  # 0: all layers are attention
    answer_step: int | None = None  # tokens; None: the engine's
    checkpoints: type[Checkpoints] = Checkpoints

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers."""
        states = (CacheGroup("state", CHECKPOINT_STEP, self.state_pages),) if self.state_pages else ()
        return CacheGroup("full", 16), *states


POLICIES = {BOUND: Policy(0), IN_PROMPTS: Policy(answer_step=MAX_CONTEXT), BUILT: Policy()}
VARIANTS = {
    "… in answers every 128 tokens": Policy(answer_step=128),
    "… least recently used alone": Policy(checkpoints=LruCheckpoints),
    "… states of half the bytes": Policy(-(-STATE_PAGES // 2)),
    "… states of a quarter": Policy(-(-STATE_PAGES // 4)),
}


@dataclass(frozen=True)
class Application:
    """The agents of one kind: their system prompt with its tools, and whether a user's turn drops earlier thinking."""

    system: list[int]
    drops_thinking: bool


@dataclass
class Turn:
    """What came (a user's message or a tool's result), and the answer to it."""

    asked: list[int]
    thinking: list[int]
    text: list[int]
    is_user: bool


@dataclass
class Session:
    """One conversation; at a drawn turn it goes back some turns and takes another way."""

    application: Application
    rng: Random
    num_turns: int
    turns: list[Turn] = field(default_factory=list)
    branch_at: int = 0
    num_done: int = 0

    def __post_init__(self) -> None:
        self.branch_at = self.rng.randint(self.num_turns // 3, 2 * self.num_turns // 3)

    def next_request(self) -> tuple[list[int], list[int]] | None:
        """Return the prompt and the answer of the next turn; None: it is over."""
        if self.num_done == self.num_turns:
            return None
        rng = self.rng
        if self.num_done == self.branch_at:
            del self.turns[-rng.randint(2, 5) :]
        is_user = not self.turns or rng.random() < 0.25
        num_asked = rng.randint(1000, 3000) if rng.random() < 0.1 else rng.randint(30, 500)
        turn = Turn(
            _tokens(rng, num_asked), _tokens(rng, rng.randint(80, 500)), _tokens(rng, rng.randint(40, 200)), is_user
        )
        self.turns.append(turn)
        self.num_done += 1
        prompt = self._prompt()
        answer = turn.thinking + turn.text
        return (prompt, answer) if len(prompt) + len(answer) < MAX_CONTEXT else None

    def wait_s(self, rng: Random) -> float:
        """Return the seconds before the next request: a tool's, or those of a user who reads first."""
        is_tool = rng.random() < 0.75
        return rng.uniform(*((0.5, 5.0) if is_tool else (10.0, 60.0)))

    def _prompt(self) -> list[int]:
        prompt = [*self.application.system]
        last_user = max(i for i, turn in enumerate(self.turns) if turn.is_user)
        for i, turn in enumerate(self.turns[:-1]):
            is_dropped = self.application.drops_thinking and i < last_user
            prompt += turn.asked + ([] if is_dropped else turn.thinking) + turn.text
        return prompt + self.turns[-1].asked


def draw_sessions(rng: Random, *, num_sessions: int, num_turns: int) -> list[Session]:
    """Draw sessions of five applications."""
    sizes = (800, 1500, 2500, 4000, 6000)
    applications = [Application(_tokens(rng, size), drops_thinking=bool(i % 2)) for i, size in enumerate(sizes)]
    return [Session(rng.choice(applications), Random(rng.random()), num_turns) for _ in range(num_sessions)]


def begin_sessions(rng: Random, sessions: list[Session], *, gap_s: float) -> list[tuple[float, Session]]:
    """Return the sessions with the seconds at which they begin. gap_s: mean time from one to the next."""
    clock, begun = 0.0, []
    for session in sessions:
        begun.append((clock, session))
        clock += rng.expovariate(1 / gap_s)
    return begun


class Simulation:
    """Sessions at one engine, which computes one step after another."""

    def __init__(self, policy: Policy, *, num_pages: int, rng: Random, host_tier: HostTierConfig | None = None) -> None:
        """rng: draws what a session's waits need."""
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=1 + num_pages,
                block_size=16,
                groups=policy.groups,
                max_num_seqs=64,
                max_num_batched_tokens=8192,
                max_decode_step_tokens=2048,
                max_model_len=MAX_CONTEXT,
                host_tier=host_tier,
            )
        )
        self.num_asked = self.num_found = 0  # prompt tokens
        self.num_steps = 0
        kv = self.scheduler.kv
        kv.checkpoints = policy.checkpoints(kv.layout, kv.pool)
        kv.checkpoints.answer_step = policy.answer_step or kv.checkpoints.answer_step
        self._rng = rng
        self._due: list[
            tuple[float, int, Session | Conversation]
        ] = []  # a session's next turn; the number keeps their order
        self._answers: dict[Request, tuple[list[int], Session | Conversation]] = {}
        self._num_requests = self._num_waits = 0

    def run(self, sessions: Sequence[tuple[float, Session | Conversation]]) -> "Simulation":
        """Serve sessions, which begin at their seconds, to their ends."""
        for begin_s, session in sessions:
            self._wait(begin_s, session)
        clock = 0.0
        while self._due or self.scheduler.has_work:
            if not self.scheduler.has_work:
                clock = max(clock, self._due[0][0])
            while self._due and self._due[0][0] <= clock:
                self._ask(heapq.heappop(self._due)[2], clock)
            plan = self.scheduler.schedule(clock)
            if plan is not None:
                clock += STEP_S + PROMPT_TOKEN_S * plan.num_tokens
                self._commit(plan, clock)
        return self

    def _wait(self, until_s: float, session: Session | Conversation) -> None:
        self._num_waits += 1
        heapq.heappush(self._due, (until_s, self._num_waits, session))

    def _ask(self, session: Session | Conversation, clock: float) -> None:
        asked = session.next_request()
        if asked is None:
            return
        prompt, answer = asked
        params = SamplingParams(max_tokens=len(answer))
        self._num_requests += 1
        request = Request(str(self._num_requests), prompt, params, arrival_s=clock)
        self._answers[request] = (answer, session)
        self.scheduler.add(request)

    def _commit(self, plan: StepPlan, clock: float) -> None:
        requests = {request.req_index: request for request in self.scheduler.running}
        sampling = [requests[row.req_index] for row in plan.rows if row.samples]
        token_ids = [self._answers[request][0][len(request.output_token_ids)] for request in sampling]
        self.num_steps += 1
        for output in self.scheduler.commit(StepResult(plan.step_id, token_ids), clock).rows():
            if output.request.finish_reason is not None:
                _, session = self._answers.pop(output.request)
                self.num_asked += len(output.request.prompt_token_ids)
                self.num_found += output.request.num_cached_tokens
                self._wait(clock + session.wait_s(self._rng), session)


def measure(name: str, pool_gib: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate one row of the table."""
    rng = Random(arguments.seed)
    sessions: Sequence[tuple[float, Session | Conversation]]
    if arguments.trace is not None:
        rows = read_rows(FOLDER / f"{arguments.trace}.json")
        sessions = draw_conversations(rows, num_copies=arguments.copies, seed=arguments.seed)
    else:
        drawn = draw_sessions(Random(arguments.seed), num_sessions=arguments.sessions, num_turns=arguments.turns)
        sessions = begin_sessions(rng, drawn, gap_s=arguments.gap)
    began_s = time.perf_counter()
    num_pages = int(pool_gib * (1 << 30)) // PAGE_BYTES
    simulation = Simulation((POLICIES | VARIANTS)[name], num_pages=num_pages, rng=rng).run(sessions)
    kv = simulation.scheduler.kv
    print(f"{name}, {pool_gib:g} GiB: {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    return {
        "policy": name,
        "pool_gib": pool_gib,
        "num_prompt_tokens": simulation.num_asked,
        "num_found_tokens": simulation.num_found,
        "found_share": simulation.num_found / simulation.num_asked,
        "states": kv.state_events(),
        "reasons": dict(kv.num_by_reason),
        "num_steps": simulation.num_steps,
        "num_preemptions": simulation.scheduler.num_preemptions,
    }


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    head = ["caches", "pool", "prompt tokens found", "saved", "skipped", "restored", "evicted"]
    lines = [
        [row["policy"], f"{row['pool_gib']:g} GiB", f"{row['found_share']:.1%}", *map(str, row["states"].values())]
        for row in rows
    ]
    return format_table([head, *lines])


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_policy", description=__doc__)
    traces = sorted(path.stem for path in FOLDER.glob("*.json"))
    parser.add_argument("--trace", choices=traces, help="a recorded trace, in place of drawn sessions")
    parser.add_argument("--copies", type=int, default=1, help="of the recorded conversations, with other tokens")
    parser.add_argument("--variants", action="store_true", help="compare other policies, too")
    parser.add_argument("--sessions", type=int, default=70)
    parser.add_argument("--turns", type=int, default=20, help="of a session, both branches together (default: 20)")
    parser.add_argument("--gap", type=float, default=8.0, help="mean seconds between starts of sessions (default: 8)")
    parser.add_argument("--pool-gib", type=float, nargs="+", default=[12.5, 50.0], help="default: 12.5 50")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args(arguments)


def settings_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the arguments that say what came."""
    return ("sessions", "turns", "gap", "seed") if arguments.trace is None else ("trace", "copies", "seed")


def main(arguments: argparse.Namespace) -> None:
    """Simulate all rows; print and write them."""
    names = [*POLICIES, *(VARIANTS if arguments.variants else ())]
    rows = [measure(name, pool_gib, arguments) for pool_gib in arguments.pool_gib for name in names]
    print(format_rows(rows))
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in settings_of(arguments)}
        write_report(arguments.json, {"kind": "checkpoint-policy", "date": now(), **settings, "rows": rows})


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(1 << 17) for _ in range(count)]


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
