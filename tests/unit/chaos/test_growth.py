"""The slope of a process's memory: of a line, of one that only steps, and what counts as growth."""

import os

import pytest

from tests.soak.growth import Growth, Sampler, Series, faults, slope

_MIB = 1 << 20


def series(sizes_mib: list[float], *, every_s: float, num_files: int = 9) -> Series:
    samples = [(number * every_s, int(mib * _MIB), num_files) for number, mib in enumerate(sizes_mib)]
    return Series("worker", samples)


def growth_of(sizes_mib: list[float], *, every_s: float) -> Growth:
    sampler = Sampler()
    sampler.series[1] = series(sizes_mib, every_s=every_s)
    (found,) = sampler.growths()
    return found


def test_the_slope_of_a_line_is_that_of_the_line() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(5, 1)]) == 0


def test_a_steady_leak_is_found_after_the_warm_up() -> None:
    growth = growth_of([100 + number for number in range(121)], every_s=60)  # two hours, a MiB a minute
    assert growth.slope_mib_h == pytest.approx(60)
    assert growth.grown_mib == pytest.approx(90)
    (sentence,) = faults([growth], most_mib_h=16, noise_mib=16)
    assert sentence.startswith("worker 1 grows by 60.0 MiB/h")


def test_growth_within_the_warm_up_is_none() -> None:
    growth = growth_of([100.0 + 10 * min(number, 5) for number in range(100)], every_s=60)
    assert growth.slope_mib_h == 0
    assert (growth.first_mib, growth.most_mib) == (150, 150)
    assert faults([growth], most_mib_h=16, noise_mib=16) == []


def test_a_step_within_minutes_is_noise() -> None:
    growth = growth_of([100.0] * 45 + [104.0] * 15, every_s=1)
    assert growth.slope_mib_h > 100
    assert faults([growth], most_mib_h=16, noise_mib=16) == []


def test_open_files_that_pile_up_are_found() -> None:
    growth = Growth("worker 1", 100, 100, 100, 0, 0, first_files=20, last_files=90)
    assert faults([growth], most_mib_h=16, noise_mib=16) == ["worker 1 had 20 files open, and at the end 90"]


def test_a_process_that_ended_early_has_no_slope() -> None:
    sampler = Sampler()
    sampler.series = {1: series([1.0] * 100, every_s=1), 2: series([1.0] * 50, every_s=1)}
    assert [growth.process for growth in sampler.growths()] == ["worker 1"]


def test_processes_that_are_none_of_a_server_are_left_out() -> None:
    sampler = Sampler()
    sampler.sample([os.getpid()])
    assert sampler.series == {}
