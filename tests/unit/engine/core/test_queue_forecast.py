"""The predicted wait, refusals by it, and deadlines that cannot be met."""

from itertools import islice

import msgspec
import pytest

from benchmarks.overload import measure, poisson
from benchmarks.simulation import Arrival, Simulation
from engine.core.queue_forecast import QueueForecast
from engine.core.request import Request
from engine.core.waiting_queue import WaitingQueue
from engine.interface.protocol import HandOver, QueueCosts, RequestFailed, SamplingParams
from engine.interface.tenant import Charge, Tenant
from tests.support.engine_harness import Harness


def request(tenant: str = "", num_prompt: int = 100, *, max_tokens: int = 50, weight: float = 1.0, priority: int = 0):
    made = Request("r", [1] * num_prompt, SamplingParams(max_tokens=max_tokens))
    made.tenant_id, made.weight, made.priority, made.num_expected_tokens = tenant, weight, priority, max_tokens
    return made


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for number, queued in enumerate(requests):
        queued.sort_key = (queued.priority, 0.0, number)
        queue.add(queued)
    return queue


def measured() -> QueueForecast:
    """A forecast that has seen 1 ms a prompt token and 10 ms a generated one."""
    forecast = QueueForecast()
    forecast._prompt.add(1.0, 1.0, 1000)
    forecast._answer.add(1.0, 1.0, 100)
    return forecast


def test_without_a_measurement_no_wait_is_predicted() -> None:
    assert QueueForecast().wait_s(request(), queue_of(request()), num_free_rows=0) == 0


def test_a_request_that_starts_at_once_waits_for_prompts_alone() -> None:
    assert measured().wait_s(request(), queue_of(request()), num_free_rows=2) == pytest.approx(0.2)


def test_the_wait_is_the_queued_work_by_its_rate() -> None:
    # two queued requests and its own work of 0.1 + 0.5 s, and the own prompt
    assert measured().wait_s(request(), queue_of(request(), request()), num_free_rows=0) == pytest.approx(1.9)


def test_of_another_tenants_queue_only_its_share_comes_first() -> None:
    flood = [request("flood") for _ in range(500)]
    wait_s = measured().wait_s(request("guest"), queue_of(*flood), num_free_rows=0)
    assert wait_s == pytest.approx(0.6 + 0.6 + 0.1)
    heavy = measured().wait_s(request("guest", weight=3.0), queue_of(*flood), num_free_rows=0)
    assert heavy == pytest.approx(0.6 + 0.2 + 0.1)


def test_what_the_prefix_cache_has_is_no_work() -> None:
    forecast = measured()
    for _ in range(50):
        cached = request()
        cached.num_cached_tokens = 90
        forecast.observe_start(cached)
    assert forecast.wait_s(request(), queue_of(request()), num_free_rows=2) == pytest.approx(0.02)


def test_a_prompt_that_a_prefill_engine_computed_is_no_work() -> None:
    forecast, given = measured(), [request(num_prompt=5000) for _ in range(2)]
    for other in given:
        other.hand_over = HandOver(0)
    assert forecast.wait_s(request(), queue_of(*given), num_free_rows=3) == pytest.approx(0.1)
    assert forecast.wait_s(request(), queue_of(*given), num_free_rows=0) == pytest.approx(0.5 * 2 + 0.6 + 0.1)
    assert forecast.drain_s(queue_of(*given)) == pytest.approx(1.0)


def test_later_priorities_are_not_ahead() -> None:
    queue = queue_of(request(priority=0), request(priority=5), request(priority=5))
    assert measured().wait_s(request(priority=1), queue, num_free_rows=0) == pytest.approx(0.6 + 0.6 + 0.1)


def test_answers_are_expected_as_long_as_earlier_ones() -> None:
    forecast = QueueForecast()
    asked = request(max_tokens=1000)
    assert forecast.num_expected_tokens(asked) == 256
    for _ in range(200):
        ended = request()
        ended.finish_reason, ended.output_token_ids = "stop", [1] * 20
        forecast.observe_end(ended)
    assert forecast.num_expected_tokens(asked) == pytest.approx(20, abs=1)
    assert forecast.num_expected_tokens(request(max_tokens=5)) == 5


def burst(costs: QueueCosts | None) -> tuple[list[float], list[float]]:
    """Return the predicted and the true waits of 300 requests that come at once to a fresh engine."""
    simulation = Simulation(max_queue_wait_s=None)
    if costs is not None:
        simulation.transport.inbox.append((0, costs))
    load = [arrival._replace(at_s=0.0) for arrival in islice(poisson(1.0, seed=5), 300)]
    simulation.run(iter(load), until_s=1e-6)
    predicted = {id_: each.expected_first_s for id_, each in simulation.engine.scheduler.requests.items()}
    outcomes = {f"{each.arrival.tenant}-{each.arrival.number}": each for each in simulation.run(iter(()), until_s=60.0)}
    found = [(predicted[id_], each.ttft_s) for id_, each in outcomes.items() if each.ttft_s and each.ttft_s > 1.0]
    return [first_s or 0.0 for first_s, _ in found], [ttft_s for _, ttft_s in found]


def test_a_fresh_engine_predicts_by_what_an_earlier_one_measured() -> None:
    earlier = Simulation(max_queue_wait_s=2.0)
    earlier.run(poisson(60.0, seed=1), until_s=20.0)
    told = [message for message in earlier.told if isinstance(message, QueueCosts)]
    assert 15 <= len(told) <= 21
    predicted, true = burst(told[-1])
    assert len(true) > 200
    assert all(0.5 < first_s / wait_s < 2.0 for first_s, wait_s in zip(predicted, true, strict=True))
    assert not any(burst(None)[0])  # it knows nothing by itself


def test_measurements_of_an_earlier_engine_count_little_and_never_replace_its_own() -> None:
    forecast = measured()
    for number in range(100):
        for tenant in (f"t{number}", "busy"):
            ended = request(tenant)
            ended.finish_reason, ended.output_token_ids = "stop", [1] * 20
            forecast.observe_end(ended)
    costs = msgspec.msgpack.decode(msgspec.msgpack.encode(forecast.costs()), type=QueueCosts)
    assert len(costs.answers) == 64
    assert "t0" not in costs.answers
    fresh = QueueForecast()
    fresh.begin_with(costs)
    assert fresh.wait_s(request("busy"), queue_of(request()), num_free_rows=0) == pytest.approx(1.3)
    assert fresh.num_expected_tokens(request("busy", max_tokens=1000)) == forecast.num_expected_tokens(
        request("busy", max_tokens=1000)
    )
    for _ in range(16):
        ended = request("busy")
        ended.finish_reason, ended.output_token_ids = "stop", [1] * 200
        fresh.observe_end(ended)
    assert fresh.num_expected_tokens(request("busy", max_tokens=1000)) > 120
    fresh.num_steps = 1
    fresh.begin_with(QueueForecast().costs())
    assert fresh.wait_s(request("busy"), queue_of(request()), num_free_rows=0) > 1.0


def test_errors_widen_the_margin_but_never_beyond_the_prediction() -> None:
    forecast = measured()
    late = request()
    late.expected_first_s, late.first_token_s = 10.0, 13.0
    forecast.observe_start(late)
    assert forecast.margin_s(8.0) == 3.0
    assert forecast.margin_s(1.0) == 1.0
    assert forecast.margin_s(0.0) == 0.0


def busy(**limits) -> Harness:
    """An engine with one row, whose steps are measured, and a queue."""
    harness = Harness(max_num_seqs=1, num_pages=100, **limits)
    harness.add("first", [1] * 4, 8)
    harness.drain()
    harness.add("running", [2] * 4, 40)
    harness.turn(3)
    for index in range(6):
        harness.add(f"queued{index}", [3] * 4, 40)
    harness.turn()
    return harness


def failure(harness: Harness, request_id: str) -> RequestFailed:
    (found,) = [m for _, m in harness.messages if isinstance(m, RequestFailed) and m.request_id == request_id]
    return found


def test_a_request_that_would_wait_too_long_is_refused_at_once_and_fits_after_retry_after() -> None:
    harness = busy(max_queue_wait_s=0.05)
    harness.add("late", [4] * 4, 40, charge=Charge(4, 44))
    harness.turn()
    refused = failure(harness, "late")
    assert refused.code == "overloaded"
    assert "the limit is 0.05 s" in refused.message
    assert refused.retry_after_s >= 1
    harness.clock.now += refused.retry_after_s
    harness.drain()
    harness.add("again", [4] * 4, 40, charge=Charge(4, 44))
    harness.drain()
    assert harness.seen["again"].ends == ["length"]


def test_a_request_that_has_waited_for_this_engine_is_refused_for_its_deadline_alone() -> None:
    harness = busy(max_queue_wait_s=0.05, max_queued_requests=6)
    for name in ("late", "later"):
        harness.add(name, [4] * 4, 40, charge=Charge(4, 44), has_waited=True)
    harness.add("hopeless", [4] * 4, 40, has_waited=True, deadline_s=harness.clock.now + 0.02)
    harness.turn()
    assert "until its timeout" in failure(harness, "hopeless").message
    harness.drain()
    assert harness.seen["late"].ends == harness.seen["later"].ends == ["length"]


def test_a_deadline_before_the_first_token_is_refused_at_once() -> None:
    harness = busy()
    harness.add("late", [4] * 4, 40, deadline_s=harness.clock.now + 0.02)
    harness.turn()
    refused = failure(harness, "late")
    assert refused.code == "overloaded"
    assert "this request has 0.0" in refused.message
    assert " 0.0 s" not in refused.message, "two numbers that differ are told apart"
    assert refused.message.endswith("until its timeout.")
    harness.drain()


def test_a_request_whose_deadline_passes_in_the_queue_is_refused_before_its_prefill() -> None:
    harness = busy()
    harness.add("hopeful", [9] * 4, 40, deadline_s=harness.clock.now + 3.0)
    harness.turn()
    assert not harness.seen["hopeful"].ends
    harness.clock.now += 10.0
    harness.drain()
    assert failure(harness, "hopeful").code == "overloaded"
    assert harness.seen["hopeful"].token_ids == []


def test_a_lone_late_request_is_told_before_the_loop_sleeps() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("late", [1] * 4, deadline_s=harness.clock.now - 1.0)
    harness.turn()
    assert harness.seen["late"].ends == ["overloaded"]
    assert harness.engine.is_idle


def test_under_overload_the_capacity_is_used_and_refusals_are_immediate() -> None:
    report = measure(load=3.0, limit_s=2.0, duration_s=24.0, num_floods=2)
    assert report.limited.goodput_ratio >= 0.9
    assert report.limited.late_share < 0.3
    assert report.limited.refusal_max_s < 0.2
    assert report.unlimited.goodput_ratio < 0.2
    assert report.fairness.fairness_ratio < 1.6 < report.fairness_launched_at_once.fairness_ratio
    assert report.fairness_measured_steps.fairness_ratio < 1.65
    assert report.fairness_uneven.fairness_ratio < 2.0
    assert report.fairness_cpu.fairness_ratio < 1.75


def test_refused_clients_that_come_back_in_time_are_served() -> None:
    simulation = Simulation(max_queue_wait_s=2.0, tenants=[Tenant(name="load")])
    burst = [Arrival(0.0, i, "load", 256, 64) for i in range(60)]
    burst += [Arrival(3.0, 60 + i, "load", 256, 64) for i in range(400)]
    outcomes = simulation.run(iter(burst), until_s=60.0)
    refused = [outcome for outcome in outcomes if outcome.refused_s is not None]
    assert refused
    again_s = 3.0 + max(outcome.retry_after_s or 0 for outcome in refused)
    later = [Arrival(again_s + 60, 1000 + i, "load", 256, 64) for i in range(10)]
    outcomes = simulation.run(iter(later), until_s=200.0)
    assert all(outcome.refused_s is None for outcome in outcomes if outcome.arrival.number >= 1000)
