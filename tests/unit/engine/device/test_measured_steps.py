"""The timings that decide sizes of steps for the life of the process: on warm clocks, and the same on all ranks."""

import random

import pytest

from engine.device.cuda_graph import TOKEN_SIZES
from engine.device.step_times import StepTimes, measure_sizes

SIZES = list(TOKEN_SIZES)


class Device:
    """Takes `per_token_s` for a token, at least `least_s`; up to twice as long until it has worked for 20 ms."""

    def __init__(self, *, least_s: float, per_token_s: float, noise: float = 0.0) -> None:
        self.least_s, self.per_token_s, self.noise = least_s, per_token_s, noise
        self.random = random.Random(0)
        self.calls: list[int] = []
        self.worked_s = 0.0

    def true_s(self, size: int) -> float:
        return max(self.least_s, size * self.per_token_s)

    def time_once(self, size: int) -> float:
        self.calls.append(size)
        seconds = self.true_s(size) * (1 if self.worked_s > 0.020 else 2)
        seconds *= 1 + self.noise * (self.random.random() < 0.2)  # now and then much longer
        self.worked_s += seconds
        return seconds


SMALL, LARGE = {"least_s": 0.0005, "per_token_s": 1e-6}, {"least_s": 0.006, "per_token_s": 3e-5}


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["small", "large"])
def test_cold_clocks_do_not_count(model: dict[str, float]) -> None:
    device = Device(**model)
    seconds = measure_sizes(SIZES, device.time_once, lambda values: values)
    assert seconds == pytest.approx({size: device.true_s(size) for size in SIZES})


def test_one_disturbed_replay_of_a_short_step_does_not_count() -> None:
    device = Device(**SMALL, noise=3.0)
    seconds = measure_sizes(SIZES, device.time_once, lambda values: values)
    wrong = [size for size in SIZES if size <= 2048 and seconds[size] > 1.1 * device.true_s(size)]
    assert len(wrong) <= 1  # three of five disturbed


def test_all_ranks_make_the_same_replays_though_their_clocks_differ() -> None:
    """Replays contain collectives: one more on one rank would wait without end."""
    first, second = Device(**LARGE), Device(least_s=0.009, per_token_s=2e-5)
    agreed: list[list[float]] = []

    def tell(values: list[float]) -> list[float]:
        agreed.append(values)
        return values

    told = measure_sizes(SIZES, first.time_once, tell)
    answers = iter(agreed)
    heard = measure_sizes(SIZES, second.time_once, lambda _: next(answers))
    assert first.calls == second.calls
    assert told == heard


@pytest.mark.parametrize("model", [SMALL, LARGE, {"least_s": 0.02, "per_token_s": 1e-4}], ids=["s", "m", "l"])
def test_the_start_takes_little_longer_than_with_one_replay_each(model: dict[str, float]) -> None:
    device = Device(**model)
    measure_sizes(SIZES, device.time_once, lambda values: values)
    assert device.worked_s - sum(map(device.true_s, SIZES)) < 0.4


def test_steps_beside_answers_are_compared_with_steps_that_may_be_beside_answers() -> None:
    """Steps of 1,536 tokens and more have a kernel of their own that makes the longest ones faster."""
    seconds = {64: 0.0020, 512: 0.0126, 1024: 0.0245, 2048: 0.0487, 4096: 0.094, 8192: 0.183}
    assert StepTimes(seconds, 0.02).efficient_tokens(0.045) == 512
    assert StepTimes(seconds, 0.02).efficient_tokens(0.2) == 4096
    small = StepTimes({size: 0.001 + size * 1e-6 for size in SIZES}, 0.02)  # all of whose steps are short
    assert small.efficient_tokens(0.045) == small.efficient_tokens(1.0) == 6144


def test_a_smaller_step_is_taken_where_answers_are_clearly_sooner() -> None:
    """8B on an H100: steps of 1,536 tokens have a kernel of their own, and 512 tokens 92 % of the best rate."""
    seconds = {64: 0.0070, 256: 0.0077, 512: 0.0124, 768: 0.0186, 1024: 0.0243, 1536: 0.0345, 2048: 0.0455}
    assert 512 / seconds[512] < 0.95 * 2048 / seconds[2048]
    assert StepTimes(seconds, 0.02).efficient_tokens(0.045) == 512
    # 0.6B: a load takes 1 % less time with longer steps
    seconds = {64: 0.0013, 256: 0.0017, 512: 0.0024, 1024: 0.0036, 2048: 0.0060}
    assert StepTimes(seconds, 0.02).efficient_tokens(0.045) == 2048
    # A mixture of experts reads most of its weights for any prompt
    seconds = {64: 0.0120, 256: 0.0130, 512: 0.0160, 1024: 0.0210, 2048: 0.0310}
    assert StepTimes(seconds, 0.02).efficient_tokens(0.045) == 2048


@pytest.mark.parametrize("sizes", [[32], [32, 64], [64, 128], [32, 64, 128, 256], SIZES])
def test_steps_may_be_limited_to_any_size(sizes: list[int]) -> None:
    for seconds in (dict.fromkeys(sizes, 0.005), {size: size * 1e-5 for size in sizes}):
        assert StepTimes(seconds, 0.02).efficient_tokens(0.045) in sizes
