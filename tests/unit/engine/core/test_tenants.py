"""Limits of tenants at their edges, what refusals say, shares of rows and pages, and the ledger."""

from collections import Counter

import pytest

from engine.core.request import Request
from engine.core.tenants import MinuteWindow
from engine.interface.protocol import Accepted, ClientGone, GrammarUse, RequestFailed, SamplingParams, TenantUse
from engine.interface.tenant import Charge, Rates, Tenant
from tests.support.engine_harness import Harness
from tests.support.stepping import make_scheduler, step


def test_a_window_forgets_after_a_minute() -> None:
    window = MinuteWindow(10)
    window.add(4, 100.0)
    window.add(6, 130.1)
    assert window.used(130.2) == 10
    assert window.wait_s(1, 130.2) == pytest.approx(100.25 + 60 - 130.2)
    assert window.wait_s(5, 130.2) == pytest.approx(130.25 + 60 - 130.2)
    assert window.wait_s(11, 130.2) == float("inf")
    assert window.used(160.24) == 10
    assert window.used(160.25) == 6
    assert window.wait_s(4, 160.25) == 0
    assert (window.rate(160.25).remaining, window.rate(160.25).reset_s) == (4, pytest.approx(30))
    assert window.used(1000) == 0
    assert window.rate(1000).reset_s == 0


def test_a_window_adds_up_what_comes_within_a_quarter_of_a_second() -> None:
    window = MinuteWindow(10)
    for _ in range(1000):
        window.add(0.01, 5.1)
    assert len(window._slots) == 1
    window.add(1, 5.0)  # tokens are charged at their time, which may be a little earlier
    assert window.used(5.2) == pytest.approx(11)
    assert window.rate(5.2).remaining == 0


class Limited(Harness):
    """An engine, and one tenant's requests."""

    def __init__(self, tenant: Tenant, **sizes) -> None:
        super().__init__(num_pages=200, **sizes)
        self.tenant = tenant

    def ask(self, request_id: str, num_prompt: int = 4, max_tokens: int = 2, **fields) -> None:
        charge = Charge(num_prompt, num_prompt + max_tokens)
        self.add(request_id, [7] * num_prompt, max_tokens, tenant=self.tenant, charge=charge, **fields)
        self.turn()

    def handle(self, message: TenantUse | ClientGone) -> None:
        """Take a message of the worker with the second connection."""
        self.transport.inbox.append((2, message))
        self.turn()

    def failure(self, request_id: str) -> RequestFailed | None:
        return next((m for _, m in self.messages if isinstance(m, RequestFailed) and m.request_id == request_id), None)

    def rates(self) -> list[Rates]:
        return [message.rates for _, message in self.messages if isinstance(message, Accepted)]

    def tokens_of(self, key: str) -> dict[str, float]:
        counted = self.metrics._delta.counters.items()
        counts = ((labels, n) for (name, *labels), n in counted if name == "key_tokens_total")
        return {kind: n for (name, kind), n in counts if name == key and n}


def test_requests_per_minute_hold_and_a_refusal_says_when_there_is_room() -> None:
    harness = Limited(Tenant(name="team", requests_per_minute=2))
    for request_id in ("a", "b", "c"):
        harness.ask(request_id)
    failure = harness.failure("c")
    assert failure is not None
    assert failure.code == "rate_limit_exceeded"
    assert failure.message == "The API key team has reached requests_per_minute, 2."
    assert 59 <= failure.retry_after_s <= 61
    assert [rates.requests.remaining for rates in harness.rates()] == [1, 0]
    assert failure.rates.requests.limit == 2
    assert failure.rates.requests.remaining == 0
    assert failure.rates.tokens is None
    harness.clock.now += failure.retry_after_s
    harness.ask("d")
    assert harness.failure("d") is None
    harness.drain()


def test_tokens_per_minute_count_prompts_at_once_and_answers_as_they_come() -> None:
    harness = Limited(Tenant(name="team", tokens_per_minute=20))
    harness.ask("a", 10, 6)
    harness.drain()
    num_used = 10 + len(harness.seen["a"].token_ids)
    harness.ask("b", 20 - num_used, 1)  # the rest, exactly
    assert harness.failure("b") is None
    harness.ask("c", 1, 1)
    assert "has used" in harness.failure("c").message
    assert "tokens_per_minute, 20" in harness.failure("c").message
    harness.ask("d", 21, 1)
    assert harness.failure("d").code == "invalid_parameter"  # it never fits
    harness.drain()


def test_tokens_at_once_count_what_is_open() -> None:
    harness = Limited(Tenant(name="team", tokens_at_once=20))
    harness.ask("a", 8, 2)
    harness.ask("b", 8, 2)
    harness.ask("c", 1, 1)
    assert harness.failure("b") is None
    assert harness.failure("c").message == (
        "The API key team has 20 tokens in its open requests, and 2 more, of prompt and max_tokens, would be over "
        "tokens_at_once, 20."
    )
    harness.ask("d", 19, 2)
    assert harness.failure("d").code == "invalid_parameter"
    harness.abort("a")
    harness.turn()
    harness.ask("e", 8, 2)
    assert harness.failure("e") is None
    harness.drain()


def test_other_tenants_and_what_is_charged_already_are_not_limited() -> None:
    harness = Limited(Tenant(name="team", requests_per_minute=1))
    harness.ask("a")
    harness.add("choice", [1], tenant=harness.tenant, counts_prompt=False)  # of the same HTTP request
    harness.add("unnamed", [1], charge=Charge(1, 9))
    harness.add("other", [1], tenant=Tenant(name="other", requests_per_minute=1), charge=Charge(1, 9))
    harness.drain()
    assert all(harness.failure(request_id) is None for request_id in harness.seen)


def test_limits_of_a_new_key_file_hold_from_its_first_request_on() -> None:
    harness = Limited(Tenant(name="team", requests_per_minute=1))
    harness.ask("a")
    harness.tenant = Tenant(name="team", requests_per_minute=2)
    harness.ask("b")
    harness.ask("c")
    assert harness.failure("b") is None
    assert harness.failure("c") is not None
    harness.drain()


def test_grammar_seconds_are_told_to_all_workers() -> None:
    harness = Harness()
    tenant = Tenant(name="team", grammar_seconds=2.0)
    harness.transport.inbox.append((1, GrammarUse(tenant, 1.5)))
    harness.turn()
    assert not harness.grammar_limits
    harness.transport.inbox.append((2, GrammarUse(tenant, 0.5)))
    harness.turn()
    (limit,) = harness.grammar_limits
    assert (limit.name, limit.limit_s) == ("team", 2.0)
    assert 59 < limit.until_s - harness.clock.now < 61
    assert harness.metrics._delta.counters["key_grammar_seconds_total", "team"] == 2.0


def test_the_ledger_is_the_sum_of_all_usage() -> None:
    harness = Limited(Tenant(name="team"), max_num_seqs=2)
    usage: Counter[str] = Counter()
    for index in range(6):
        harness.ask(f"r{index}", 6 + 4 * (index % 2), 5, seed=index)
        harness.add(f"s{index}", [7] * 6, 5, tenant=harness.tenant, counts_prompt=False, seed=index + 50)
    harness.add("other", [3, 4, 5], 3, charge=Charge(3, 6))
    harness.drain()
    harness.engine.record_state()
    for request_id, seen in harness.seen.items():
        if request_id != "other":
            usage["generated"] += len(seen.token_ids)
        if request_id.startswith("r"):
            usage["cached"] += seen.num_cached_tokens
            usage["computed"] += len(seen.prompt) - seen.num_cached_tokens
    assert harness.tokens_of("team") == {kind: n for kind, n in usage.items() if n}
    assert usage["cached"] > 0
    assert harness.tokens_of("unnamed") == {"computed": 3, "generated": 3}
    counters = harness.metrics._delta.counters
    assert counters["key_requests_total", "team", "accepted"] == 6
    assert counters["key_device_seconds_total", "team"] > counters["key_device_seconds_total", "unnamed"] > 0


def test_generated_tokens_are_counted_while_a_request_runs_and_once() -> None:
    harness = Limited(Tenant(name="team"))
    harness.ask("a", 4, 12)
    harness.turn(6)
    harness.engine.record_state()
    before = harness.tokens_of("team")["generated"]
    assert 0 < before < 12
    harness.drain()
    assert harness.tokens_of("team")["generated"] == 12


def test_refused_requests_are_counted() -> None:
    harness = Limited(Tenant(name="team", requests_per_minute=1))
    harness.ask("a")
    harness.ask("b")
    assert harness.metrics._delta.counters["key_requests_total", "team", "refused"] == 1
    harness.drain()


def tenant_request(scheduler, tenant: str, number: int, *, num_prompt: int = 4, kv_share: float = 1.0) -> Request:
    request = Request(f"{tenant}{number}", [number] * num_prompt, SamplingParams(max_tokens=12))
    request.tenant_id, request.kv_share = tenant, kv_share
    scheduler.add(request)
    return request


def test_a_row_is_kept_for_tenants_without_one() -> None:
    scheduler = make_scheduler(max_num_seqs=16, max_num_batched_tokens=256, num_pages=300)
    for number in range(30):
        tenant_request(scheduler, "flood", number)
    tenant_request(scheduler, "early", 0)
    step(scheduler)  # the first of each tenant
    step(scheduler)
    assert Counter(request.tenant_id for request in scheduler.running) == {"flood": 14, "early": 1}
    guest = tenant_request(scheduler, "guest", 0)
    step(scheduler)
    assert guest in scheduler.running


def test_a_share_of_the_pool_holds_whatever_is_generated() -> None:
    scheduler = make_scheduler(num_pages=33, max_num_batched_tokens=64)  # 32 pages of 4 tokens
    for number in range(4):
        tenant_request(scheduler, "a", number, kv_share=0.25)  # 4 pages each, of 8
    other = tenant_request(scheduler, "b", 0)
    most = 0
    while scheduler.requests:
        step(scheduler)
        held = [len(table.blocks) for r in scheduler.running if r.tenant_id == "a" for table in r.tables]
        most = max(most, sum(held))
        assert len(held) <= 2
    assert 4 < most <= 8
    assert other.finish_reason == "length"


def test_a_request_over_the_share_by_itself_is_refused() -> None:
    scheduler = make_scheduler(num_pages=33)
    with pytest.raises(
        Exception, match=r"may take 4 pages of the KV cache; the kv_share 0.1 of this API key is 3 of 32"
    ):
        tenant_request(scheduler, "a", 0, kv_share=0.1)


def use_of(tenant: Tenant, num_requests: int, num_tokens: int, num_open_tokens: int) -> TenantUse:
    return TenantUse(tenant, num_requests=num_requests, num_tokens=num_tokens, num_open_tokens=num_open_tokens)


def test_what_a_tenant_uses_in_other_engines_counts_in_its_limits() -> None:
    limited = Limited(Tenant(name="team", requests_per_minute=3, tokens_per_minute=100))
    limited.handle(use_of(limited.tenant, 2, 80, 0))
    limited.ask("a")
    assert limited.failure("a") is None
    assert [rates.requests.remaining for rates in limited.rates()] == [0]
    limited.ask("b")
    assert "requests_per_minute, 3" in limited.failure("b").message
    assert limited.tokens_of("team").get("computed", 0) <= 4, "the other engine has it in the ledger"


def test_open_tokens_of_other_engines_count_until_they_end_or_their_worker_does() -> None:
    limited = Limited(Tenant(name="team", tokens_at_once=20))
    limited.handle(use_of(limited.tenant, 0, 0, 16))
    limited.ask("a")
    assert "16 tokens in its open requests" in limited.failure("a").message
    limited.handle(use_of(limited.tenant, 0, 0, 10))
    limited.ask("b")
    assert limited.failure("b") is None
    limited.handle(use_of(limited.tenant, 0, 0, 18))
    limited.ask("c")
    assert limited.failure("c") is not None
    limited.handle(ClientGone())
    limited.ask("d")
    assert limited.failure("d") is None
