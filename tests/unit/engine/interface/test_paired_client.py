"""Requests of one stream go to a prefill engine, then to a decode engine; losses cost no token."""

import asyncio

import msgspec
import pytest

from engine.interface import paired_client
from engine.interface.errors import EngineDead, Overloaded, RateLimited
from engine.interface.metrics import Metrics
from engine.interface.paired_client import PairedEngineClient
from engine.interface.protocol import AddRequest, HandOver, SamplingParams, pack_token_ids
from engine.interface.tenant import Charge, Tenant
from tests.support.fakes import READY, FakeEngineClient

CHARGE = Charge(5, 9)
ANSWER = [11, 12, 13, 14]
DEAD = EngineDead("It died.")


def dead(*, accepted=False, begun=False):
    """Return the error of an engine that died with a request that it had accepted, or begun to compute."""
    error = EngineDead("It died.")
    error.was_accepted, error.was_begun = accepted or begun, begun
    return error


def behind(request):
    """Return the rest of the answer, as an engine that goes on behind the request's output."""
    return ANSWER[len(request.output) // 4 :]


class Pair:
    def __init__(self, *, num_prefill=1, num_decode=1, min_tokens=4, max_replays=2):
        self.prefill = [FakeEngineClient(behind) for _ in range(num_prefill)]
        self.decode = [FakeEngineClient(behind) for _ in range(num_decode)]
        self.metrics = Metrics()
        self.has_given_up = False
        self.client = PairedEngineClient(
            self.prefill,
            self.decode,
            min_tokens=min_tokens,
            max_replays=max_replays,
            metrics=self.metrics,
            has_given_up=lambda: self.has_given_up,
        )

    async def outputs(self, prompt=(1, 2, 3, 4, 5), *, request_id="a", **params):
        params.setdefault("max_tokens", 4)
        request = AddRequest(request_id, pack_token_ids(prompt), SamplingParams(**params), arrival_s=0.0, charge=CHARGE)
        return [output async for output in self.client.submit(request)]

    def run(self, **params):
        return asyncio.run(self.outputs(**params))

    def fallbacks(self):
        return {key[1]: n for key, n in self.metrics.drain().counters.items() if key[0] == "prefill_fallbacks_total"}


def tokens_of(outputs):
    return [token_id for output in outputs for token_id in output.token_ids]


def test_the_first_token_comes_from_the_prefill_engine_and_the_rest_from_the_decode_engine():
    pair = Pair()
    outputs = pair.run()
    assert tokens_of(outputs) == ANSWER
    assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]
    (first,), (second,) = pair.prefill[0].submitted, pair.decode[0].submitted
    assert first.params.max_tokens == 1
    assert first.hand_over == HandOver(0, is_prefill=True, max_tokens=4)
    assert second.params.max_tokens == 4
    assert second.hand_over == HandOver(0)
    assert second.output == pack_token_ids([11])
    assert (first.charge, first.counts_prompt) == (CHARGE, True)
    assert (second.charge, second.counts_prompt) == (None, False)
    assert pair.fallbacks() == {}


@pytest.mark.parametrize(
    ("prompt", "params", "side"),
    [((1, 2, 3), {}, "decode"), ((1, 2, 3, 4), {"max_tokens": 1}, "prefill")],
)
def test_short_prompts_and_single_tokens_need_one_engine(prompt, params, side):
    pair = Pair()
    outputs = pair.run(prompt=prompt, **params)
    assert tokens_of(outputs) == ANSWER[: params.get("max_tokens", 4)]
    used, unused = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    assert used[0].submitted[0].hand_over is None
    assert unused[0].submitted == []


def test_a_request_that_ends_with_its_first_token_is_not_handed_over():
    pair = Pair()
    outputs = pair.run(stop_token_ids=[11])
    assert [output.finish_reason for output in outputs] == ["stop"]
    assert pair.decode[0].submitted == []


@pytest.mark.parametrize(
    ("fail", "reason", "is_charged"),
    [(dead(accepted=True), "died", True), (dead(), "died", False), (Overloaded("It is full."), "full", False)],
)
def test_a_prefill_engine_that_fails_before_the_first_token_is_replaced(fail, reason, is_charged):
    pair = Pair()
    pair.prefill[0].fail = fail
    assert tokens_of(pair.run()) == ANSWER
    (request,) = pair.decode[0].submitted
    assert request.hand_over is None
    assert request.output == b""
    assert request.charge == (None if is_charged else CHARGE)  # if it is, limits are not asked again
    assert request.num_replays == is_charged  # and there is room for it
    assert request.counts_prompt  # no token: nobody has counted it
    assert pair.fallbacks() == {reason: 1}


def test_a_key_that_has_reached_its_limit_is_not_served_by_another_engine():
    pair = Pair()
    pair.prefill[0].fail = RateLimited("The API key team has reached requests_per_minute, 2.")
    with pytest.raises(RateLimited):
        pair.run()
    assert pair.decode[0].submitted == []
    assert pair.fallbacks() == {}


def test_one_decode_engine_counts_the_time_of_grammars():
    pair = Pair(num_decode=2)
    pair.decode[0].ready = None
    pair.client.spend_grammar_s(Tenant(name="team"), 2.0)
    pair.client.check_grammar(Tenant(name="team"))
    assert [client.spent_grammar_s for client in pair.decode] == [[], [(Tenant(name="team"), 2.0)]]
    assert all(client.checked_tenants == [Tenant(name="team")] for client in pair.decode)


@pytest.mark.parametrize(("attribute", "value", "reason"), [("ready", None, "missing"), ("is_full", True, "full")])
def test_without_a_prefill_engine_prompts_are_computed_where_they_are_decoded(attribute, value, reason):
    pair = Pair()
    setattr(pair.prefill[0], attribute, value)
    assert tokens_of(pair.run()) == ANSWER
    assert pair.prefill[0].submitted == []
    assert pair.fallbacks() == {reason: 1}


def test_a_decode_engine_that_dies_is_replaced_behind_the_last_token():
    pair = Pair(num_decode=2)
    pair.decode[0].fail, pair.decode[0].fail_after = DEAD, 2
    assert tokens_of(pair.run()) == ANSWER
    (request,) = pair.decode[1].submitted
    assert request.output == pack_token_ids([11, 12, 13])
    assert request.hand_over is None


def test_what_goes_on_is_taken_by_a_full_engine_too():
    pair = Pair(num_decode=2)
    pair.decode[1].is_full = True
    pair.decode[0].fail, pair.decode[0].fail_after = DEAD, 1
    assert tokens_of(pair.run()) == ANSWER
    assert len(pair.decode[1].submitted) == 1


def test_what_no_engine_has_accepted_is_not_given_to_a_full_one():
    pair = Pair(num_decode=2)
    pair.decode[1].is_full = True
    pair.decode[0].fail = DEAD
    with pytest.raises(EngineDead):
        pair.run(prompt=(1, 2, 3))
    assert pair.decode[1].submitted == []


async def meanwhile(pair, change, **params):
    """Return the outputs of a request, and change something when it has waited for an engine."""
    asked = asyncio.create_task(pair.outputs(**params))
    while not pair.client._between:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    change()
    return await asked


def test_what_was_accepted_waits_until_another_engine_has_room(monkeypatch):
    monkeypatch.setattr(paired_client, "_POLL_S", 0.001)
    pair = Pair(num_decode=2)
    pair.decode[0].fail, pair.decode[1].is_full = dead(accepted=True), True

    def give_room():
        assert pair.decode[1].submitted == []
        pair.decode[0].ready, pair.decode[1].is_full = None, False

    assert tokens_of(asyncio.run(meanwhile(pair, give_room, prompt=(1, 2, 3)))) == ANSWER
    (request,) = pair.decode[1].submitted
    assert (request.charge, request.num_replays) == (None, 1)


def test_what_waited_long_is_taken_by_a_full_engine(monkeypatch):
    monkeypatch.setattr(paired_client, "FULL_WAIT_S", 0.1)
    pair = Pair(num_decode=2)
    pair.decode[0].fail, pair.decode[1].is_full = dead(accepted=True), True

    def leave():
        pair.decode[0].ready = None

    assert tokens_of(asyncio.run(meanwhile(pair, leave, prompt=(1, 2, 3)))) == ANSWER
    assert len(pair.decode[0].submitted) == len(pair.decode[1].submitted) == 1


@pytest.mark.parametrize("fail_after", [0, 2])
def test_what_all_decode_engines_lose_goes_on_in_the_first_that_is_back(monkeypatch, fail_after):
    monkeypatch.setattr(paired_client, "_POLL_S", 0.001)
    pair = Pair(num_decode=2)
    pair.decode[0].fail, pair.decode[0].fail_after = dead(accepted=True), fail_after
    pair.decode[1].ready = None

    def come_back():
        pair.decode[0].fail = None

    assert tokens_of(asyncio.run(meanwhile(pair, come_back, prompt=(1, 2, 3)))) == ANSWER
    assert pair.decode[0].submitted[1].output == pack_token_ids(ANSWER[:fail_after])


def test_a_wait_for_a_decode_engine_ends_with_the_hope_for_one_and_with_the_request():
    pair = Pair(num_decode=2)
    pair.decode[0].fail = dead(accepted=True)
    pair.decode[1].ready = None
    pair.has_given_up = True
    with pytest.raises(EngineDead):
        pair.run(prompt=(1, 2, 3))
    pair.has_given_up = False
    pair.decode[1].is_full, pair.decode[1].ready = True, READY
    outputs = asyncio.run(meanwhile(pair, lambda: pair.client.abort("a"), prompt=(1, 2, 3)))
    assert [output.finish_reason for output in outputs] == ["abort"]
    assert pair.client._between == {}


@pytest.mark.parametrize(
    ("max_replays", "begun", "num_engines"), [(0, True, 1), (2, True, 3), (2, False, 1 + paired_client._MOST_LOST)]
)
def test_a_request_under_which_engines_end_in_a_row_is_given_up(max_replays, begun, num_engines):
    pair = Pair(num_decode=2, max_replays=max_replays)
    for client in pair.decode:
        client.fail = dead(accepted=True, begun=begun)
    with pytest.raises(EngineDead):
        pair.run(prompt=(1, 2, 3))
    assert sum(len(client.submitted) for client in pair.decode) == num_engines


def test_the_only_decode_engine_that_dies_ends_the_request():
    pair = Pair()
    pair.decode[0].fail, pair.decode[0].fail_after = DEAD, 1
    with pytest.raises(EngineDead):
        pair.run()


def test_requests_go_to_the_engine_with_the_fewest():
    pair = Pair(num_prefill=2, num_decode=2)

    async def three() -> None:
        await asyncio.gather(*(pair.outputs(request_id=name) for name in "abcd"))

    asyncio.run(three())
    assert [len(client.submitted) for client in pair.prefill] == [2, 2]
    assert [len(client.submitted) for client in pair.decode] == [2, 2]
    for client in pair.decode:
        assert all(request.hand_over is not None for request in client.submitted)
    for i, client in enumerate(pair.prefill):
        given = {request.request_id: request.hand_over.peer for request in client.submitted}
        for request_id, peer in given.items():
            taken = [request for request in pair.decode[peer].submitted if request.request_id == request_id]
            assert [request.hand_over.peer for request in taken] == [i]


def test_an_abort_between_the_engines_ends_the_request():
    pair = Pair()

    async def abort_after_first() -> list[str | None]:
        request = AddRequest("a", pack_token_ids(range(5)), SamplingParams(max_tokens=4), arrival_s=0.0)
        reasons = []
        async for output in pair.client.submit(request):
            reasons.append(output.finish_reason)
            if len(reasons) == 1:
                pair.client.abort("a", reason="abort")
        return reasons

    assert asyncio.run(abort_after_first()) == [None, "abort"]
    assert pair.decode[0].submitted == []


def test_a_reader_that_leaves_aborts_at_the_engine_that_has_the_request():
    pair = Pair()

    async def leave() -> None:
        request = AddRequest("a", pack_token_ids(range(5)), SamplingParams(max_tokens=4), arrival_s=0.0)
        outputs = pair.client.submit(request)
        for _ in range(2):
            await anext(outputs)
        await outputs.aclose()

    asyncio.run(leave())
    assert pair.decode[0].aborted == ["a"]
    assert pair.prefill[0].aborted == []
    assert not any(pair.client._num_open.values())


@pytest.mark.parametrize(
    "change", [{"cache_identity": "another"}, {"max_model_len": 5}], ids=["other blocks", "shorter prompts"]
)
def test_a_prefill_engine_of_another_host_that_differs_is_not_asked(change):
    pair = Pair(num_prefill=2)
    pair.prefill[0].ready = msgspec.structs.replace(READY, **change)
    assert tokens_of(pair.run()) == ANSWER
    assert (len(pair.prefill[0].submitted), len(pair.prefill[1].submitted)) == (0, 1)
    pair.prefill[1].ready = None
    assert tokens_of(pair.run(request_id="b")) == ANSWER
    assert not pair.prefill[0].submitted
    assert pair.fallbacks() == {"missing": 1}
    assert pair.client.engines["prefill-0"] is ("max_model_len" in change)


@pytest.mark.parametrize(
    ("num_tokens", "side"), [(READY.max_model_len, "prefill"), (READY.max_model_len + 1, "decode")]
)
def test_an_embedding_of_a_whole_context_is_computed_by_a_prefill_engine(num_tokens, side):
    pair = Pair()
    prompt = pack_token_ids([1] * num_tokens)
    request = AddRequest("a", prompt, SamplingParams(max_tokens=1), arrival_s=0.0, charge=CHARGE, pooling="last")

    async def outputs():
        return [output async for output in pair.client.submit(request)]

    asyncio.run(outputs())
    assert len(getattr(pair, side)[0].submitted) == 1


def test_decode_engines_of_a_server_are_told_apart_from_those_of_others():
    pair = Pair(num_decode=2)
    pair.client = PairedEngineClient(
        pair.prefill, pair.decode, min_tokens=4, max_replays=2, metrics=pair.metrics,
        names=["host:1/prefill-0", "decode-0", "decode-1"], first_decode=512,
    )  # fmt: skip
    assert tokens_of(pair.run()) == ANSWER
    assert pair.prefill[0].submitted[0].hand_over == HandOver(512, is_prefill=True, max_tokens=4)
    assert pair.decode[0].submitted[0].hand_over == HandOver(0)
    assert list(pair.client.engines) == ["host:1/prefill-0", "decode-0", "decode-1"]
    assert pair.client.client_of("host:1/prefill-0")[1] is pair.prefill[0]


def test_without_prefill_engines_nothing_falls_back():
    pair = Pair(num_prefill=0, num_decode=2)
    assert tokens_of(pair.run()) == ANSWER
    assert pair.fallbacks() == {}


def test_state_is_that_of_the_decode_engines():
    pair = Pair(num_decode=2)
    assert pair.client.ready == READY
    assert pair.client.engines == {"prefill-0": True, "decode-0": True, "decode-1": True}
    pair.decode[0].is_full = True
    assert not pair.client.is_full
    pair.decode[1].ready = None
    assert pair.client.is_full
    pair.prefill[0].ready = None
    assert pair.client.engines == {"prefill-0": False, "decode-0": True, "decode-1": False}
    pair.decode[0].ready = None
    assert pair.client.ready is None
