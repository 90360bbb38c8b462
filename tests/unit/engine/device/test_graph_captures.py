"""Graphs that are captured after the engine is ready: the same tokens, no request waits for more than one of them."""

import logging
from collections.abc import Iterator
from pathlib import Path

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
from engine.offline import OfflineEngine
from engine.startup.limits import Limits, step_bytes
from models.config.model_config import ModelConfig
from tests.support.fake_graphs import FakeGraphDevice, capture_on
from tests.unit.engine.test_real_model import mixed_params, prompts, tokens

LENGTHS = (5, 17, 30, 12)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return tokens_without_graphs(checkpoint)


def load(checkpoint: Path) -> OfflineEngine:
    config = EngineConfig(
        model=str(checkpoint), block_size=4, max_num_batched_tokens=200, max_num_seqs=20, max_model_len=80, device="cpu"
    )
    return OfflineEngine.load(config)


def tokens_without_graphs(checkpoint: Path) -> list[list[int]]:
    offline = load(checkpoint)
    return tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS), mixed_params(len(LENGTHS))))


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
