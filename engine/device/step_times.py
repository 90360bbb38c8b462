"""StepTimes: how long a step of each padded size takes, measured at the start. Imports no torch.

They decide for the life of the process how many tokens the scheduler puts into a step, and when padding a step costs
more than launching it kernel by kernel. So they are measured on warm clocks, and are the same on all ranks. Some sizes
are timed; a step of a size between two of them lies on the line through them, and beyond them in proportion.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Agree = Callable[[list[float]], list[float]]

_NEARLY = 0.95  # share of the best rate
# A load by which steps with prompts are compared: requests at once, prompt tokens and output tokens of each
_ROWS, _PROMPT, _OUTPUT = 64, 512, 128
_LEAST_BESIDE_ROWS = 512  # tokens of such a step: prompts replace the requests that end (engine/core/step_budget.py)
_CLEARLY = 0.97  # of the load's time
# The replays of measure_sizes() beyond one of each size take less than 0.3 s: 12 ms for each size up to 30 ms per step
_WARM_UP_S, _TIMED_S, _LONG_S = 0.030, 0.012, 0.030


@dataclass(frozen=True)
class StepTimes:
    """Times of steps without attention to context."""

    seconds: dict[int, float]  # by padded number of tokens, ascending
    launch_s: float  # host time to launch one step without a graph

    def is_worth_padding(self, num_tokens: int, padded: int) -> bool:
        """Return True if a graph of `padded` tokens computes a step of num_tokens as fast as launching its kernels."""
        padded_s = self.seconds[padded]
        return padded_s <= max(self.launch_s, padded_s * num_tokens / padded)

    def fitting_tokens(self, seconds: float) -> int:
        """Return the padded number of tokens whose step time is closest to `seconds`."""
        return min(self.seconds, key=lambda num_tokens: abs(math.log(self.seconds[num_tokens] / seconds)))

    def efficient_tokens(self, long_step_s: float) -> int:
        """Return the smallest padded number of tokens with nearly the best rate of steps up to long_step_s.

        Longer steps do not count: prompts beside answers have none, and their rate may be better by kernels of their
        own, which would make short steps long. A smaller step is returned if it clearly shortens a load of answers:
        beside prompts they cost nearly nothing as long as a step takes about as long as reading the weights.
        """
        longest, rates = self.fitting_tokens(long_step_s), self._rates()
        best = max(rate for num_tokens, rate in rates.items() if num_tokens <= longest)
        efficient = min(num_tokens for num_tokens, rate in rates.items() if rate >= _NEARLY * best)
        smaller = [num_tokens for num_tokens in self.seconds if _LEAST_BESIDE_ROWS <= num_tokens < efficient]
        if not smaller:  # steps may have no more tokens than the load's rows
            return efficient
        fastest = min(smaller, key=self._load_s)
        return fastest if self._load_s(fastest) <= _CLEARLY * self._load_s(efficient) else efficient

    def _load_s(self, num_tokens: int) -> float:
        """Return the time of a load without attention: each request is replaced, with num_tokens in a mixed step."""
        decode_s = next(seconds for size, seconds in self.seconds.items() if size >= min(_ROWS, max(self.seconds)))
        num_mixed = _ROWS * _PROMPT / (num_tokens - _ROWS)
        return num_mixed * self.seconds[num_tokens] + max(_OUTPUT - num_mixed, 0) * decode_s

    def tokens_at_best_rate(self, seconds: float) -> int:
        """Return the number of tokens computed in `seconds` at the best measured rate."""
        return int(seconds * max(self._rates().values()))

    def _rates(self) -> dict[int, float]:
        return {num_tokens: num_tokens / seconds for num_tokens, seconds in self.seconds.items()}


def spread(timed: dict[int, float], sizes: Sequence[int]) -> dict[int, float]:
    """Return the seconds of a step of every size, from those of the timed sizes. Both ascending."""
    known, seconds = list(timed), {}
    for size in sizes:
        below = max((k for k in known if k <= size), default=known[0])
        above = min((k for k in known if k >= size), default=known[-1])
        if size <= known[0]:
            seconds[size] = timed[known[0]]  # it reads all weights, too
        elif size >= known[-1]:
            seconds[size] = timed[known[-1]] * size / known[-1]
        elif below == above:
            seconds[size] = timed[size]
        else:
            share = (size - below) / (above - below)
            seconds[size] = timed[below] + share * (timed[above] - timed[below])
    return seconds


def measure_sizes(sizes: list[int], time_once: Callable[[int], float], agree: Agree) -> dict[int, float]:
    """Return the seconds of a step of each size: the median of several replays on warm clocks, fewer of long steps.

    sizes: ascending. time_once: replays one step of a size and returns its seconds. agree: returns the first rank's
    numbers on every rank. Every rank makes the same replays, since they contain collectives.
    """
    first = dict(zip(sizes, agree([time_once(size) for size in sizes]), strict=True))  # this warms the clocks up
    for _ in range(math.ceil((_WARM_UP_S - sum(first.values())) / first[sizes[-1]])):
        time_once(sizes[-1])
    medians = {
        size: statistics.median(time_once(size) for _ in range(_num_replays(seconds)))
        for size, seconds in first.items()
        if seconds <= _LONG_S  # longer ones came last, when the clocks were warm
    }
    return dict(zip(sizes, agree([medians.get(size, first[size]) for size in sizes]), strict=True))


def _num_replays(seconds: float) -> int:
    """Return how often to time a step that takes about `seconds`: at most 5 times, in about _TIMED_S, at least once."""
    return max(1, min(5, int(_TIMED_S / seconds)))
