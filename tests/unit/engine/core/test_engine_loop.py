"""What clients, metrics and logs see of the loop."""

import logging

import pytest

from engine.core.request import Request
from engine.core.waiting_queue import WaitingQueue
from engine.interface.protocol import Accepted, AddRequest, RequestFailed, SamplingParams, StepEvents, pack_token_ids
from engine.interface.tenant import Charge
from tests.support.engine_harness import VOCAB_SIZE, Harness
from tests.support.fake_executor import _FakeStep

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def counters(harness):
    return harness.metrics._delta.counters


@DEPTHS
def test_a_request_gets_its_tokens_and_one_end(depth):
    harness = Harness(depth=depth)
    harness.add("r", [1, 2, 3], 5, logprobs=0)
    harness.drain()
    seen = harness.seen["r"]
    assert len(seen.token_ids) == 5
    assert seen.ends == ["length"]
    assert seen.num_logprobs == 5


def test_depth_2_launches_a_step_before_it_waits_for_the_one_before():
    harness = Harness(depth=2)
    harness.add("r", [1, 2, 3], 5)
    harness.turn(2)
    assert len(harness.executor.plans) == 2
    assert harness.scheduler.committed_step_id == 0


def test_tokens_are_sent_before_the_next_step_is_sampled(monkeypatch):
    """To launch sampling takes the host longer than to send a token, and the device is busy with layers meanwhile."""
    harness = Harness(depth=2)
    order = []
    sample, send = _FakeStep.sample, harness.transport.send
    monkeypatch.setattr(_FakeStep, "sample", lambda step, masks=None: (order.append("sample"), sample(step, masks)))
    harness.transport.send = lambda client_id, message: (order.append(type(message).__name__), send(client_id, message))
    harness.add("r", [1, 2, 3], 5)
    harness.turn(2)
    assert order == ["Begun", "sample", "StepEvents", "sample"]


@DEPTHS
def test_a_first_token_is_sent_before_it_is_counted(depth):
    harness = Harness(depth=depth)
    seen, send = [], harness.transport.send

    def watch(client_id, message):
        if isinstance(message, StepEvents) and message.started:
            seen.append(counters(harness).get(("prompt_tokens_total", ""), 0))
        send(client_id, message)

    harness.transport.send = watch
    for name in ("a", "b"):
        harness.add(name, [1, 2, 3], 2)
        harness.drain()
    assert seen == [0, 3]
    assert counters(harness)["prompt_tokens_total", ""] == 6
    assert sum(harness.metrics._delta.histograms["request_queue_time_seconds"].counts) == 2


def test_a_request_that_begins_at_once_is_announced_in_one_message():
    harness = Harness(max_num_seqs=1)
    charge = Charge(3, 8)
    for name in ("first", "second"):
        harness.add(name, [1, 2, 3], 5, charge=charge)
    harness.turn()
    accepted = [message.request_id for _, message in harness.messages if isinstance(message, Accepted)]
    assert (harness.begun, accepted) == (["first"], ["second"])
    harness.drain()


def test_blocks_of_a_prompt_are_published_when_somebody_looks_for_them():
    harness = Harness(depth=2, num_pages=65, max_num_batched_tokens=64)
    harness.add("a", list(range(1, 18)), 12)
    harness.turn(2)
    pool, late = harness.scheduler.kv.pool, harness.scheduler.kv.late
    assert harness.seen["a"].token_ids
    assert (pool.num_published(0), len(late.requests())) == (0, 1)
    harness.add("b", list(range(1, 18)), 12)
    harness.turn()
    assert harness.scheduler.requests["b"].num_cached_tokens == 16
    harness.drain()


def test_of_a_prompt_that_nobody_knows_one_block_is_hashed_before_it_is_computed():
    harness = Harness(depth=2, num_pages=65, max_num_batched_tokens=64)
    harness.add("a", list(range(1, 33)), 3)
    harness.turn()
    assert len(harness.scheduler.requests["a"].block_hashes) < 4
    harness.drain()
    harness.add("b", list(range(1, 33)), 3)
    harness.turn()
    assert harness.scheduler.requests["b"].num_cached_tokens == 28
    harness.drain()


def test_depths_give_equal_tokens_under_preemption_and_stops():
    streams = []
    for depth in (1, 2):
        harness = Harness(depth=depth, num_pages=14, max_num_seqs=6)
        for i in range(12):
            harness.add(f"r{i}", [i % 3] * (5 + i), 20, stop_token_ids=[1, 2, 3])
            harness.turn(i % 3)
        harness.drain()
        assert harness.scheduler.num_preemptions > 0
        streams.append(harness.tokens())
    assert streams[0] == streams[1]


def test_prefix_caching_and_preemption_change_no_token():
    streams = []
    for changes in ({}, {"enable_prefix_caching": False}, {"num_pages": 12}):
        harness = Harness(**changes)
        for i in range(8):
            harness.add(f"r{i}", [7] * 9 + [i], 15)
            harness.turn(2)
        harness.drain()
        streams.append(harness.tokens())
    assert harness.scheduler.num_preemptions > 0
    assert streams[0] == streams[1] == streams[2]


def test_cached_tokens_are_reported_with_the_first_token():
    harness = Harness()
    harness.add("first", range_list(13))
    harness.drain()
    harness.add("second", range_list(13))
    harness.add("stranger", range_list(13), cache_salt="another tenant")
    harness.drain()
    cached = [harness.seen[name].num_cached_tokens for name in ("first", "second", "stranger")]
    assert cached == [0, 12, 0]


def test_each_client_gets_one_message_per_step_with_its_own_rows():
    harness = Harness()
    for i in range(4):
        harness.add(f"r{i}", [i + 1], 3, client_id=1 + i % 2)
    harness.drain()
    steps = [(client_id, message.step_id) for client_id, message in harness.messages]
    assert len(steps) == len(set(steps)) == 6
    assert {client_id for client_id, _ in steps} == {1, 2}


def test_abort_is_answered_in_the_same_turn():
    harness = Harness()
    harness.add("r", [1, 2, 3])
    harness.turn(3)
    harness.abort("r")
    harness.turn()
    assert harness.seen["r"].ends == ["abort"]
    harness.drain()


def test_only_its_own_client_can_abort_a_request():
    harness = Harness()
    harness.add("r", [1, 2, 3], client_id=1)
    harness.abort("r", client_id=2)
    harness.drain()
    assert harness.seen["r"].ends == ["length"]


def test_a_client_that_leaves_takes_its_requests_along_and_hears_nothing():
    harness = Harness(max_num_seqs=1)
    harness.add("running", [1, 2, 3], client_id=1)
    harness.add("waiting", [1, 2, 3], client_id=1)
    harness.add("other", [1, 2, 3], client_id=2)
    harness.turn(3)
    num_messages = len(harness.messages)
    harness.leave(1)
    harness.drain()
    assert {client_id for client_id, _ in harness.messages[num_messages:]} == {2}
    assert harness.seen["other"].ends == ["length"]
    assert counters(harness)["requests_finished_total", "abort"] == 2


def test_a_full_queue_refuses_and_serves_on():
    harness = Harness(max_queued_requests=2, max_num_seqs=3)
    for i in range(6):  # three start at once, two wait, one is too many
        harness.add(f"r{i}", [1])
    harness.drain()
    assert [harness.seen[f"r{i}"].ends for i in range(6)] == [["length"]] * 5 + [["overloaded"]]
    (failed,) = [message for _, message in harness.messages if isinstance(message, RequestFailed)]
    assert failed.message == "The queue is full: 2 requests are waiting."


def test_a_queue_is_full_by_its_tokens_too():
    harness = Harness(max_num_seqs=1, max_queued_tokens=20, max_num_batched_tokens=40)
    harness.add("running", [1] * 30)  # an empty queue takes any
    harness.turn()
    for name, num_tokens in (("a", 12), ("b", 9), ("c", 8), ("d", 1)):
        harness.add(name, [2] * num_tokens)
    harness.turn()
    assert harness.queue_states == [True]
    harness.drain()
    ends = {name: seen.ends for name, seen in harness.seen.items()}
    assert ends == {name: ["length"] for name in ("running", "a", "c")} | {name: ["overloaded"] for name in ("b", "d")}
    failed = [message.message for _, message in harness.messages if isinstance(message, RequestFailed)]
    assert failed[0] == ("The queue is full: 12 tokens are waiting, and 9 more would be over the limit of 20.")
    assert harness.queue_states == [True, False]


def test_clients_hear_when_the_queue_is_full_and_when_it_is_not():
    harness = Harness(max_queued_requests=2, max_num_seqs=1)
    harness.add("a", [1], 30)
    harness.turn()
    for name in ("b", "c"):
        harness.add(name, [1], 2)
    assert harness.queue_states == []
    harness.turn()
    assert harness.queue_states == [True]
    harness.abort("c")
    harness.turn()
    assert harness.queue_states == [True, False]
    harness.drain()
    assert harness.queue_states == [True, False]


@pytest.mark.parametrize(
    ("prompt", "changes", "code"),
    [
        ([1] * 64, {}, "context_length_exceeded"),
        ([], {}, "invalid_parameter"),
        ([1, VOCAB_SIZE], {}, "invalid_parameter"),
        ([1, -1], {}, "invalid_parameter"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "invalid_parameter"),
        ([1], {"max_tokens": 0}, "invalid_parameter"),
    ],
)
def test_an_impossible_request_fails_alone(prompt, changes, code):
    harness = Harness()
    harness.add("good", [1, 2, 3])
    harness.add("bad", prompt, **changes)
    harness.drain()
    assert harness.seen["bad"].ends == [code]
    assert harness.seen["good"].ends == ["length"]
    (failed,) = [message for _, message in harness.messages if isinstance(message, RequestFailed)]
    assert failed.message[0].isupper()
    assert failed.message.endswith(".")
    assert ("requests_finished_total", "error") not in counters(harness)  # the worker counts it as rejected


def test_a_request_id_in_use_is_refused_for_the_second_client_only():
    harness = Harness()
    harness.add("r", [1, 2], client_id=1)
    harness.turn()
    harness.transport.inbox.append((2, AddRequest("r", pack_token_ids([3]), SamplingParams(max_tokens=1), 0.0)))
    harness.drain()
    assert [message.code for client_id, message in harness.messages if client_id == 2] == ["invalid_parameter"]
    assert harness.seen["r"].ends == ["length"]


def test_a_client_that_leaves_with_a_long_queue_delays_no_decoding_row():
    """The work of one iteration is bounded: it ends some of the requests, and decodes."""
    harness = Harness(max_num_seqs=1, max_queued_requests=2000)
    harness.add("decoding", [1, 2, 3], 40)
    harness.turn(2)
    for index in range(1000):
        harness.add(f"queued {index}", [1], client_id=2)
    harness.turn()
    harness.leave(2)
    numbers = []
    while harness.scheduler.waiting.requests:
        num_waiting, step_id = len(harness.scheduler.waiting.requests), harness.scheduler.committed_step_id
        harness.turn()
        numbers.append(num_waiting - len(harness.scheduler.waiting.requests))
        assert harness.scheduler.committed_step_id == step_id + 1
    assert sum(numbers) == 1000
    assert max(numbers) <= 256
    harness.drain()


def test_a_request_leaves_the_queue_without_a_search_through_it():
    num_comparisons = 0

    class CountingKey(tuple[float, ...]):
        __slots__ = ()

        def __lt__(self, other: object) -> bool:
            nonlocal num_comparisons
            num_comparisons += 1
            return tuple.__lt__(self, other)

    class CountingRequest(Request):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_comparisons
            num_comparisons += 1
            return self is other

    queue = WaitingQueue()
    requests = [CountingRequest(str(index), [1], SamplingParams(max_tokens=1)) for index in range(1000)]
    for index, request in enumerate(requests):
        request.sort_key = CountingKey((0, float(index), index))
        queue.add(request)
    num_comparisons = 0
    for index in (999, 500, 0):
        queue.remove(requests[index])
    assert num_comparisons < 50
    queue.check()
    assert len(queue.requests) == 997


def test_requests_that_run_or_wait_end_with_an_event_each_when_they_are_aborted():
    harness = Harness(max_num_seqs=1)
    harness.add("running", [1, 2, 3])
    harness.add("waiting", [4])
    harness.turn(2)
    for name in ("running", "waiting"):
        harness.abort(name)
    harness.drain()
    assert [seen.ends for seen in harness.seen.values()] == [["abort"], ["abort"]]


def test_the_loop_does_not_block_while_an_event_is_unsent():
    harness = Harness()
    harness.add("waiting", [1])
    harness.add("also waiting", [2])
    for client_id, message in harness.transport.receive(0):
        harness.engine._handle(client_id, message)
    for name in ("waiting", "also waiting"):
        harness.engine._abort(name)
    assert not harness.scheduler.has_work
    assert not harness.engine.is_idle
    harness.engine.run_once()
    assert harness.engine.is_idle
    assert [seen.ends for seen in harness.seen.values()] == [["abort"], ["abort"]]


def test_metrics_count_requests_tokens_and_times():
    harness = Harness()
    harness.add("a", range_list(9), 3)
    harness.drain()
    harness.add("b", range_list(9), 4)
    harness.drain()
    delta = harness.metrics.drain()
    assert delta.counters["prompt_tokens_total", ""] == 18
    assert delta.counters["prompt_tokens_cached_total", ""] == 8
    assert delta.counters["generation_tokens_total", ""] == 7
    assert delta.counters["requests_finished_total", "length"] == 2
    assert delta.counters["prefix_cache_queries_total", ""] == 18
    assert delta.counters["prefix_cache_hits_total", ""] == 8
    assert ("num_preemptions_total", "") not in delta.counters
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert sum(delta.histograms[f"request_{name}_seconds"].counts) == 2
    assert delta.histograms["request_prompt_tokens"].sum == 18
    assert delta.histograms["request_generation_tokens"].sum == 7
    assert delta.histograms["iteration_tokens"].sum == 9 + 2 + 1 + 3  # the second time 8 of 9 are cached
    assert sum(delta.histograms["step_time_seconds"].counts) == 2 + 3  # between commits, not across idle time
    assert delta.histograms["iteration_requests"].sum == sum(delta.histograms["iteration_requests"].counts) == 3 + 4
    assert delta.gauges["kv_cache_blocks_total", ""] == 32


def test_gauges_show_what_is_held():
    harness = Harness(max_num_seqs=1)
    harness.add("running", range_list(9))
    harness.add("waiting", [1])
    harness.turn()
    harness.engine.record_state()
    gauges = harness.metrics.drain().gauges
    assert gauges["num_requests_running", ""] == gauges["num_requests_waiting", ""] == 1
    assert gauges["num_requests_waiting_by_reason", "capacity"] == 1
    assert gauges["num_requests_waiting_by_reason", "deferred"] == 0
    assert gauges["kv_cache_blocks_used", ""] == 3
    assert gauges["kv_cache_usage_ratio", ""] == 3 / 32


def test_cached_blocks_that_are_overwritten_count_as_evictions():
    harness = Harness(num_pages=6)
    for name, token_id in (("a", 1), ("b", 2)):
        harness.add(name, [token_id] * 16, 1)
        harness.drain()
    assert counters(harness)["prefix_cache_evictions_total", ""] == sum(harness.scheduler.kv.pool.num_evictions) > 0


def test_preemptions_are_counted():
    harness = Harness(num_pages=6)
    harness.add("a", range_list(4), 12)
    harness.add("b", range_list(4), 12)
    harness.drain()
    assert counters(harness)["num_preemptions_total", ""] == harness.scheduler.num_preemptions > 0


def test_a_busy_engine_logs_every_10_seconds_and_an_idle_one_never(caplog):
    caplog.set_level(logging.INFO, "engine")
    harness = Harness()
    harness.turn()
    harness.clock.now += 60
    harness.turn()
    assert not caplog.records
    harness.add("r", range_list(5), 12)
    for _ in range(10):
        harness.turn()
        harness.clock.now += 3
    assert len(caplog.records) == 2
    assert "running=1 waiting=0 kv_usage=" in caplog.messages[0]


def test_an_idle_engine_blocks_for_messages_and_a_busy_one_polls():
    harness = Harness()
    timeouts = []
    receive = harness.transport.receive

    def recording(timeout_s):
        timeouts.append(timeout_s)
        return receive(timeout_s)

    harness.transport.receive = recording
    harness.engine.run_once()
    harness.add("r", [1], 2)
    for _ in range(4):
        harness.engine.run_once()
    assert timeouts == [None, None, 0, 0, None]


def test_nothing_is_sent_while_nothing_happens():
    harness = Harness()
    harness.turn(3)
    harness.add("r", range_list(40), 1)
    harness.turn(3)  # chunks without a token
    assert harness.messages == []
    harness.drain()
    assert all(isinstance(message, StepEvents) for _, message in harness.messages)


def range_list(stop):
    return list(range(stop))
