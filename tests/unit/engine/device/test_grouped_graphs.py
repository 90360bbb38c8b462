"""Which graphs serve steps whose rows are grouped, and what groups are estimated to cost."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core.local_client import generate
from engine.core.step import StepPlan
from engine.device.cuda_graph import (
    GROUPED_TOKEN_SIZES,
    TOKEN_SIZES,
    DecodeGraphs,
    DecodeSize,
    MixedGraphs,
    MixedSize,
    grouped_sizes,
    mixed_shapes,
)
from engine.device.input_batch import MixedShape
from engine.device.step_times import StepTimes
from engine.interface.config import EngineConfig, SharingRates
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.limits import sharing_rates
from models.config.model_config import ModelConfig
from tests.support.fake_graphs import FakeGraphDevice, capture_on

SHAPES = Path("benchmarks/shapes")


@pytest.mark.parametrize("most", [1, 3, 4, 24, 256, 257, 1000])
def test_sizes_of_decode_graphs_ascend_to_the_most_rows(most: int) -> None:
    sizes = grouped_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most


def test_groups_take_few_graphs_more() -> None:
    device = torch.device("cpu")

    def count(has_groups: bool) -> int:
        decode = DecodeGraphs(
            lambda rows, is_grouped, layers: rows,
            max_num_seqs=256,
            padding_row=256,
            device=device,
            has_groups=has_groups,
        )
        return len(decode.sizes) + len(graphs(has_groups=has_groups).sizes)

    assert count(has_groups=True) - count(has_groups=False) == len(grouped_sizes(256)) + len(GROUPED_TOKEN_SIZES)


def graphs(*, has_groups: bool) -> MixedGraphs:
    """Those of 256 requests, a step of which takes 10 ms, and 10 µs for each token."""
    made = MixedGraphs(
        lambda shape, is_grouped, layers: torch.empty(0), shapes=mixed_shapes(256, 8192), has_groups=has_groups
    )
    device = FakeGraphDevice(1)
    for size in made.sizes:
        made.capture(size, device)
    made.times = StepTimes({size: 0.01 + size * 1e-5 for size in TOKEN_SIZES}, 0.1)
    return made


def test_a_mixed_step_is_grouped_if_its_padding_costs_less_than_the_groups_spare() -> None:
    made, needed = graphs(has_groups=True), MixedShape(300, 250, 3)
    plain = made.fitting_shape(needed)
    assert plain is not None
    assert plain.num_tokens == 320
    grouped = made.grouped_shape(needed, plain, spared_s=2e-3)  # padding to 512 costs 1.92 ms
    assert grouped is not None
    assert grouped.num_tokens == 512
    assert grouped.num_rows >= needed.num_rows
    assert made.grouped_shape(needed, plain, spared_s=1.9e-3) is None
    long = MixedShape(5000, 250, 3)
    shape = made.fitting_shape(long)
    assert shape is not None
    assert made.grouped_shape(long, shape, spared_s=1.0) is None
    assert graphs(has_groups=False).grouped_shape(needed, plain, spared_s=1.0) is None


def shared_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that begin alike, and end at different times; the first one's blocks are cached before the others."""
    document = list(range(3, 35))
    prompts = [document + [40 + index] * (1 + index) for index in range(9)]
    return prompts, [SamplingParams(max_tokens=4 + index, temperature=0.7, seed=index) for index in range(9)]


def load(checkpoint: Path, sharing: SharingRates | None) -> OfflineEngine:
    config = EngineConfig(
        model=str(checkpoint), block_size=4, max_num_batched_tokens=200, max_num_seqs=6, max_model_len=80, device="cpu"
    )
    offline = OfflineEngine.load(config)
    offline.loaded.runner._has_groups = sharing is not None
    limits = msgspec.structs.replace(offline.loaded.scheduler_config, sharing=sharing)
    return OfflineEngine(dataclasses.replace(offline.loaded, scheduler_config=limits))


def generate_twice(offline: OfflineEngine) -> list[list[int]]:
    """Return the tokens of requests whose prefix is cached."""
    prompts, params = shared_requests()
    generate(offline.engine, offline.transport, prompts[:1], params[:1])
    return [each.token_ids for each in generate(offline.engine, offline.transport, prompts, params)]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_with_groups_replay_other_graphs_until_theirs_are_captured(checkpoint: Path, depth: int) -> None:
    plain = load(checkpoint, None)
    expected = generate_twice(plain)
    offline = load(checkpoint, SharingRates(chunk_tokens=8))
    forward, grouped = offline.loaded.runner.forward, []

    def watch(plan: StepPlan) -> object:
        grouped.append(plan.is_grouped)
        return forward(plan)

    offline.loaded.runner.forward = watch  # type: ignore[assignment, method-assign]
    device = FakeGraphDevice(offline.loaded.model_config.hidden_size)
    captures = capture_on(offline, device, is_partial=True, depth=depth)

    def replays(graphs: DecodeGraphs | MixedGraphs) -> list[int]:
        return [graph.num_replays for size, graph in graphs._graphs.items() if size.is_grouped]  # type: ignore[attr-defined]

    assert generate_twice(offline) == expected
    assert any(grouped)
    assert replays(captures.decode) == replays(captures.mixed) == []
    grouped.clear()
    while captures.capture_next():
        pass
    assert generate_twice(offline) == expected
    assert len(replays(captures.decode)) == len(grouped_sizes(6))
    assert len(replays(captures.mixed)) == 2  # of 128 and 256 tokens
    assert 0 < sum(replays(captures.decode)) + sum(replays(captures.mixed)) == sum(grouped)


def test_all_graphs_captured_at_once_include_those_of_groups(checkpoint: Path) -> None:
    offline = load(checkpoint, SharingRates(chunk_tokens=8))
    captures = capture_on(offline, FakeGraphDevice(64), is_partial=False)
    assert captures.num_left == 0
    assert sum(size.is_grouped for size in captures.decode._graphs) == len(grouped_sizes(6))


def test_kernels_of_groups_run_before_any_capture(checkpoint: Path) -> None:
    """So that no capture compiles one."""
    offline = load(checkpoint, SharingRates(chunk_tokens=8))
    runner, ran = offline.loaded.runner, []
    run_decode, run_mixed = runner._run_decode, runner._run_mixed

    def decode(req_index: torch.Tensor, max_seq_len: int, **options: Any) -> torch.Tensor:
        ran.append(DecodeSize(len(req_index), options["is_grouped"]))
        return run_decode(req_index, max_seq_len, **options)

    def mixed(shape: MixedShape, max_seq_len: int, **options: Any) -> torch.Tensor:
        ran.append(MixedSize(shape, options["is_grouped"]))
        return run_mixed(shape, max_seq_len, **options)

    runner._run_decode, runner._run_mixed = decode, mixed  # type: ignore[method-assign]
    captures = runner.plan_graphs(FakeGraphDevice(64), layers=offline.loaded.model_config.layers_of_each_kind)
    captures.warm_up()
    assert set(ran) == {*captures.decode.sizes, *captures.mixed.sizes}


def test_rates_are_in_keys_of_the_model() -> None:
    rates = sharing_rates(ModelConfig.from_folder(SHAPES / "llama-3.1-8b"), torch.bfloat16)
    assert rates is not None
    assert rates.key_us == pytest.approx(32 * 2 * 8 * 128 * 2 / 7e6)
    assert 80_000 < rates.step_keys < 90_000
    assert rates.row_keys < 50
    assert rates.shared_percent < 15
    half = sharing_rates(ModelConfig.from_folder(SHAPES / "llama-3.1-8b"), torch.int8)
    assert half is not None
    assert half.step_keys == pytest.approx(2 * rates.step_keys, abs=1)


def test_models_without_groupable_layers_have_no_rates() -> None:
    whole_heads_of_512 = ModelConfig.from_folder(SHAPES / "gemma-4-31b")
    assert sharing_rates(whole_heads_of_512, torch.bfloat16) is None
