"""Requests that go on after the end of their engine: the tokens of an undisturbed run, from every commit."""

import logging
import random
from collections import Counter, deque

import msgspec
import pytest

from engine.core.request_factory import RequestFactory
from engine.interface.errors import EngineDead, InvalidParameter, PoisonRequest
from engine.interface.protocol import (
    AddRequest,
    GrammarSpec,
    QueueCosts,
    RefuseDigest,
    SamplingParams,
    ThinkingBudget,
    pack_token_ids,
)
from engine.interface.replays import Journal, digest_of
from engine.interface.tenant import Charge, Tenant
from tests.support.cache_traces import KINDS, STATE_KINDS, Trace
from tests.support.engine_harness import Harness, Seen, drafters
from tests.support.grammar_tokens import compiler

REQUESTS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 7, "top_k": 5},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1, "logprobs": 0},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(25))},
    "stop": {"stop_token_ids": [3, 4, 5]},
    "adapter": {"lora_index": 2},
    "bad_words": {"bad_words": [[4], [5, 6]]},
    "thinking": {"thinking": ThinkingBudget(4, [1], 2, [8, 9, 2], is_open=True)},
    "embedding": {"pooling": "mean"},
    "grammar": {"grammar": GrammarSpec('start: /"[a-c]{4,30}"/'), "seed": 3},
    "grammar_with_stop_tokens": {"grammar": GrammarSpec("start: /[0-9]{6,40}/"), "seed": 5, "stop_token_ids": [0]},
    "grammar_in_reasoning": {
        "grammar": GrammarSpec("start: /[0-9ab]{9,40}/"),
        "thinking": ThinkingBudget(4, [23], 25, [24, 25], is_open=True),
    },
    "allowed": {"allowed_token_ids": [3, 5, 7, 9], "seed": 2},
    "bias": {"logit_bias": {4: 3.0, 9: -100.0}, "seed": 2},
    "salt": {"cache_salt": "tenant", "open_salt": "other"},
    "pin": {"pin_s": 1000.0, "priority": 1},
}


def run(harness: Harness, options: dict, *, crash_after: int | None = None, is_fault: bool = False) -> Harness:
    """Run one request beside another, with an end of the engine after so many turns."""
    harness.add("beside", [9, 8, 7, 6, 5, 4], 12)
    harness.add("r", list(range(11)), 12, **options)
    if crash_after is not None:
        harness.turn(crash_after)
        harness.crash(is_fault=is_fault)
    harness.drain()
    return harness


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.table
def test_a_request_goes_on_from_every_commit(kind: str, num_drafts: int) -> None:
    options = REQUESTS[kind]
    for depth in (1, 2):
        whole = run(Harness(depth=depth, make_drafter=drafters(num_drafts), get_compiler=compiler), options).seen["r"]
        assert whole.ends[0] in ("length", "stop")
        for crash_after in range(18):
            harness = Harness(depth=depth, make_drafter=drafters(num_drafts), get_compiler=compiler)
            seen = run(harness, options, crash_after=crash_after, is_fault=crash_after % 2 == 0).seen["r"]
            assert (seen.token_ids, seen.ends) == (whole.token_ids, whole.ends)
            assert (seen.num_logprobs, seen.prompt_logprobs) == (whole.num_logprobs, whole.prompt_logprobs)
            assert (seen.embedding, seen.num_started) == (whole.embedding, 1)


def run_crowd(seed: int, *, depth: int, num_drafts: int, crash_rate: float) -> Harness:
    """Run requests of all kinds, some of them with three choices, in a pool that is small for them.

    crash_rate: after so many turns the engine ends; the first time by a fault, then by kills, which accuse nobody.
    """
    rng = random.Random(seed)
    harness = Harness(
        depth=depth,
        num_pages=rng.randint(14, 40),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(4, 24),
        make_drafter=drafters(num_drafts),
        get_compiler=compiler,
    )
    ends, faults = random.Random(seed + 1), [True]
    for number in range(rng.randint(4, 12)):
        options = REQUESTS[rng.choice(list(REQUESTS))]
        prompt, num_choices = [rng.randrange(50) for _ in range(rng.randint(1, 14))], rng.choice([1, 1, 3])
        for choice in range(1 if "pooling" in options else num_choices):
            own = options | ({"seed": options.get("seed", 0) + choice, "counts_prompt": not choice})
            harness.add(f"r{number}-{choice}", prompt, 12, client_id=1 + number % 2, **own)
        for _ in range(rng.randint(0, 6)):
            harness.turn()
            if ends.random() < crash_rate:
                harness.crash(is_fault=bool(faults and faults.pop()))
    for _ in range(200):
        harness.turn()
        if ends.random() < crash_rate:
            harness.crash(is_fault=bool(faults and faults.pop()))
    harness.drain()
    return harness


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.table(most=4)
def test_crowds_of_all_kinds_go_on_from_any_commit(seed: int) -> None:
    for depth, num_drafts in ((1, 0), (2, 0), (1 + seed % 2, 3)):
        whole = run_crowd(seed, depth=depth, num_drafts=num_drafts, crash_rate=0.0).seen
        ended = run_crowd(seed, depth=depth, num_drafts=num_drafts, crash_rate=0.15).seen
        assert sum(seen.journal.num_replays for seen in ended.values()) > 5
        for name, seen in ended.items():
            assert (seen.token_ids, seen.ends) == (whole[name].token_ids, whole[name].ends), name
            assert seen.num_logprobs == whole[name].num_logprobs
            assert seen.prompt_logprobs == whole[name].prompt_logprobs
            assert seen.embedding == whole[name].embedding


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS, STATE_KINDS], ids=["kinds", "states"])
def test_traces_with_ends_of_the_engine_give_the_models_tokens(kinds) -> None:
    """At both depths, with drafts at one, over layers of any kinds, in pools that are too small."""
    logging.disable(logging.CRITICAL)
    num_replays = num_begun_again = 0
    try:
        for seed in range(25):
            trace = Trace.draw(seed, kinds)
            for depth, num_drafts in ((2, 0), (1, 0), (1 + seed % 2, trace.num_drafts)):
                try:
                    harness = trace.replay(depth=depth, num_drafts=num_drafts, crash_rate=0.3)
                except Exception as error:
                    raise AssertionError(f"trace {seed} of {kinds}, depth {depth}, drafts {num_drafts}") from error
                journals = [seen.journal for seen in harness.seen.values()]
                num_replays += sum(journal.num_replays for journal in journals)
                num_begun_again += sum(bool(journal.num_replays and journal._num_submitted) for journal in journals)
    finally:
        logging.disable(logging.NOTSET)
    assert num_replays > 100
    assert num_begun_again > 10


def test_what_earlier_engines_made_is_not_counted_again() -> None:
    harness = Harness()
    harness.add("r", list(range(11)), 12)
    harness.turn(6)
    num_before = len(harness.seen["r"].token_ids)
    assert 0 < num_before < 10
    counted = harness.metrics._delta.counters
    assert (counted["prompt_tokens_total", ""], counted["generation_tokens_total", ""]) == (11, num_before)
    harness.crash()
    harness.drain()
    counted = harness.metrics._delta.counters
    assert ("prompt_tokens_total", "") not in counted
    assert counted["generation_tokens_total", ""] == 12 - num_before
    assert counted["requests_finished_total", "length"] == 1
    assert harness.metrics._delta.histograms["request_generation_tokens"].sum == 12


def test_a_request_that_no_engine_has_accepted_is_counted_by_the_next_one() -> None:
    """And one that was accepted is not counted again, but is in the windows of its limits."""
    tenant = Tenant(name="team", requests_per_minute=2, tokens_per_minute=1000)
    harness = Harness()
    harness.add("accepted", [1, 2, 3], 20, tenant=tenant, charge=Charge(3, 23))
    harness.turn(2)
    harness.add("sent", [1, 2, 4], 20, tenant=tenant, charge=Charge(3, 23))
    for is_again in (False, True):
        harness.crash()
        harness.turn(2)
        counted = harness.metrics._delta.counters["key_requests_total", "team", "accepted"]
        assert counted == (0 if is_again else 1)
        harness.add(f"third{is_again}", [1], 4, tenant=tenant, charge=Charge(1, 5))
        harness.turn()
        assert harness.seen[f"third{is_again}"].ends == ["rate_limit_exceeded"]
    harness.clock.now += 61
    harness.crash()  # a request that came a minute ago is in no window
    harness.add("later", [1], 4, tenant=tenant, charge=Charge(1, 5))
    harness.drain()
    assert harness.seen["later"].ends == ["length"]


@pytest.mark.parametrize("crash_after", [0, 1, 6])
def test_the_ledger_of_all_engines_has_each_token_once(crash_after: int) -> None:
    harness = Harness()
    harness.add("r", list(range(11)), 12, tenant=Tenant(name="team"), charge=Charge(11, 23))
    ledger: Counter[str] = Counter()
    for is_last in (False, True):
        if is_last:
            harness.drain()
        else:
            harness.turn(crash_after)
        harness.engine.record_state()
        for (name, *labels), number in harness.metrics._delta.counters.items():
            if name == "key_tokens_total" and labels[0] == "team":
                ledger[labels[1]] += number
        if not is_last:
            harness.crash()
    assert ledger == {"computed": 11, "generated": 12, "cached": 0}


def test_turns_are_charged_for_what_an_engine_makes_itself() -> None:
    harness = Harness()
    harness.add("r", list(range(11)), 12)
    harness.turn(6)
    num_made = len(harness.seen["r"].token_ids)
    harness.crash()
    harness.turn()
    request = harness.scheduler.requests["r"]
    assert request.num_expected_tokens == 12 - num_made
    harness.drain()


def test_a_full_queue_refuses_new_requests_and_no_replayed_one() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=2)
    for name in "abc":
        harness.add(name, [1, 2, 3], 6)
    harness.turn(3)
    harness.crash()
    harness.transport.inbox.rotate(-1)
    harness.add("new", [4], 2)
    harness.transport.inbox.rotate(2)  # it comes before two of the others
    harness.drain()
    assert [harness.seen[name].ends for name in "abc"] == [["length"]] * 3
    assert harness.seen["new"].ends in (["overloaded"], ["length"])


def unproven(harness: Harness) -> list[str]:
    """The replayed requests that are open and have no further token."""
    return [
        request.request_id
        for request in harness.scheduler.requests.values()
        if request.num_replayed_tokens and len(request.output_token_ids) == request.num_replayed_tokens
    ]


def test_suspects_run_one_at_a_time_the_first_alone_and_the_others_beside_the_rest() -> None:
    harness = Harness(max_num_seqs=8, num_pages=65, max_num_batched_tokens=64)
    for name in ("s0", "s1", "s2"):
        harness.add(name, [1, 2, 3], 12)
    harness.turn(4)
    harness.crash(is_fault=True)
    harness.add("new", [5, 6], 12)
    harness.turn(1)
    assert set(harness.scheduler.requests) == {"s0"}
    harness.turn(1)
    assert set(harness.scheduler.requests) == {"s0"}  # it has no further token yet
    is_beside = False
    for _ in range(8):
        harness.turn(1)
        assert len(unproven(harness)) <= 1
        is_beside |= "new" in harness.scheduler.requests and bool({"s1", "s2"} & set(unproven(harness)))
    assert is_beside
    assert {"s0", "s1", "s2"} <= set(harness.begun)
    harness.drain()


def test_nothing_is_let_in_beside_a_request_that_may_have_ended_two_engines() -> None:
    """Its prompt is long, and the culprit is another request, which comes while it is computed."""
    harness = Harness(max_num_seqs=8, num_pages=65, max_num_batched_tokens=4)
    harness.add("long", list(range(3, 33)), 6)
    harness.turn(3)
    harness.crash(is_fault=True, max_replays=9)
    harness.add("short", [3], 6, client_id=2)  # before the suspect, so that they are together
    harness.transport.inbox.rotate(1)
    harness.turn(3)
    assert set(harness.scheduler.requests) == {"long", "short"}
    harness.crash(is_fault=True, max_replays=9)
    assert not harness.seen["long"].ends
    harness.add("new", [2], 6, client_id=2)
    for _ in range(4):
        harness.turn()
        assert set(harness.scheduler.requests) == {"long"}
    harness.abort("new", client_id=2)
    harness.turn()
    assert harness.seen["new"].ends == ["abort"]
    harness.drain()
    assert [harness.seen[name].ends for name in ("long", "short")] == [["length"]] * 2


def test_an_isolated_request_waits_for_a_suspect_and_its_client_may_leave() -> None:
    harness = Harness(max_num_seqs=8, num_pages=65, max_num_batched_tokens=4)
    message = AddRequest("x", pack_token_ids(list(range(3, 30))), SamplingParams(max_tokens=4), 0.0, num_replays=1)
    suspect = msgspec.structs.replace(message, request_id="suspect", is_suspect=True)
    isolated = msgspec.structs.replace(suspect, request_id="isolated", is_isolated=True, num_replays=2)
    harness.add("running", [2], 40)
    harness.turn(3)
    suspects = harness.engine._suspects
    for client_id, each in ((1, suspect), (2, isolated)):
        harness.seen[each.request_id] = Seen(list(range(3, 30)), each.params, client_id, journal=Journal(each))
        harness.transport.inbox.append((client_id, each))
    harness.add("behind", [4], 3)
    harness.turn(2)
    assert set(harness.scheduler.requests) == {"running", "suspect"}
    assert suspects.is_holding
    harness.leave(2)
    harness.turn(2)
    assert "behind" in harness.scheduler.requests
    harness.drain()
    assert "isolated" not in harness.begun


@pytest.mark.parametrize("limit", [{"max_queued_requests": 2}, {"max_queued_tokens": 20}])
def test_what_waits_behind_an_isolated_request_is_in_the_queue_when_it_comes(limit: dict) -> None:
    harness = Harness(max_num_seqs=1, num_pages=65, **limit)
    harness.add("running", [2], 20)
    harness.turn(3)
    message = AddRequest("isolated", pack_token_ids([3, 4]), SamplingParams(max_tokens=4), 0.0, num_replays=2)
    message = msgspec.structs.replace(message, is_suspect=True, is_isolated=True)
    harness.seen["isolated"] = Seen([3, 4], message.params, 2, journal=Journal(message))
    harness.transport.inbox.append((2, message))
    for name in ("a", "b"):
        harness.add(name, list(range(3, 18)), 3)
    harness.turn(1)
    assert set(harness.scheduler.requests) == {"running", "isolated"}
    assert (harness.seen["a"].ends, harness.seen["b"].ends) == ([], ["overloaded"])
    harness.drain()
    assert harness.seen["a"].ends == ["length"]


def test_the_predicted_wait_has_what_an_isolated_request_holds_back() -> None:
    """And what was let wait is not refused when it is let in."""
    harness = Harness(max_num_seqs=4, num_pages=65, max_queue_wait_s=1.0)
    harness.transport.inbox.append((1, QueueCosts(10.0, 100, 0.0, 100, (1.0, 1.0), {})))
    harness.add("running", [2], 20)
    harness.turn(3)
    message = AddRequest("isolated", pack_token_ids([3, 4]), SamplingParams(max_tokens=4), 0.0, num_replays=2)
    message = msgspec.structs.replace(message, is_suspect=True, is_isolated=True)
    harness.seen["isolated"] = Seen([3, 4], message.params, 2, journal=Journal(message))
    harness.transport.inbox.append((2, message))
    for name, num_tokens in (("a", 3), ("b", 8)):
        harness.add(name, list(range(3, 3 + num_tokens)), 3, charge=Charge(num_tokens, num_tokens + 3))
    harness.turn(1)
    assert (harness.seen["a"].ends, harness.seen["b"].ends) == ([], ["overloaded"])
    harness.drain()
    assert harness.seen["a"].ends == ["length"]


def test_a_suspect_that_waits_can_be_aborted_and_its_client_can_leave() -> None:
    harness = Harness()
    for name, client_id in (("a", 1), ("b", 1), ("c", 2)):
        harness.add(name, [1, 2, 3], 20, client_id=client_id)
    harness.turn(4)
    harness.crash(is_fault=True)
    harness.turn(1)
    harness.abort("b")
    harness.leave(2)
    harness.turn(1)
    assert harness.seen["b"].ends == ["abort"]
    harness.drain()
    assert harness.seen["c"].ends == []


def test_all_suspects_can_be_aborted() -> None:
    harness = Harness()
    for name in "ab":
        harness.add(name, [1, 2, 3], 20)
    harness.turn(4)
    harness.crash(is_fault=True)
    harness.turn(1)
    for name in "ab":
        harness.abort(name)
    harness.drain()
    assert [harness.seen[name].ends for name in "ab"] == [["abort"], ["abort"]]


@pytest.mark.parametrize("names", [("bad",), ("bad", "a", "b"), ("a", "bad", "b"), ("a", "b", "bad")])
def test_the_one_that_ends_an_engine_alone_is_poison_and_the_others_go_on(names: tuple[str, ...]) -> None:
    """The engine faults whenever it computes the fourth token of `bad`, wherever the others are."""
    harness = Harness(max_num_seqs=8, num_pages=65, max_num_batched_tokens=64)
    for name in names:
        harness.add(name, [len(name), 2, 3], 12)
    num_faults = 0
    for _ in range(200):
        harness.turn(1)
        bad = harness.scheduler.requests.get("bad")
        if bad is not None and len(bad.output_token_ids) + bad.num_pending_tokens > 3:
            num_faults += 1
            harness.crash(is_fault=True, max_replays=2)
    harness.drain()
    assert num_faults == (2 if names[0] == "bad" else 3)  # the first suspect is let in alone
    assert harness.seen["bad"].ends == [PoisonRequest.code]
    assert [harness.seen[name].ends for name in names if name != "bad"] == [["length"]] * (len(names) - 1)


@pytest.mark.parametrize("max_replays", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [12, 400])
def test_poison_is_found_while_another_worker_has_open_requests(max_replays: int, num_tokens: int) -> None:
    """Every engine hears of the other worker first, whose requests are set aside, however long they would take."""
    harness = Harness(max_num_seqs=8, num_pages=65, max_num_batched_tokens=64)
    harness.add("a", [1, 2, 3], 30)
    harness.add("b", [1, 2, 4], 12)
    harness.add("bad", [5, 2, 3], 12, client_id=2)
    num_faults = 0
    for _ in range(300):
        harness.turn(1)
        bad = harness.scheduler.requests.get("bad")
        if bad is not None and len(bad.output_token_ids) + bad.num_pending_tokens > 3:
            num_faults += 1
            harness.crash(is_fault=True, max_replays=max_replays)
            harness.transport.inbox = deque(sorted(harness.transport.inbox, key=lambda each: each[0]))
            harness.turn(1)
    harness.drain()
    assert num_faults == 3
    assert harness.seen["bad"].ends == [PoisonRequest.code]
    assert [harness.seen[name].ends for name in "ab"] == [["length"]] * 2


def test_isolated_requests_of_two_workers_run_one_after_the_other() -> None:
    harness = Harness(max_num_seqs=8, num_pages=65, max_num_batched_tokens=64)
    harness.add("running", [2], 20)
    harness.turn(3)
    for client_id in (1, 2):
        name = f"isolated{client_id}"
        message = AddRequest(name, pack_token_ids([3, 4]), SamplingParams(max_tokens=4), 0.0, num_replays=2)
        message = msgspec.structs.replace(message, is_suspect=True, is_isolated=True)
        harness.seen[name] = Seen([3, 4], message.params, client_id, journal=Journal(message))
        harness.transport.inbox.append((client_id, message))
    harness.add("new", [4], 3)
    rows: list[list[str]] = []  # of the steps, each time others
    while not harness.engine.is_idle or harness.transport.inbox:
        harness.turn()
        running = [request.request_id for request in harness.scheduler.running]
        if running and running not in rows[-1:]:
            rows.append(running)
    assert rows[:2] == [["isolated1"], ["isolated2"]]  # "running" is set aside, and "new" waits
    assert {"running", "new"} <= {name for names in rows[2:] for name in names}
    assert all(harness.seen[f"isolated{client_id}"].journal._was_alone for client_id in (1, 2))
    harness.drain()


def test_no_long_request_is_poison_for_the_faults_of_others() -> None:
    """Each engine faults as soon as a further request begins, while the prompt of `long` is still computed."""
    harness = Harness(max_num_seqs=8, num_pages=65, max_num_batched_tokens=4)
    harness.add("long", list(range(3, 33)), 6)
    for number in range(3):
        harness.add(f"culprit{number}", [2, 3], 6, client_id=2)
        for _ in range(40):
            harness.turn()
            if f"culprit{number}" in harness.scheduler.requests:
                harness.crash(is_fault=True, max_replays=2)
                break
    harness.drain()
    assert harness.seen["long"].ends == ["length"]


def test_what_a_worker_has_refused_is_refused_by_the_engine_until_its_time_is_over() -> None:
    harness = Harness()
    params = SamplingParams(max_tokens=8)
    digest = digest_of(AddRequest("x", pack_token_ids([1, 2]), params, 0.0))
    harness.transport.inbox.append((1, RefuseDigest(digest, harness.clock.now + 1.0)))
    harness.add("same", [1, 2], client_id=2, seed=5)
    harness.add("other", [1, 3])
    harness.turn(1)
    assert harness.seen["same"].ends == [PoisonRequest.code]
    harness.drain()
    assert harness.seen["other"].ends == ["length"]
    harness.clock.now += 1.0
    harness.add("later", [1, 2])
    harness.drain()
    assert harness.seen["later"].ends == ["length"]


def journal() -> Journal:
    made = Journal(AddRequest("r", pack_token_ids([1, 2, 3]), SamplingParams(max_tokens=9, seed=4), 0.0))
    assert made.submit().num_replays == 0
    return made


def test_a_request_is_given_up_when_it_has_been_stuck_more_often_than_there_are_replays() -> None:
    stuck = journal()
    for _ in range(2):
        stuck.begin(None)
        assert stuck.end_engine(is_fault=False, had_progress=False, max_replays=2) is None
        stuck.submit()
    stuck.begin(None)
    error = stuck.end_engine(is_fault=False, had_progress=False, max_replays=2)
    assert isinstance(error, EngineDead)
    assert "3 times in a row" in error.message
    assert "2 replays" in error.message


def test_a_suspect_is_not_given_up_before_it_was_alone_but_has_a_bound() -> None:
    never, once = journal(), journal()
    for _ in range(4):
        never.begin(None)
        assert never.end_engine(is_fault=True, had_progress=True, max_replays=1) is None
        assert never.submit().is_suspect
        assert never.end_engine(is_fault=False, had_progress=False, max_replays=1) is None  # it waited
        never.submit()
    never.begin(None)
    assert isinstance(never.end_engine(is_fault=True, had_progress=True, max_replays=1), EngineDead)
    for is_alone in (False, False, True):
        if is_alone:
            once.isolate()
        once.begin(None)
        error = once.end_engine(is_fault=True, had_progress=True, max_replays=1)
        once.submit()
    assert isinstance(error, PoisonRequest)


def test_a_further_token_or_a_queue_is_no_failed_replay() -> None:
    lucky, queued = journal(), journal()
    for number in range(20):
        lucky.begin(None)
        lucky.add([number])
        for each in (lucky, queued):
            assert each.end_engine(is_fault=True, had_progress=False, max_replays=1) is None
            each.submit()
    assert lucky.num_replays == queued.num_replays == 20


def test_kills_while_others_get_on_say_nothing_of_a_request() -> None:
    late = journal()
    for _ in range(20):
        late.begin(None)
        assert late.end_engine(is_fault=False, had_progress=True, max_replays=1) is None
        assert not late.submit().is_suspect


def test_a_replayed_request_has_what_its_client_has() -> None:
    one = journal()
    one.begin(None)
    one.add([7, 8])
    one.add_prompt_logprobs(2)
    assert one.end_engine(is_fault=True, had_progress=False, max_replays=2) is None
    message = one.submit()
    assert (message.output, message.num_prompt_logprobs) == (pack_token_ids([7, 8]), 2)
    assert (message.num_replays, message.is_suspect, message.params.seed) == (1, True, 4)
    assert one.num_tokens == 5
    assert one.end_engine(is_fault=False, had_progress=False, max_replays=2) is None
    assert one.submit().is_suspect  # it was not begun, so nothing is known of it yet
    one.begin(None)
    one.add([9])
    assert one.end_engine(is_fault=False, had_progress=False, max_replays=2) is None
    assert not one.submit().is_suspect


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"output": b"123"}, "output"),
        ({"output": pack_token_ids([99])}, "output"),
        ({"output": pack_token_ids([1] * 4)}, "output"),
        ({"output": pack_token_ids([1]), "num_replays": 0}, "output"),
        ({"output": pack_token_ids([1]), "pooling": "mean"}, "output"),
        ({"num_prompt_logprobs": 2}, "num_prompt_logprobs"),
        ({"num_prompt_logprobs": -1}, "num_prompt_logprobs"),
    ],
)
def test_a_replayed_request_is_checked_as_all_are(changes: dict, field: str) -> None:
    factory = RequestFactory(vocab_size=50, num_loras=0, can_generate=True, make_drafter=None)
    fields = {"num_replays": 1} | changes
    message = AddRequest("r", pack_token_ids([1, 2]), SamplingParams(max_tokens=4), 0.0, **fields)
    with pytest.raises(InvalidParameter) as info:
        factory.make(message, client_id=1)
    assert info.value.param == field
