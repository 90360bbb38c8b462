"""Prompts of a prefill engine go on in a decode engine: equal tokens, and nothing is kept or freed wrongly."""

import random

import pytest

from engine.core.arrivals import STALL_S, Arrivals
from engine.core.offers import GIVE_UP_S
from engine.interface.errors import InvalidParameter
from engine.interface.protocol import HandOver, RequestFailed, SamplingParams, pack_token_ids
from engine.interface.tenant import Charge, Tenant
from engine.peers.messages import Taken
from engine.tensor_parallel.ranked_links import FencedLinks
from tests.support.engine_harness import Harness
from tests.support.fake_peers import FakePeers
from tests.support.layered_harness import FULL, GROUPS, host_harness, layered_harness

PROMPT = list(range(30))


def make(*, groups=FULL, depth=2, num_slots=400, prefill_slots=None, num_pages=120, turns_late=None, **settings):
    def engine(num_slots):
        return host_harness(
            groups=groups, num_pages=num_pages, num_slots=num_slots, max_copies=8, depth=depth, **settings
        )

    return FakePeers(engine(prefill_slots or num_slots), engine(num_slots), turns_late=turns_late)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", GROUPS)
def test_a_prompt_goes_on_with_the_blocks_of_the_other_engine(kind, depth):
    peers = make(groups=GROUPS[kind], depth=depth)
    peers.add("a", PROMPT)
    peers.drain()
    assert peers.decode.seen["a"].ends == ["length"]
    assert peers.num_cached("a") >= 24
    assert peers.arrivals.num_by_result == {"complete": 1}
    assert peers.arrivals.num_bytes > 0
    assert peers.offers.num_open == 0


@pytest.mark.parametrize("kind", GROUPS)
def test_blocks_are_offered_when_a_late_rank_has_copied_its_part(kind):
    peers = make(groups=GROUPS[kind], turns_late=lambda: 5, max_num_batched_tokens=8)
    peers.add("a", PROMPT)
    peers.drain()
    assert peers.num_cached("a") >= 24
    assert peers.arrivals.num_by_result == {"complete": 1}
    assert peers.offers.num_open == 0
    assert not peers.offers.is_active


def test_an_offer_that_does_not_wait_for_a_late_rank_is_caught(monkeypatch):
    """The planted fault: what the first rank has copied is offered at once."""
    monkeypatch.setattr(FencedLinks, "send", lambda self, peer, message: self._links.send(peer, message))
    peers = make(turns_late=lambda: 5)
    peers.add("a", PROMPT)
    with pytest.raises(AssertionError, match="has not ended the step"):
        peers.drain()


def test_an_engine_is_not_idle_while_an_offer_waits_for_a_late_rank():
    peers = make(turns_late=lambda: 10**9)
    peers.add("a", PROMPT)
    peers.turn(40)
    assert peers.decode.scheduler.kv.tiers.num_outside, "it waits for its blocks"
    assert not peers.prefill.engine.is_idle
    assert peers.offers.num_open > 0
    assert peers.arrivals.num_blocks["taken"] == 0
    peers.cut()
    peers.drain()
    assert peers.decode.seen["a"].ends == ["length"]


def test_blocks_are_copied_while_the_prompt_is_still_computed():
    peers = make(max_num_batched_tokens=4)
    peers.add("a", PROMPT)
    while not peers.arrivals.num_blocks["taken"]:
        peers.turn()
    assert not peers.prefill.seen["a"].ends
    peers.drain()


def test_blocks_that_are_known_are_not_copied_again():
    peers = make()
    peers.add("a", PROMPT)
    peers.drain()
    num_bytes = peers.arrivals.num_bytes
    peers.add("b", [*PROMPT, 31, 32])
    peers.drain()
    assert peers.arrivals.num_blocks["known"] >= 7
    assert peers.arrivals.num_bytes - num_bytes <= 2
    assert peers.num_cached("b") >= 28


def test_a_prompt_that_the_prefill_engine_has_cached_is_offered_whole():
    peers = make()
    peers.prefill.add("earlier", PROMPT, 2)
    peers.drain()
    peers.add("a", PROMPT)
    peers.drain()
    assert peers.prefill.seen["a"].num_cached_tokens == 28
    assert peers.num_cached("a") == 28


@pytest.mark.parametrize("turns", range(0, 24, 2))
def test_a_lost_prefill_engine_costs_a_computation_alone(turns):
    peers = make(max_num_batched_tokens=8)
    peers.transport.polls_until_done = 3
    peers.add("a", PROMPT)
    peers.turn(turns)
    peers.cut()
    peers.drain()
    assert peers.decode.seen["a"].ends == ["length"]


def test_a_request_does_not_wait_for_a_prefill_engine_that_is_silent():
    peers = make()
    peers.turn()
    peers.links[1].num_held_back = 10**9
    peers.add("a", PROMPT)
    while not peers.decode.scheduler.kv.tiers.num_outside:
        peers.turn()
    peers.decode.clock.now += STALL_S + 1
    peers.drain()
    assert peers.arrivals.num_by_result == {"late": 1}
    assert peers.num_cached("a") == 0


@pytest.mark.parametrize(("connecting", "result"), [(1, "lost"), (0, "late")])
def test_a_request_waits_for_a_lost_prefill_engine_only_while_that_one_connects_again(connecting, result):
    peers = make()
    peers.turn()
    peers.links[1].num_held_back = 10**9
    peers.add("a", PROMPT)
    while not peers.decode.scheduler.kv.tiers.num_outside:
        peers.turn()
    peers.links[1].connecting = [connecting]
    peers.links[1].num_held_back = 0
    peers.cut()
    peers.turn(2)
    assert bool(peers.arrivals.waits) == (result == "late")
    peers.decode.clock.now += STALL_S + 1
    peers.turn(2)
    peers.links[1].connecting = []
    peers.drain()
    assert peers.arrivals.num_by_result == {result: 1}


def test_copies_that_fail_cost_a_computation_alone():
    peers = make(max_num_batched_tokens=8)
    peers.transport.loses = lambda reading: peers.arrivals.num_blocks["taken"] > 0
    peers.add("a", PROMPT)
    peers.drain()
    assert peers.arrivals.num_blocks["failed"] > 0
    assert 0 < peers.num_cached("a") < 28


def test_the_next_process_of_the_decode_engine_gets_the_prompt_from_its_beginning():
    peers = make(max_num_batched_tokens=4)
    peers.add("a", PROMPT)
    while not peers.arrivals.num_blocks["taken"]:
        peers.turn()
    num_offered = peers.offers.num_offered
    peers.cut()
    peers.prefill.turn()
    assert peers.offers.num_open == 0
    peers.connect()
    peers.drain()
    assert peers.offers.num_offered >= num_offered + 7
    assert peers.num_cached("a") == 28


@pytest.mark.parametrize("turns", range(0, 20, 3))
def test_aborts_free_both_sides(turns):
    peers = make(max_num_batched_tokens=8)
    peers.transport.polls_until_done = 4
    peers.add("a", PROMPT)
    peers.turn(turns)
    for harness in (peers.prefill, peers.decode):
        if "a" in harness.seen and not harness.seen["a"].ends:
            harness.abort("a")
    peers.drain()
    assert peers.offers.num_open == 0


def test_slots_are_kept_until_the_copy_has_ended():
    peers = make(prefill_slots=8, max_num_batched_tokens=8)
    peers.transport.polls_until_done = 25
    for number in range(3):
        peers.add(f"a{number}", [number * 10 + token for token in range(8)] + [number] * 8, 4)
    for _ in range(200):
        peers.turn()
        peers.offers.check()
        peers.arrivals.check()
    peers.drain()


def test_a_decode_engine_that_reports_too_early_is_caught(monkeypatch):
    """The planted fault: the slots of an offer are used again while its copy runs."""
    real = Arrivals._take

    def take(self, peer, offer, now):
        real(self, peer, offer, now)
        for copy in self._copies.values():
            if copy.number == offer.number:
                self._links.send(peer, Taken([offer.number]))

    monkeypatch.setattr(Arrivals, "_take", take)
    peers = make(prefill_slots=8, max_num_batched_tokens=8)
    peers.transport.polls_until_done = 40
    for number in range(6):
        peers.add(f"a{number}", [number * 5 + token for token in range(8)] + [number] * 8, 4)
    with pytest.raises(AssertionError):
        peers.drain()


def test_small_host_memories_lose_blocks_and_no_tokens():
    peers = make(num_slots=5, max_num_batched_tokens=8)
    for number in range(4):
        peers.add(f"a{number}", [*range(number, number + 20)], 6)
    peers.drain()
    assert all(seen.ends == ["length"] for seen in peers.decode.seen.values())


def test_what_cannot_be_copied_is_given_up():
    peers = make()
    peers.prefill.scheduler.kv.tiers.host.plan = lambda **_: None
    peers.add("a", PROMPT)
    while not peers.decode.scheduler.kv.tiers.num_outside:
        peers.turn()
    assert peers.offers.is_active
    peers.prefill.clock.now += GIVE_UP_S + 1
    peers.turn(3)
    assert not peers.offers.is_active
    assert not peers.decode.scheduler.kv.tiers.num_outside


def test_blocks_whose_values_are_not_finite_are_forgotten_on_both_sides():
    peers = make()
    peers.add("a", PROMPT)
    peers.drain()
    pool = peers.decode.scheduler.kv.pool
    names = [pool.key_of(block) for block in pool.published]
    index = peers.decode.scheduler.kv.tiers.host.index
    assert any(index.find((0, key)) for key in names)
    peers.prefill.scheduler.kv.tiers.forget((0, key) for key in names)
    peers.decode.turn()
    assert not any(index.find((0, key)) for key in names)
    assert not peers.decode.scheduler.kv.pool.published
    peers.drain()


def test_penalties_and_seeds_go_on_exactly():
    peers = make()
    peers.add("a", PROMPT, 10, seed=5, temperature=0.8, presence_penalty=0.5, logprobs=2)
    peers.drain()
    assert peers.decode.seen["a"].ends == ["length"]


def test_a_request_goes_on_behind_any_number_of_tokens():
    harness = layered_harness(num_pages=120)
    whole = harness.expected_tokens(PROMPT, SamplingParams(max_tokens=12), max_num_tokens=64, lora_index=0)
    for count in (1, 3, 8, 11):
        harness.add(f"r{count}", PROMPT, 12, output=pack_token_ids(whole[:count]), hand_over=HandOver(0))
    harness.drain()
    assert all(seen.token_ids == whole for seen in harness.seen.values())


@pytest.mark.parametrize(
    ("output", "params", "says"),
    [
        (pack_token_ids([99]), {}, "Token id 99 is outside"),
        (pack_token_ids([1, 2]), {"max_tokens": 2}, "The output has 2 tokens; of max_tokens = 2 none is left"),
        (pack_token_ids([1]), {"pooling": "mean"}, "Only a replayed request for tokens"),
    ],
)
def test_wrong_earlier_output_is_refused(output, params, says):
    harness = make().decode
    errors = []
    harness.transport.send = lambda client, message: errors.append(message)
    harness.add("a", PROMPT, output=output, hand_over=HandOver(0), **params)
    harness.engine.run_once(0)
    assert errors[0].code == InvalidParameter.code
    assert says in errors[0].message


def test_a_tenant_is_charged_once_for_a_request_of_two_engines():
    peers = make()
    peers.add("a", PROMPT, 8, tenant=Tenant(name="team"), charge=Charge(30, 38))
    peers.drain()
    counts = {}
    for harness in (peers.prefill, peers.decode):
        harness.engine.record_state()
        for (name, *labels), n in harness.metrics.drain().counters.items():
            if name in ("key_requests_total", "key_tokens_total") and labels[0] == "team" and n:
                counts[labels[1]] = counts.get(labels[1], 0) + n
    assert counts == {"accepted": 1, "computed": 30, "generated": 8}


def test_a_request_over_its_tenants_share_is_refused_before_its_first_token():
    peers = make(num_pages=101)
    peers.add("a", PROMPT, 20, tenant=Tenant(kv_share=0.1))
    peers.prefill.turn()
    ((_, failure),) = [entry for entry in peers.prefill.messages if isinstance(entry[1], RequestFailed)]
    assert "may take 13 pages of the KV cache; the kv_share 0.1 of this API key is 10" in failure.message


def test_a_full_queue_takes_what_a_prefill_engine_has_begun():
    harness = Harness(num_pages=120, max_num_seqs=1, max_queued_requests=1, max_queue_wait_s=1e-6)
    for request_id in ("running", "queued"):
        harness.add(request_id, PROMPT, 20)
        harness.turn(3)
    harness.add("refused", PROMPT, 20, charge=Charge(30, 50))
    token_ids = harness.expected_tokens(PROMPT, SamplingParams(max_tokens=20), max_num_tokens=64, lora_index=0)[:1]
    harness.add("begun", PROMPT, 20, output=pack_token_ids(token_ids), hand_over=HandOver(0), deadline_s=-1.0)
    harness.drain()
    failed = [message.request_id for _, message in harness.messages if isinstance(message, RequestFailed)]
    assert failed == ["refused"]
    assert harness.seen["begun"].ends == ["length"]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.table(most=6)
def test_random_traces_with_cuts_aborts_and_slow_copies(seed, num_ranks):
    rng = random.Random(seed)
    groups = GROUPS[rng.choice(list(GROUPS))]
    late = random.Random(seed)
    peers = make(
        groups=groups,
        turns_late=None if num_ranks == 1 else lambda: late.randrange(6),
        depth=rng.choice([1, 2]),
        num_slots=rng.choice([12, 40, 400]),
        num_pages=rng.choice([60, 120]),
        max_num_batched_tokens=rng.choice([8, 16]),
    )
    peers.transport.loses = lambda reading: rng.random() < 0.1
    prefixes = [[rng.randrange(50) for _ in range(24)] for _ in range(2)]
    for number in range(14):
        prompt = rng.choice(prefixes)[: rng.randrange(25)] + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        peers.add(f"r{number}", prompt, rng.randrange(2, 9), seed=number)
        peers.transport.polls_until_done = rng.choice([1, 2, 7])
        for _ in range(rng.randrange(8)):
            peers.turn()
            if rng.random() < 0.03:
                peers.cut()
            elif rng.random() < 0.2 and not peers.links[0].is_connected and not peers.links[1].inbox:
                peers.connect()
            if rng.random() < 0.04:
                harness = rng.choice([peers.prefill, peers.decode])
                running = [id_ for id_, seen in harness.seen.items() if not seen.ends]
                if running:
                    harness.abort(rng.choice(running))
    peers.drain()
    assert peers.offers.num_open == 0
