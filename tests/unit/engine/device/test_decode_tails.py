"""Tails of decode steps, replayed as graphs: the tokens of steps that are sampled kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.device.cuda_graph import DecodeSize
from engine.device.decode_tails import DecodeTails
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.fake_graphs import FakeGraph, FakeGraphDevice, capture_on
from tests.unit.engine.device.test_graph_captures import load
from tests.unit.engine.test_real_model import mixed_params, prompts, tokens

LENGTHS = (5, 17, 30, 12, 23)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
DRAWN = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
PLAIN = [GREEDY, DRAWN, GREEDY, SamplingParams(max_tokens=9, temperature=0.0), DRAWN]


def with_graphs(checkpoint: Path, *, depth: int, fails: tuple[int, ...] = ()) -> tuple[OfflineEngine, FakeGraphDevice]:
    """An engine whose steps replay graphs; the captures so numbered, counted from those after the start, fail."""
    offline = load(checkpoint)
    device = FakeGraphDevice(offline.loaded.model_config.hidden_size)
    capture_on(offline, device, is_partial=False, depth=depth)
    device._fails = tuple(device._num_captures + number for number in fails)
    return offline, device


def run(offline: OfflineEngine, params: list[SamplingParams]) -> list[list[int]]:
    return tokens(generate(offline.engine, offline.transport, prompts(*LENGTHS[: len(params)]), params))


def tails_of(device: FakeGraphDevice, num_at_start: int) -> list[FakeGraph]:
    return device.graphs[num_at_start:]


@pytest.mark.parametrize("depth", [1, 2])
def test_plain_rows_are_sampled_by_graphs_and_have_the_same_tokens(checkpoint: Path, depth: int) -> None:
    expected = run(load(checkpoint), PLAIN)
    offline, device = with_graphs(checkpoint, depth=depth)
    num_at_start = len(device.graphs)
    assert run(offline, PLAIN) == expected
    tails = tails_of(device, num_at_start)
    assert len(tails) >= 2  # of 4 rows, of which padding is one later, and of 8
    assert sum(tail.num_replays for tail in tails) > 15
    assert run(offline, PLAIN) == expected
    assert tails_of(device, num_at_start) == tails


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_of_other_kinds_are_sampled_kernel_by_kernel_beside_them(checkpoint: Path, depth: int) -> None:
    params = [mixed_params(7)[kind] for kind in (3, 4, 5, 6, 2)]
    expected = run(load(checkpoint), params)
    offline, device = with_graphs(checkpoint, depth=depth)
    num_at_start = len(device.graphs)
    assert run(offline, params) == expected
    assert not tails_of(device, num_at_start)
    expected = run(load(checkpoint), [*PLAIN[:3], *params[:1]])
    assert run(offline, [*PLAIN[:3], *params[:1]]) == expected


def test_a_tail_is_captured_by_its_second_step(checkpoint: Path) -> None:
    offline, device = with_graphs(checkpoint, depth=2)
    num_at_start = len(device.graphs)
    run(offline, [SamplingParams(max_tokens=2, temperature=0.0)])  # the prompt's token, and one of a decode step
    assert not tails_of(device, num_at_start)
    run(offline, [SamplingParams(max_tokens=2, temperature=0.0)])
    (tail,) = tails_of(device, num_at_start)
    assert tail.num_replays == 1


def test_a_tail_that_cannot_be_captured_runs_kernel_by_kernel(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(load(checkpoint), PLAIN[:1])
    offline, device = with_graphs(checkpoint, depth=2, fails=(0,))
    num_at_start = len(device.graphs)
    assert run(offline, PLAIN[:1]) == expected
    assert run(offline, PLAIN[:1]) == expected
    assert not tails_of(device, num_at_start)
    assert caplog.text.count("tail not captured") == 1


def test_tokens_of_a_step_stay_while_the_next_one_samples(checkpoint: Path) -> None:
    offline, _ = with_graphs(checkpoint, depth=2)
    tails = offline.loaded.runner._tails
    assert isinstance(tails, DecodeTails)
    size = DecodeSize(2, False)
    with torch.inference_mode():
        before = tails.sample(size, 2, has_truncation=False)
        kept = before.on_host[:2].tolist()
        tails._token_ids.fill_(-5)
        tails._run_tail = lambda *_: None
        after = tails.sample(size, 2, has_truncation=True)
    assert before.on_host[:2].tolist() == kept
    assert after.on_host[:2].tolist() == [-5, -5]
