"""Captures after the start pause for messages: a request waits for a layer, and no graph or memory is lost."""

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.core.local_client import generate
from engine.interface.protocol import AddRequest, ClientGone, SamplingParams, StepEvents, ToEngine, pack_token_ids
from tests.support.fake_graphs import FakeGraphDevice, capture_on
from tests.unit.engine.device.test_graph_captures import LENGTHS, idle_turns, load, make_device, tokens_without_graphs
from tests.unit.engine.test_real_model import mixed_params, prompts, tokens


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return tokens_without_graphs(checkpoint)


@pytest.fixture(autouse=True)
def pauses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.graph_captures._LEAST_S", 0.0)


def test_a_request_that_arrives_during_a_capture_is_served_before_the_next(checkpoint: Path) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    request = AddRequest("r", pack_token_ids([1, 2, 3]), SamplingParams(max_tokens=6), arrival_s=0.0)
    device.on_capture = lambda: offline.transport.inbox.append((0, request))
    offline.engine.run_once(0.0)
    device.on_capture = lambda: None
    num_left = captures.num_left
    while not offline.engine.is_idle or offline.transport.inbox:
        assert captures.num_left == num_left  # none while there is work
        offline.engine.run_once(0.0)
    events = [message for message in offline.transport.outbox if isinstance(message, StepEvents)]
    assert sum(sum(message.num_tokens) for message in events) == 6


def test_a_request_that_arrives_between_two_layers_pauses_the_capture(checkpoint: Path) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    num_left, num_graphs = captures.num_left, len(device.graphs)
    num_layers = offline.loaded.model_config.num_layers
    device.runs = True
    num_checks = 0

    def arrives_at_second_layer() -> bool:
        nonlocal num_checks
        num_checks += 1
        return num_checks == 2

    assert captures.capture_next(arrives_at_second_layer)
    assert num_checks == 2
    assert (captures.num_left, len(device.graphs)) == (num_left, num_graphs)
    captures.capture_next(arrives_at_second_layer)  # the same size from its second layer on
    assert num_checks == num_layers
    assert (captures.num_left, len(device.graphs)) == (num_left - 1, num_graphs + 1)


def test_a_message_during_a_capture_of_the_loop_pauses_it(checkpoint: Path, expected: list[list[int]]) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    num_left = captures.num_left
    device.runs = True
    request = AddRequest("r", pack_token_ids([1, 2, 3]), SamplingParams(max_tokens=6), arrival_s=0.0)
    device.before_run = lambda: offline.transport.inbox.append((0, request))
    offline.engine.run_once(0.0)
    device.runs = False  # not after the first real step, whose rows a pass would read
    assert (captures.num_left, device.num_pauses) == (num_left, 1)
    while not offline.engine.is_idle or offline.transport.inbox:
        offline.engine.run_once(0.0)
    assert captures.num_left == num_left
    offline.transport.outbox.clear()
    list(idle_turns(offline))
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected


def test_captures_that_pause_before_each_layer_end(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    num_layers = offline.loaded.model_config.num_layers
    device.runs = True
    num_left = captures.num_left
    with caplog.at_level(logging.INFO):
        for num_captured in range(num_left):
            for _ in range(num_layers):
                assert captures.capture_next(lambda: True)
                assert captures.num_left == num_left - num_captured
            captures.capture_next(lambda: True)
    assert captures.num_left == 0
    assert f"late graphs captured={num_left} failed=0 pauses={num_layers * num_left}" in caplog.text


def test_a_message_waits_for_the_layer_and_for_the_end_of_the_piece(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0

    class SlowDevice(FakeGraphDevice):
        @contextlib.contextmanager
        def outside_capture(self) -> Iterator[None]:
            nonlocal now_s
            now_s += 0.003  # the end of a piece
            with super().outside_capture():
                yield
            now_s += 0.002  # the next layer

    monkeypatch.setattr("engine.device.graph_captures.time", Mock(perf_counter=lambda: now_s))
    offline = load(checkpoint)
    device = SlowDevice(offline.loaded.model_config.hidden_size)
    captures = capture_on(offline, device, is_partial=True)
    device.runs = True
    with caplog.at_level(logging.INFO):
        while captures.capture_next(lambda: True):
            pass
    assert "longest_wait_ms=5.0" in caplog.text


def test_pieces_are_not_shorter_than_a_while(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    num_left = captures.num_left
    device.runs = True
    monkeypatch.setattr("engine.device.graph_captures._LEAST_S", 1000.0)
    captures.capture_next(lambda: True)
    assert (captures.num_left, device.num_pauses) == (num_left - 1, 0)


def test_a_client_has_time_for_its_next_request_before_a_capture_goes_on(checkpoint: Path) -> None:
    offline = load(checkpoint)
    captures = capture_on(offline, make_device(offline), is_partial=True)
    num_left, receive, timeouts_s = captures.num_left, offline.transport.receive, list[float | None]()
    request = AddRequest("r", pack_token_ids([1, 2, 3]), SamplingParams(max_tokens=2), arrival_s=0.0)

    def receive_late(timeout_s: float | None) -> list[tuple[int, ToEngine | ClientGone]]:
        timeouts_s.append(timeout_s)
        offline.transport.inbox.append((0, request))  # meanwhile
        return receive(timeout_s)

    offline.transport.receive = receive_late  # type: ignore[method-assign]
    offline.engine.run_once(None)
    offline.transport.receive = receive  # type: ignore[method-assign]
    assert timeouts_s == [0.005]
    while not offline.engine.is_idle:
        assert captures.num_left == num_left
        offline.engine.run_once(0.0)
    offline.engine.run_once(0.0)
    assert captures.num_left == num_left - 1


def test_urgent_captures_pause_after_a_while(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = load(checkpoint)
    times = capture_on(offline, make_device(offline), is_partial=True).mixed.times
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True, known=times)
    num_left = captures.num_left
    device.runs = True
    monkeypatch.setattr("engine.device.graph_captures._URGENT_S", 0.0)
    for num_pauses in range(1, offline.loaded.model_config.num_layers + 1):
        assert captures.capture_urgent()
        assert (captures.num_left, device.num_pauses) == (num_left, num_pauses)
    captures.capture_urgent()
    assert captures.num_left == num_left - 1


def test_pinning_rests_beside_captures(checkpoint: Path) -> None:
    offline = load(checkpoint)
    num_left = capture_on(offline, make_device(offline), is_partial=True).num_left
    pins = Mock()
    offline.loaded.runner.host_pages = Mock(pins=pins)
    list(idle_turns(offline))
    assert pins.note_step.call_count == num_left


def test_a_paused_capture_ends_with_its_engine(checkpoint: Path) -> None:
    threads = set(threading.enumerate())
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    device.runs = True
    assert captures.capture_next(lambda: True)
    assert "quire-capture" in {thread.name for thread in set(threading.enumerate()) - threads}
    offline.loaded.close()
    assert "quire-capture" not in {thread.name for thread in set(threading.enumerate()) - threads}
    assert not captures.capture_next()


def test_a_paused_capture_that_ends_keeps_no_weights(checkpoint: Path) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    model = weakref.ref(offline.loaded.runner._model)
    device.runs = True
    assert captures.capture_next(lambda: True)
    offline.loaded.close()
    gc.collect()
    assert model() is None


def test_a_capture_that_fails_after_a_pause_leaves_its_size_to_others(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    num_left, num_graphs = captures.num_left, len(device.graphs)
    device.runs = True
    assert captures.capture_next(lambda: True)

    def fails() -> bool:
        raise RuntimeError("no memory for a layer")

    assert captures.capture_next(fails)
    assert (captures.num_left, len(device.graphs)) == (num_left - 1, num_graphs)
    assert "graph not captured" in caplog.text
    assert "no memory for a layer" in caplog.text


def test_a_bug_in_a_capture_is_raised_and_leaves_steps_alone(checkpoint: Path, expected: list[list[int]]) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True)
    device.runs = True

    def fails() -> bool:
        raise ValueError("a bug")

    for _ in range(2):
        with pytest.raises(ValueError, match="a bug"):
            captures.capture_next(fails)
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected
    offline.loaded.close()
