"""Each admission tells why the prefix cache had no more of the prompt, and nothing of prompts under others' salts."""

import pytest

from engine.core import prefix_misses, recent_keys
from engine.core.kv_caches import KvCaches
from engine.core.recent_keys import RecentKeys
from engine.core.request import EmbeddingAccumulator, Request
from engine.interface.config import CacheGroup, SchedulerConfig
from engine.interface.protocol import CacheReport, SamplingParams

FULL = CacheGroup("full", 4)
STATE = CacheGroup("state", 8, pages_per_block=3)
WINDOW = CacheGroup("window", 4, window=6)


def make_kv(*groups, num_pages=60, **changes):
    config = SchedulerConfig(
        num_pages=num_pages, block_size=4, groups=groups, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256,
        **changes,
    )  # fmt: skip
    return KvCaches(config)


def run(kv, tokens, *, most=64, keep=False, **fields):
    """Admit and compute a request as steps of its own; return its report, the request as well if it is kept."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=fields.pop("prompt_logprobs", None))
    request = Request("r", list(tokens), params, **fields)
    if fields.get("embedding"):
        request.embedding = fields["embedding"]
    assert kv.admit(request)
    request.num_prefill_tokens = request.num_tokens
    while request.num_computed_tokens < request.num_tokens:
        end = kv.fit(request, min(request.num_computed_tokens + most, request.num_tokens), num_reserved=0)
        step = kv.begin_step()
        kv.begin_row(request, end, step, num_reserved=0)
        request.num_computed_tokens = end
        kv.commit_row(request, end)
        kv.end_step(step, step.saves)
    if keep:
        return request
    kv.free(request)
    return request.cache_report


def others(start, count=1):
    """Tokens that no other prompt has."""
    return [1000 + start + i for i in range(count)]


def test_a_first_prompt_is_new_and_the_same_one_is_there_as_a_whole():
    kv = make_kv()
    assert run(kv, range(18)) == CacheReport("new", 0, 0, "full")
    assert run(kv, range(18)) == CacheReport("all", 16, 16)
    assert kv.num_by_reason == {"new": 1, "all": 1}


def test_a_next_turn_is_new_from_the_last_one_on():
    kv = make_kv()
    run(kv, range(18))
    assert run(kv, range(40)) == CacheReport("new", 16, 16, "full")


def test_a_prompt_that_parts_from_another_differs_in_the_block_behind_the_matched_ones():
    kv = make_kv()
    run(kv, range(40))
    assert run(kv, [*range(18), *others(0, 20)]) == CacheReport("differs", 16, 16, "full")
    assert run(kv, others(0, 20)) == CacheReport("differs", 0, 0, "full")


def test_a_prompt_whose_continuation_was_overwritten_was_evicted():
    kv = make_kv(num_pages=13)
    run(kv, range(40))
    run(kv, others(0, 32))
    report = run(kv, range(40))
    assert report.reason == "evicted"
    assert report.num_matched_tokens == report.num_cached_tokens < 36
    assert run(make_kv(), range(40)).reason == "new"


def test_an_evicted_continuation_of_another_prompt_does_not_count_as_a_difference():
    kv = make_kv(num_pages=13)
    run(kv, range(44))
    kept = run(kv, range(9), keep=True)  # its first two blocks stay
    run(kv, others(0, 34))
    kv.free(kept)
    assert run(kv, [*range(8), *others(100, 10)]) == CacheReport("new", 8, 8, "full")


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [
        ({}, {"cache_salt": "mine"}, "other_salt"),
        ({"cache_salt": "theirs"}, {}, "new"),
        ({"cache_salt": "theirs"}, {"cache_salt": "mine"}, "new"),
        ({"cache_salt": "key a"}, {"cache_salt": "key b", "open_salt": "key b"}, "new"),
        ({"cache_salt": "key a", "open_salt": "key a"}, {"cache_salt": "key b mine", "open_salt": "key b"}, "new"),
        ({"cache_salt": "key", "open_salt": "key"}, {"cache_salt": "key mine", "open_salt": "key"}, "other_salt"),
        ({}, {"lora_index": 1}, "other_adapter"),
        ({"lora_index": 1}, {}, "other_adapter"),
        ({"lora_index": 1}, {"lora_index": 2}, "other_adapter"),
        ({"lora_index": 1, "cache_salt": "theirs"}, {"lora_index": 2}, "new"),
        ({"lora_index": 1}, {"lora_index": 2, "cache_salt": "mine"}, "new"),
        ({"lora_index": 1}, {"lora_index": 1, "cache_salt": "mine"}, "other_salt"),
    ],
)
def test_another_salt_or_adapter_is_told_only_to_clients_that_could_ask_without_it(first, then, reason):
    kv = make_kv()
    run(kv, range(18), **first)
    assert run(kv, range(18), **then) == CacheReport(reason, 0, 0, "full")


def test_a_prompt_of_one_block_is_too_short():
    kv = make_kv()
    assert [run(kv, range(4)).reason for _ in range(2)] == ["too_short", "too_short"]
    assert run(kv, range(5)).reason == "all"
    hybrid = make_kv(FULL, STATE)
    assert [run(hybrid, range(8)).reason for _ in range(2)] == ["too_short", "too_short"]


def test_a_request_that_needs_all_hidden_states_is_computed_whole():
    kv = make_kv()
    run(kv, range(18))
    assert run(kv, range(18), prompt_logprobs=0) == CacheReport("computed_whole", 0, 0)
    assert run(kv, range(18), embedding=EmbeddingAccumulator("mean", 18)) == CacheReport("computed_whole", 0, 0)
    assert run(kv, range(18), embedding=EmbeddingAccumulator("last", 18)) == CacheReport("all", 16, 16)


def test_without_a_cache_the_reason_is_that_it_is_off():
    kv = make_kv(enable_prefix_caching=False)
    assert run(kv, range(18)) == CacheReport("off", 0, 0)
    assert not kv.num_by_reason


def test_a_prompt_that_parts_from_another_has_no_state_there():
    kv = make_kv(FULL, STATE)
    run(kv, range(40))
    prompt = [*range(24), *others(0, 20)]
    assert run(kv, prompt) == CacheReport("no_checkpoint", 0, 24, "state")
    assert run(kv, [*range(24), *others(50, 20)]) == CacheReport("differs", 24, 24, "full")  # at the parting point


def test_a_state_that_was_overwritten_was_evicted():
    kv = make_kv(FULL, STATE)
    run(kv, range(40))
    for block in [block for block in kv.pool.order.settled if len(kv.pool.pages(block)) == 3]:
        kv.pool.spend(block)
    taken = []
    while kv.pool._published[1]:
        taken.append(kv.pool.take(0))
    kv.pool.release(taken)
    assert run(kv, range(40)) == CacheReport("evicted", 0, 32, "state")


def test_blocks_that_left_a_window_limit_a_hit():
    kv = make_kv(FULL, WINDOW)
    run(kv, range(40), most=8)
    for key in [*kv.pool._published[1]]:
        kv.pool.expel(1, key)
    assert run(kv, range(40)) == CacheReport("window_left", 0, 36, "window")


def test_a_hit_without_room_for_it_and_the_live_state_is_not_taken():
    kv = make_kv(FULL, STATE, num_pages=11)
    run(kv, range(9))
    assert run(kv, range(20)) == CacheReport("no_room", 0, 8, "state")


def test_a_report_is_of_the_first_admission():
    kv = make_kv()
    request = run(kv, range(18), keep=True)
    kv.free(request)
    request.num_preemptions = 1
    assert kv.admit(request)
    assert request.cache_report.reason == "new"


def test_a_model_without_full_groups_can_only_tell_of_its_states():
    kv = make_kv(STATE)
    run(kv, range(20))
    assert run(kv, range(20)) == CacheReport("all", 16, 16)
    assert run(kv, others(0, 20)) == CacheReport("no_checkpoint", 0, 0, "state")


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(recent_keys, "_NUM_REMEMBERED", 10)
    monkeypatch.setattr(prefix_misses, "_NUM_CONTINUATIONS", 10)
    keys = RecentKeys()
    for number in range(105):
        keys.add(number.to_bytes(2, "big"))
        assert len(keys._newer) + len(keys._older) <= 20
    assert all(number.to_bytes(2, "big") in keys for number in range(95, 105))
    assert b"\0\0" not in keys
    kv = make_kv()
    for lora_index in range(20):
        run(kv, range(40), lora_index=lora_index)
    misses = kv._misses
    assert len(misses._newer) + len(misses._older) <= 2 * (10 + 9)  # a row's blocks are added together
    assert list(misses._adapters) == [str(number).encode() for number in range(12, 20)]
