"""Which graphs serve steps whose rows are grouped, and what groups are estimated to cost."""

from pathlib import Path

import pytest
import torch

from engine.device.cuda_graph import (
    GROUPED_TOKEN_SIZES,
    TOKEN_SIZES,
    DecodeGraphs,
    MixedGraphs,
    MixedShape,
    grouped_sizes,
    mixed_shapes,
)
from engine.startup.limits import sharing_rates
from models.config.model_config import ModelConfig

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
            lambda rows, is_grouped: rows, max_num_seqs=256, padding_row=256, device=device, has_groups=has_groups
        )
        return decode.num_graphs + graphs(has_groups=has_groups).num_graphs

    assert count(has_groups=True) - count(has_groups=False) == len(grouped_sizes(256)) + len(GROUPED_TOKEN_SIZES)


def graphs(*, has_groups: bool) -> MixedGraphs:
    """Those of 256 requests, a step of which takes 10 ms, and 10 µs for each token."""
    made = MixedGraphs(
        lambda shape, is_grouped: torch.empty(0),
        shapes=mixed_shapes(256, 8192),
        agree=lambda seconds: seconds,
        has_groups=has_groups,
    )
    made._seconds, made._launch_s = {size: 0.01 + size * 1e-5 for size in TOKEN_SIZES}, 0.1
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


def test_rates_are_in_keys_of_the_model() -> None:
    rates = sharing_rates(ModelConfig.from_folder(SHAPES / "llama-3.1-8b"), torch.bfloat16)
    assert rates is not None
    assert rates.key_us == pytest.approx(32 * 2 * 8 * 128 * 2 / 2.8e6)
    assert 1000 < rates.step_keys < 4000
    assert rates.row_keys < 50
    assert rates.shared_percent < 10
    half = sharing_rates(ModelConfig.from_folder(SHAPES / "llama-3.1-8b"), torch.int8)
    assert half is not None
    assert half.step_keys == pytest.approx(2 * rates.step_keys, abs=1)


def test_models_without_groupable_layers_have_no_rates() -> None:
    whole_heads_of_512 = ModelConfig.from_folder(SHAPES / "gemma-4-31b")
    assert sharing_rates(whole_heads_of_512, torch.bfloat16) is None
