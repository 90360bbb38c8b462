"""Graphs that are captured after the engine is ready: the same tokens, no request waits for more than one of them."""

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from engine.core.local_client import generate
from engine.device.cuda_graph import (
    GROUPED_TOKEN_SIZES,
    DecodeGraphs,
    DecodeSize,
    MixedGraphs,
    graph_sizes,
    grouped_sizes,
    mixed_shapes,
)
from engine.device.input_batch import MixedShape
from engine.device.step_times import StepTimes, spread
from engine.interface.config import EngineConfig
from engine.interface.protocol import AddRequest, SamplingParams, StepEvents, pack_token_ids
from engine.offline import OfflineEngine
from engine.startup.limits import Limits, step_bytes
from models.config.model_config import ModelConfig
from tests.support.fake_graphs import FakeGraphDevice, capture_on
from tests.support.tiny_llama import save_tiny_llama
from tests.unit.engine.test_real_model import mixed_params, prompts, tokens

LENGTHS = (5, 17, 30, 12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens without graphs."""
    offline = load(checkpoint)
    return tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(len(LENGTHS))))


def load(checkpoint: Path) -> OfflineEngine:
    config = EngineConfig(
        model=str(checkpoint), block_size=4, max_num_batched_tokens=200, max_num_seqs=20, max_model_len=80, device="cpu"
    )
    return OfflineEngine.load(config)


def make_device(offline: OfflineEngine, **changes: tuple[int, ...]) -> FakeGraphDevice:
    return FakeGraphDevice(offline.loaded.model_config.hidden_size, **changes)


def idle_turns(offline: OfflineEngine) -> Iterator[int]:
    """Run the loop until all graphs are captured; yield the number that is left after each turn."""
    captures = offline.loaded.captures
    assert captures is not None
    for _ in range(100):
        if captures.num_left == 0:
            return
        offline.engine.run_once(0.0)
        yield captures.num_left
    raise AssertionError("some graphs are never captured")


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_equal_before_while_and_after_the_rest_is_captured(
    checkpoint: Path, expected: list[list[int]], depth: int
) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True, depth=depth)
    num_first = len(device.graphs)
    assert captures.num_left > 0
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected
    offline.engine.run_once(0.0)
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected
    assert captures.num_left > 0
    list(idle_turns(offline))
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected
    everything = len(graph_sizes(20)) + len(mixed_shapes(20, 200))
    assert len(device.graphs) == everything > num_first
    assert any(graph.num_replays for graph in device.graphs[:num_first])
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS[:2]), mixed_params(2))) == expected[:2]
    assert any(graph.num_replays for graph in device.graphs[num_first:])


def test_all_graphs_captured_at_once_leave_none(checkpoint: Path, expected: list[list[int]]) -> None:
    offline = load(checkpoint)
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=False)
    assert captures.num_left == 0
    assert len(device.graphs) == len(graph_sizes(20)) + len(mixed_shapes(20, 200))
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected


def test_after_a_takeover_a_busy_engine_captures_what_a_start_captures_before_it_is_ready(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    offline = load(checkpoint)
    started = capture_on(offline, make_device(offline), is_partial=True)
    num_later, times = started.num_left, started.mixed.times
    device = make_device(offline)
    captures = capture_on(offline, device, is_partial=True, known=times)
    assert 2 <= len(device.graphs) < len(started.mixed.first_sizes) + len(started.decode.first_sizes)
    assert captures.mixed.times == times
    num_all = captures.num_left
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected
    assert captures.num_left < num_all  # though it was never idle
    while captures.num_left > num_later:
        assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected
    assert not captures.capture_urgent()
    for _ in range(3):  # no more of them between steps
        generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))
    assert captures.num_left == num_later
    list(idle_turns(offline))
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected


def test_idle_turns_capture_one_graph_each(checkpoint: Path) -> None:
    offline = load(checkpoint)
    num_left = capture_on(offline, make_device(offline), is_partial=True).num_left
    assert list(idle_turns(offline)) == list(range(num_left - 1, -1, -1))


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


def test_the_largest_sizes_are_captured_first(checkpoint: Path) -> None:
    offline = load(checkpoint)
    captures = capture_on(offline, make_device(offline), is_partial=True)
    assert captures.decode.first_sizes[-1] == captures.decode.sizes[-1] == DecodeSize(20, is_grouped=False)
    assert captures.mixed.first_sizes[-1] == captures.mixed.sizes[-1]


def test_a_capture_that_fails_leaves_its_size_to_others(
    checkpoint: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    offline = load(checkpoint)
    num_first = len(capture_device(offline).graphs)
    offline = load(checkpoint)
    device = make_device(offline, fails=(num_first, num_first + 2))
    captures = capture_on(offline, device, is_partial=True)
    with caplog.at_level(logging.INFO):
        list(idle_turns(offline))
    assert len(device.graphs) == len(graph_sizes(20)) + len(mixed_shapes(20, 200)) - 2
    assert caplog.text.count("graph not captured") == 2
    assert "failed=2" in caplog.text
    assert captures.num_left == 0
    assert tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(4))) == expected


def capture_device(offline: OfflineEngine) -> FakeGraphDevice:
    device = make_device(offline)
    capture_on(offline, device, is_partial=True)
    return device


def test_the_pool_leaves_memory_for_the_graphs_to_come(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are counted by the limits alone, before the first is captured."""
    model = ModelConfig.from_folder(checkpoint)
    all_of_them = step_bytes(model, Limits(256, 8192), torch.bfloat16, vocab_size=0)
    monkeypatch.setattr("engine.startup.limits._GRAPH_BYTES", 0)
    of_graphs = all_of_them - step_bytes(model, Limits(256, 8192), torch.bfloat16, vocab_size=0)
    num_plain = len(graph_sizes(256)) + len(mixed_shapes(256, 8192))
    num_grouped = len(grouped_sizes(256)) + len(GROUPED_TOKEN_SIZES)
    assert of_graphs >= 10 * 1024**2 * (num_plain + num_grouped)


def test_a_size_that_was_not_timed_lies_between_those_that_were() -> None:
    seconds = spread({32: 0.004, 128: 0.004, 256: 0.006, 512: 0.012}, [32, 64, 128, 192, 256, 384, 512, 1024])
    assert seconds == pytest.approx(
        {32: 0.004, 64: 0.004, 128: 0.004, 192: 0.005, 256: 0.006, 384: 0.009, 512: 0.012, 1024: 0.024}
    )


def test_padding_is_worth_it_while_it_takes_no_longer_than_launching() -> None:
    times = StepTimes({64: 0.004, 512: 0.012}, launch_s=0.005)
    assert times.is_worth_padding(40, 64)
    assert not times.is_worth_padding(300, 512)
    assert times.is_worth_padding(512, 512)


@pytest.mark.parametrize("num_seqs", [1, 2, 40, 64, 256, 300])
def test_few_sizes_come_first_and_one_of_them_fits_every_step(num_seqs: int) -> None:
    shapes, sizes = mixed_shapes(num_seqs, 8192), graph_sizes(num_seqs)
    decode = DecodeGraphs(
        lambda *_: torch.empty(0), max_num_seqs=num_seqs, padding_row=0, device=torch.device("cpu"), has_groups=True
    )
    mixed = MixedGraphs(lambda *_: torch.empty(0), shapes=shapes, has_groups=True)
    assert decode.first_sizes[-1].num_rows == sizes[-1]
    assert mixed.first_sizes[-1].shape == shapes[-1] == MixedShape(8192, num_seqs + 1, num_seqs + 1)
    assert not any(size.is_grouped for size in (*decode.first_sizes, *mixed.first_sizes))
    assert len(decode.first_sizes) + len(mixed.first_sizes) <= 18
