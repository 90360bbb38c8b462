"""An engine over FakeExecutor, driven turn by turn, with every invariant checked after every turn, or after some."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.core.engine import Engine
from engine.core.engine_parts import EngineParts
from engine.core.grammars import Grammars, no_compiler
from engine.core.local_client import LocalTransport
from engine.core.scheduler import Scheduler
from engine.core.speculative import Drafter
from engine.core.step import StepPlan
from engine.grammar.compiler import GrammarCompiler
from engine.interface.config import CacheGroup, HostTierConfig, SchedulerConfig, SharingRates
from engine.interface.errors import ModelOutputInvalid
from engine.interface.metrics import Metrics
from engine.interface.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    Alone,
    Begun,
    ClientGone,
    FromEngine,
    GrammarLimit,
    GrammarSpec,
    HandOver,
    QueueCosts,
    QueueState,
    RequestFailed,
    SamplingParams,
    SetAside,
    StepEvents,
    ThinkingBudget,
    TokenLogprobs,
    pack_token_ids,
)
from engine.interface.replays import Journal
from engine.interface.tenant import Charge, Tenant
from tests.support.fake_executor import (
    FakeExecutor,
    FakeProposer,
    expected_embedding,
    expected_tokens,
    fake_prompt_logprob,
)

VOCAB_SIZE = 50
_NO_TENANT = Tenant()


def decode_plan(encoded: bytes) -> StepPlan:
    """Return a plan as the executor noted it."""
    return msgspec.json.decode(encoded, type=StepPlan)


def drafters(num_tokens: int) -> Callable[[SamplingParams], Drafter | None] | None:
    """What an engine makes drafters with that guess up to num_tokens; 0: no speculation."""
    if not num_tokens:
        return None

    def make(params: SamplingParams) -> Drafter | None:
        drafter = Drafter(FakeProposer(), num_tokens=num_tokens, min_tokens=params.min_tokens)
        return None if params.has_penalties else drafter

    return make


class Clock:
    """Moves on by a millisecond whenever it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class CheckedExecutor(FakeExecutor):
    """Sees every plan at the moment it is launched."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(num_pages=scheduler.config.num_pages, block_size=scheduler.config.block_size)
        self.scheduler = scheduler
        self.last_plan: StepPlan | None = None
        self.num_failures = 0

    def forward(self, plan: StepPlan):
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        if self.scheduler.retiring:
            retiring = {request.req_index for request in self.scheduler.retiring}
            assert retiring.isdisjoint(array("i", plan.req_index))
        if any(row.num_drafts for row in plan.singles):
            config = self.scheduler.config
            assert plan.num_samples <= (config.max_num_samples or config.max_num_seqs)
        self.last_plan = plan
        return super().forward(plan)


@dataclass
class Seen:
    """What a client saw of one request."""

    prompt: list[int]
    params: SamplingParams
    client_id: int
    token_ids: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # reasons or error codes; one at most
    num_started: int = 0
    num_cached_tokens: int = 0
    num_logprobs: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_gone: bool = False
    pooling: str | None = None
    embedding: bytes = b""
    lora_index: int = 0
    grammar: GrammarSpec | None = None
    thinking: ThinkingBudget | None = None
    num_replayed: int = 0  # of token_ids, those that another engine made
    journal: Journal | None = None
    is_aborted: bool = False


class Harness:
    """One engine, its clients and what they saw."""

    def __init__(
        self,
        *,
        depth: int = 2,
        num_pages: int = 33,
        block_size: int = 4,
        groups: tuple[CacheGroup, ...] = (),
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_decode_step_tokens: int | None = None,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        max_queued_requests: int = 1000,
        max_queued_tokens: int | None = None,
        max_queue_wait_s: float | None = None,
        executor: type[CheckedExecutor] = CheckedExecutor,
        get_compiler: Callable[[], GrammarCompiler] = no_compiler,
        make_drafter: Callable[[SamplingParams], Drafter | None] | None = None,
        max_num_samples: int | None = None,
        sharing: SharingRates | None = None,
        host_tier: HostTierConfig | None = None,
        pin_share: float = 0.25,
    ) -> None:
        config = SchedulerConfig(
            num_pages=num_pages,
            block_size=block_size,
            groups=groups,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_decode_step_tokens=max_decode_step_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            max_num_samples=max_num_samples,
            sharing=sharing,
            host_tier=host_tier,
            pin_share=pin_share,
        )
        self.clock = Clock()

        def start_engine() -> None:
            self.scheduler = Scheduler(config)
            self.executor = executor(self.scheduler)
            self.transport = LocalTransport()
            self.metrics = Metrics()
            parts = EngineParts(
                executor=self.executor,
                scheduler=self.scheduler,
                transport=self.transport,
                metrics=self.metrics,
                clock=self.clock,
                vocab_size=VOCAB_SIZE,
                overlap_depth=depth,
                max_queued_requests=max_queued_requests,
                grammars=Grammars(get_compiler, vocab_size=VOCAB_SIZE),
                max_queued_tokens=max_queued_tokens,
                max_queue_wait_s=max_queue_wait_s,
                num_loras=2,
                make_drafter=make_drafter,
            )
            self.engine = Engine(parts)
            self.transport.send = self._receive_at_client
            self.transport.broadcast = self._receive_at_all

        self._start_engine = start_engine
        start_engine()
        self.expected_tokens = expected_tokens  # what must come of a prompt
        self.check_every = 1  # turns between two checks of the invariants
        self._num_turns = 0
        self.seen: dict[str, Seen] = {}
        self.costs: QueueCosts | None = None  # the last ones told
        self.messages: list[tuple[int, FromEngine]] = []  # but Begun
        self.begun: list[str] = []
        self.queue_states: list[bool] = []
        self.grammar_limits: list[GrammarLimit] = []

    def _receive_at_all(self, message: FromEngine) -> None:
        if isinstance(message, QueueState):
            self.queue_states.append(message.is_full)
        elif isinstance(message, QueueCosts):
            self.costs = message
        elif isinstance(message, GrammarLimit):
            self.grammar_limits.append(message)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        client_id: int = 1,
        cache_salt: str = "",
        priority: int = 0,
        grammar: GrammarSpec | None = None,
        pooling: str | None = None,
        lora_index: int = 0,
        thinking: ThinkingBudget | None = None,
        open_salt: str = "",
        pin_s: float = 0.0,
        tenant: Tenant = _NO_TENANT,
        charge: Charge | None = None,
        counts_prompt: bool = True,
        deadline_s: float | None = None,
        has_waited: bool = False,
        output: bytes = b"",
        hand_over: HandOver | None = None,
        **params,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        seen = Seen(prompt, sampling, client_id, grammar=grammar, pooling=pooling, lora_index=lora_index)
        seen.thinking = thinking
        seen.token_ids = array("i", output).tolist()
        seen.num_replayed = len(seen.token_ids)
        self.seen[request_id] = seen
        packed = pack_token_ids(prompt)
        message = AddRequest(
            request_id,
            packed,
            sampling,
            self.clock(),
            cache_salt,
            priority,
            grammar,
            pooling,
            lora_index,
            thinking,
            open_salt,
            pin_s,
            tenant,
            charge,
            counts_prompt,
            deadline_s,
            has_waited,
            output=output,
            hand_over=hand_over,
        )
        seen.journal = Journal(message)
        self.transport.inbox.append((client_id, seen.journal.submit()))

    def abort(self, request_id: str, client_id: int = 1) -> None:
        self.seen[request_id].is_aborted = True
        self.transport.inbox.append((client_id, AbortRequest(request_id)))

    def crash(self, *, is_fault: bool = False, max_replays: int = 1000) -> None:
        """Lose the engine; the clients go on with the next one, as SocketEngineClient does."""
        spoils = self.executor.spoils
        self._start_engine()
        self.executor.spoils = spoils
        if self.costs is not None:
            self.transport.inbox.append((1, self.costs))
        submitted: list[tuple[int, AddRequest]] = []
        for seen in self.seen.values():
            assert seen.journal is not None
            if seen.ends or seen.is_gone:  # a client that left before may have come again since
                continue
            if seen.is_aborted:
                seen.ends.append("abort")
                continue
            error = seen.journal.end_engine(is_fault=is_fault, had_progress=True, max_replays=max_replays)
            if error is not None:
                seen.ends.append(error.code)
            else:
                submitted.append((seen.client_id, seen.journal.submit()))
        submitted.sort(key=lambda each: (not each[1].is_isolated, not each[1].is_suspect))
        self.transport.inbox.extend(submitted)

    def leave(self, client_id: int) -> None:
        """Disconnect a client."""
        for seen in self.seen.values():
            seen.is_gone |= seen.client_id == client_id
        self.transport.inbox.append((client_id, ClientGone()))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            nothing_in_flight = self.engine._in_flight is None or self.engine.overlap_depth == 1
            num_failures = self.executor.num_failures
            self.engine.run_once(0)
            self._num_turns += 1
            if self._num_turns % self.check_every == 0:
                self.scheduler.check()
            is_given_up = self.executor.num_failures > num_failures
            is_at_disk = self.scheduler.kv.tiers.num_outside > 0  # no step can bring its blocks
            has_requests = bool(self.scheduler.waiting.requests or self.scheduler.running) and not is_at_disk
            if nothing_in_flight and not is_given_up and has_requests:
                assert self.engine._in_flight is not None, "something could run, but nothing was planned"

    def drain(self) -> None:
        """Turn until idle; then nothing may be held, and each request must have ended once, rightly."""
        for _ in range(5000):
            if self.engine.is_idle and not self.transport.inbox:
                break
            self.turn()
        assert self.engine.is_idle
        self.scheduler.check()
        blocks = self.scheduler.kv.pool
        assert blocks.num_used == 0
        assert blocks.num_free == blocks.num_usable
        assert not self.scheduler.requests
        assert not self.scheduler.kv.tiers.num_waiting
        self.engine.record_state()
        gauges = self.metrics._delta.gauges
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "kv_cache_blocks_used"):
            assert gauges[name, ""] == 0
        for request_id, seen in self.seen.items():
            self._check_seen(request_id, seen)

    def tokens(self) -> dict[str, list[int]]:
        return {request_id: seen.token_ids for request_id, seen in self.seen.items()}

    def _check_seen(self, request_id: str, seen: Seen) -> None:
        if seen.grammar is not None or seen.params.has_filter or seen.thinking is not None:
            assert len(seen.ends) == 1, f"{request_id} ended {seen.ends}"
            assert seen.num_started == (bool(seen.token_ids) and not seen.num_replayed)
            return
        if seen.pooling is not None:
            self._check_embedding(request_id, seen)
            return
        most = self.scheduler.max_num_tokens
        expected = self.expected_tokens(seen.prompt, seen.params, max_num_tokens=most, lora_index=seen.lora_index)
        if seen.is_gone:
            assert len(seen.ends) <= 1
        else:
            assert len(seen.ends) == 1, f"{request_id} ended {seen.ends}"
        spoils = self.executor.spoils
        if seen.ends == [ModelOutputInvalid.code]:
            assert spoils in seen.prompt + expected
        elif seen.token_ids and not seen.is_gone:
            assert spoils not in seen.prompt + seen.token_ids[:-1]
        if seen.ends in (["stop"], ["length"]):
            assert seen.token_ids == expected, f"{request_id} has wrong tokens"
            stopped = expected[-1] in seen.params.stop_token_ids and len(expected) >= seen.params.min_tokens
            assert seen.ends == ["stop" if stopped else "length"]
        else:
            assert seen.token_ids == expected[: len(seen.token_ids)], f"{request_id} has wrong tokens"
        assert seen.num_started == (bool(seen.token_ids) and not seen.num_replayed)
        if seen.params.logprobs is not None:
            assert seen.num_logprobs == len(seen.token_ids) - seen.num_replayed
        scores = []
        if seen.params.prompt_logprobs is not None:
            scores = [fake_prompt_logprob(position, token_id) for position, token_id in enumerate(seen.prompt)][1:]
        assert seen.prompt_logprobs == scores[: len(seen.prompt_logprobs)]

    def _check_embedding(self, request_id: str, seen: Seen) -> None:
        assert len(seen.ends) == 1 or (seen.is_gone and not seen.ends), f"{request_id} ended {seen.ends}"
        is_done = seen.ends == ["stop"]
        assert (seen.ends == [ModelOutputInvalid.code]) <= (self.executor.spoils in seen.prompt)
        assert seen.token_ids == []
        assert seen.num_started == is_done
        vector = np.frombuffer(seen.embedding, dtype=np.float32).tolist()
        if is_done:
            assert vector == expected_embedding(seen.prompt, seen.pooling, lora_index=seen.lora_index)
        else:
            assert vector == []

    def _receive_at_client(self, client_id: int, message: FromEngine) -> None:
        if isinstance(message, Begun):
            for request_id, cache in zip(message.request_ids, message.caches, strict=True):
                self.begun.append(request_id)
                self.seen[request_id].journal.begin(cache)
            return
        if isinstance(message, Alone):
            self.seen[message.request_id].journal.isolate()
            return
        if isinstance(message, SetAside):
            for request_id in message.request_ids:
                assert self.seen[request_id].client_id == client_id
                self.seen[request_id].journal.set_aside()
            return
        self.messages.append((client_id, message))
        if isinstance(message, Accepted):
            self.seen[message.request_id].journal.accept()
        if isinstance(message, RequestFailed):
            seen = self.seen[message.request_id]
            if seen.client_id == client_id:
                seen.ends.append(message.code)
        elif isinstance(message, StepEvents):
            self._receive_events(client_id, message)

    def _receive_events(self, client_id: int, events: StepEvents) -> None:
        assert len(events.request_ids) == len(set(events.request_ids)) == len(events.num_tokens)
        start = 0
        for row, request_id in enumerate(events.request_ids):
            seen = self.seen[request_id]
            assert seen.client_id == client_id
            assert not seen.ends, "something came after the end"
            seen.token_ids += events.token_ids[start : start + events.num_tokens[row]]
            seen.journal.add(events.token_ids[start : start + events.num_tokens[row]])
            seen.journal.add_prompt_logprobs(len(events.prompt_logprobs.get(row, [])))
            seen.num_logprobs += len(events.logprobs.get(row, []))
            seen.prompt_logprobs += events.prompt_logprobs.get(row, [])
            seen.embedding += events.embeddings.get(row, b"")
            if events.num_tokens[row] and seen.params.prompt_logprobs is not None:
                assert len(seen.prompt_logprobs) == len(seen.prompt) - 1, (
                    "a token came before the prompt's log-probabilities"
                )
            start += events.num_tokens[row]
        assert start == len(events.token_ids)
        for started in events.started:
            seen = self.seen[events.request_ids[started.row]]
            seen.num_started += 1
            seen.num_cached_tokens = started.num_cached_tokens
            assert started.queue_s >= 0
            assert started.prefill_s > 0
        for finished in events.finished:
            seen = self.seen[events.request_ids[finished.row]]
            seen.ends.append(finished.reason)
            if seen.grammar is None and seen.pooling is None and not seen.params.has_filter:
                assert (finished.reason == "stop") == (finished.stop_token_id is not None)
