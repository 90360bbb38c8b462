"""Random traces of adds, aborts, disconnects and turns: whatever happens, every client gets exactly its own tokens.

With speculation or without, which must make no difference to the tokens.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.interface.config import SharingRates
from engine.interface.tenant import Tenant
from tests.support.engine_harness import VOCAB_SIZE, Harness, drafters

_TENANTS = [Tenant(), Tenant(), Tenant(name="a"), Tenant(name="b", weight=4.0), Tenant(name="c", kv_share=0.5)]
_PREFIXES = [[], [7] * 4, [7] * 8, [7] * 8 + [9, 8, 7, 6], list(range(16))]


class EngineTraces(RuleBasedStateMachine):
    """One engine of drawn proportions; the same trace is replayed on a twin and at the other depth at the end."""

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_pages=st.integers(4, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(3, 24),
        mixed_budget=st.none() | st.integers(1, 24),
        max_model_len=st.integers(8, 48),
        caching=st.booleans(),
        num_drafts=st.sampled_from([0, 0, 1, 3, 9]),
        max_num_samples=st.sampled_from([None, 8, 24]),
        spoils=st.sampled_from([None, None, 13]),
        sharing=st.sampled_from([None, SharingRates(chunk_tokens=4), SharingRates(chunk_tokens=8, row_keys=1)]),
    )
    def start(
        self,
        depth,
        num_pages,
        max_num_seqs,
        budget,
        mixed_budget,
        max_model_len,
        caching,
        num_drafts,
        max_num_samples,
        spoils,
        sharing,
    ):
        self.proportions = {
            "num_pages": num_pages,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "max_decode_step_tokens": mixed_budget,
            "max_model_len": max_model_len,
            "enable_prefix_caching": caching,
            "max_queued_requests": 12,
            "max_num_samples": max_num_samples,
            "sharing": sharing,
        }
        self.depth, self.spoils = depth, spoils
        self.num_drafts = num_drafts
        self.harness = self.make_harness(depth, num_drafts)
        self.trace = []

    def do(self, name, *args, **kwargs):
        self.trace.append((name, args, kwargs))
        getattr(self.harness, name)(*args, **kwargs)

    @rule(
        prefix=st.sampled_from(_PREFIXES),
        suffix=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        salt=st.sampled_from(["", "", "tenant"]),
        lora_index=st.sampled_from([0, 0, 1, 2]),
        priority=st.integers(0, 2),
        client_id=st.integers(1, 3),
        logprobs=st.sampled_from([None, 1]),
        prompt_logprobs=st.sampled_from([None, None, 0, 1]),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        pooling=st.sampled_from([None, None, "last", "mean"]),
        tenant=st.sampled_from(_TENANTS),
    )
    def add(self, prefix, suffix, max_tokens, salt, lora_index, priority, client_id, **params):
        request_id = f"r{len(self.harness.seen)}"
        sampling = {
            "cache_salt": salt,
            "lora_index": lora_index,
            "priority": priority,
            "client_id": client_id,
            **params,
        }
        self.do("add", request_id, prefix + suffix, max_tokens, **sampling)

    @precondition(lambda self: self.harness.seen)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(list(self.harness.seen)))
        self.do("abort", request_id, self.harness.seen[request_id].client_id)

    @rule(client_id=st.integers(1, 3))
    def leave(self, client_id):
        self.do("leave", client_id)

    @rule(times=st.integers(1, 6))
    def turn(self, times):
        self.do("turn", times)

    def teardown(self):
        if not hasattr(self, "trace"):
            return
        self.do("drain")
        twin = self.replay(self.depth, self.num_drafts)
        assert twin.executor.plans == self.harness.executor.plans
        assert twin.messages == self.harness.messages
        # each drain() compares all tokens with the oracle: equal at both depths, with drafts and without
        self.replay(3 - self.depth, self.num_drafts)
        self.replay(self.depth, 0 if self.num_drafts else 4)

    def make_harness(self, depth, num_drafts):
        harness = Harness(depth=depth, make_drafter=drafters(num_drafts), **self.proportions)
        harness.executor.spoils = self.spoils  # what follows this token is not finite
        return harness

    def replay(self, depth, num_drafts):
        harness = self.make_harness(depth, num_drafts)
        for name, args, kwargs in self.trace:
            getattr(harness, name)(*args, **kwargs)
        return harness


class ReplayTraces(EngineTraces):
    """The same with engines that end, by a kill or a fault: open requests go on with the next one."""

    @rule(is_fault=st.booleans())
    def crash(self, is_fault):
        self.do("crash", is_fault=is_fault)

    @rule(times=st.integers(1, 12))
    def turn_on(self, times):
        self.do("turn", times)


TestEngineTraces, TestReplayTraces = EngineTraces.TestCase, ReplayTraces.TestCase
TestEngineTraces.settings = TestReplayTraces.settings = settings(
    max_examples=settings.default.max_examples * 6 // 5,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
