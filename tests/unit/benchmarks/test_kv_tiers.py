"""benchmarks.kv_tiers: what copies cost a decode step."""

import random

import pytest

from benchmarks.kv_tiers import more_s


def test_copies_cost_what_they_add_to_a_step_however_long_its_rows_are() -> None:
    rng = random.Random(0)
    late = [(place, place > 300, 6e-3 + 2e-6 * place + rng.gauss(0, 1e-5)) for place in range(400)]
    steps = [(place, copies, seconds + 1.5e-4 * copies) for place, copies, seconds in late]
    assert more_s(steps) == pytest.approx(1.5e-4, rel=0.1)
    assert more_s([*steps, (350, True, 1.0), (20, False, 0.4)]) == pytest.approx(1.5e-4, rel=0.1)
