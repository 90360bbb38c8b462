"""The token limit of a step with decode rows and prompt chunks."""

import pytest

from engine.core.step_budget import mixed_step_tokens
from engine.interface.config import SchedulerConfig

SIZES = [64, 128, 256, 512, 1024, 2048]


def limit(num_decodes: int, num_pending: int, context: int = 0, num_whole: int = 0, **changes: int) -> int:
    config = SchedulerConfig(
        num_pages=9,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        min_decode_step_tokens=64,
        max_decode_step_tokens=1024,
        step_sizes=SIZES,
        **changes,
    )
    return mixed_step_tokens(
        config, num_decodes=num_decodes, num_pending=num_pending, context=context, num_whole=num_whole
    )


@pytest.mark.parametrize(
    ("num_decodes", "num_pending", "expected"),
    [
        (1, 10, 64),  # the least
        (16, 10, 128),  # 8 tokens for each decode row
        (17, 10, 256),  # rounded up to a size
        (1, 32 * 500, 512),  # a burst within 32 steps
        (64, 32 * 5000, 1024),  # never more than the most
    ],
)
def test_the_largest_of_three_values_as_a_step_size(num_decodes: int, num_pending: int, expected: int) -> None:
    assert limit(num_decodes, num_pending) == expected


@pytest.mark.parametrize(
    ("num_whole", "expected"),
    [
        (100, 512),  # it fits anyway
        (500, 1024),  # else it would take two steps
        (960, 1024),
        (961, 512),  # the answers would wait for a step of more than twice the tokens
    ],
)
def test_a_newcomers_prompt_is_not_cut_if_a_step_of_twice_the_tokens_has_room_for_it(
    num_whole: int, expected: int
) -> None:
    assert limit(64, 1000, num_whole=num_whole) == expected


def test_the_longest_step_limits_a_newcomers_prompt_as_well() -> None:
    assert limit(100, 1000, num_whole=1400, max_mixed_cost=1024, costly_context=1000) == 1024


def test_steps_get_smaller_as_the_context_grows() -> None:
    costs = {"max_mixed_cost": 1024, "costly_context": 1000}
    assert [limit(8, 32 * 5000, context, **costs) for context in (0, 1000, 3000, 100_000)] == [1024, 512, 256, 64]
