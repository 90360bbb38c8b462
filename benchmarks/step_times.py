"""StepTimes: predicts one machine's step time from the step's contents. Plain Python; never torch.

Written by `quire bench steps`, read by `quire bench plan`. A step's time is the sum of the time for its decoding rows,
for the length of their contexts, and for the prompt tokens beside them; each part is interpolated between measured
points and extrapolated with the last slope.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.report import BenchError
from engine.interface.config import SchedulerConfig

Points = list[tuple[int, float]]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one machine. Points ascend."""

    benchmark: str = "steps"
    model: str
    device: str
    date: str = ""
    context: int  # tokens of each decoding row's context when `decode_s` was measured
    decode_s: Points  # decoding rows → seconds of a step with nothing else
    context_s_per_token: float  # seconds per further token of context
    prompt_s: Points  # prompt tokens of a step → additional seconds
    scheduler: SchedulerConfig  # the machine's settings
    depth: int  # steps in flight

    def step_s(self, *, num_decodes: int, num_context_tokens: int, num_prompt_tokens: int) -> float:
        """Return the time of a step. num_context_tokens: of all decoding rows together."""
        rows = max(num_decodes, 1)  # a step of prompts alone still reads the weights
        further = (num_context_tokens - num_decodes * self.context) * self.context_s_per_token
        least = self.decode_s[0][1] / 2  # far below the measured context the slope would give too little
        decode_s = max(interpolate(self.decode_s, rows) + further, least)
        return decode_s + (interpolate([(0, 0.0), *self.prompt_s], num_prompt_tokens) if num_prompt_tokens else 0.0)


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Interpolate the points at x; before the first its value, after the last its last slope."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    place = next((i for i in range(1, len(points)) if x <= points[i][0]), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (x - left) / (right - left)


def read_step_times(path: str) -> StepTimes:
    """Read a file of `quire bench steps --json`. Raises BenchError."""
    try:
        values = msgspec.json.decode(Path(path).read_bytes())
        match values:
            case {"scheduler": {"num_blocks": num_blocks} as scheduler}:  # files of versions before pages had groups
                scheduler["num_pages"] = num_blocks
        times = msgspec.convert(values, StepTimes)
    except OSError as error:
        raise BenchError(f"--steps {path} cannot be read: {error.strerror}.", exit_code=2) from error
    except msgspec.DecodeError as error:
        raise BenchError(f"--steps {path} is not a file of quire bench steps: {error}.", exit_code=2) from error
    for name, points in (("decode_s", times.decode_s), ("prompt_s", times.prompt_s)):
        numbers = [number for number, _ in points]
        if not points or numbers != sorted(set(numbers)) or any(seconds < 0 for _, seconds in points):
            raise BenchError(f"--steps {path}: {name} must have points of ascending numbers, none negative.")
    if times.decode_s[0][1] <= 0:
        raise BenchError(f"--steps {path}: a step takes time, and decode_s begins with 0.")
    return times
