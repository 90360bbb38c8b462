"""Pinned files leave after all others while their pins last, within the budgets of their owners."""

import random

import pytest

from engine.tiers.disk_order import SECOND_NS, DiskOrder, Entry, pin_time_ns

HOUR_NS = 3600 * SECOND_NS
START_NS = 1_700_000_000 * SECOND_NS


class Clock:
    now_ns = START_NS

    def __call__(self) -> int:
        return self.now_ns


class Files(DiskOrder):
    """Files of one byte each."""

    def __init__(self, *, budget: int = 100, most: int = 100) -> None:
        self.clock = Clock()
        super().__init__(budget_bytes=budget, most_bytes=most, wall_ns=self.clock)

    def use(self, number: int) -> None:
        self.pop(bytes([number]))
        self.add(bytes([number]), Entry(1, self.clock()))

    def pin(self, number: int, owner: str = "team", hours: float = 1.0) -> None:
        self.pop(bytes([number]))
        self.add(bytes([number]), Entry(1, pin_time_ns(owner, self.clock() + int(hours * HOUR_NS))))

    def leave(self) -> list[int]:
        left = []
        while (file := self.first()) is not None:
            left.append(file[0][0])
            self.pop(file[0])
            self.check()
        return left


def test_pinned_files_leave_after_all_others_and_the_oldest_pins_first() -> None:
    files = Files()
    for number in range(3):
        files.use(number)
    files.pin(1)
    files.pin(0)
    for number in (5, 6):
        files.use(number)
    assert files.num_pinned_bytes == 2
    assert files.leave() == [2, 5, 6, 1, 0]


def test_a_pin_ends_with_its_time_and_the_file_is_then_as_one_that_was_just_used() -> None:
    files = Files()
    files.pin(0)
    files.use(1)
    assert files.pinned_ns(bytes([0])) == pytest.approx(HOUR_NS, abs=SECOND_NS)
    files.clock.now_ns += HOUR_NS + SECOND_NS
    files.use(2)
    assert files.pinned_ns(bytes([0])) == 0
    assert files.num_pinned_bytes == 0
    assert files.leave() == [1, 0, 2]


def test_an_owner_has_a_budget_and_all_have_one() -> None:
    files = Files(budget=2, most=3)
    for number in range(3):
        files.pin(number, "team")
    assert [number for number in range(3) if files.pinned_ns(bytes([number]))] == [1, 2]
    for number in range(3, 5):
        files.pin(number, "other")
    assert [number for number in range(5) if files.pinned_ns(bytes([number]))] == [2, 3, 4]
    files.check()
    assert files.leave() == [0, 1, 2, 3, 4]


def test_a_time_that_no_pin_has_pins_nothing() -> None:
    files = Files()
    files.pin(0, hours=24 * 365)
    assert files.num_pinned_bytes == 0


def test_without_a_budget_nothing_is_pinned() -> None:
    files = Files(budget=0, most=0)
    files.pin(0)
    files.use(1)
    assert files.leave() == [0, 1]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_the_sums_and_bounds_hold(seed: int) -> None:
    draw = random.Random(seed)
    files = Files(budget=5, most=8)
    for _ in range(2000):
        number = draw.randrange(30)
        match draw.randrange(5):
            case 0:
                files.use(number)
            case 1 | 2:
                files.pin(number, draw.choice("abc"), draw.uniform(0.01, 3))
            case 3:
                files.pop(bytes([number]))
            case 4:
                files.clock.now_ns += draw.randrange(HOUR_NS // 8)
                first = files.first()
                assert first is None or not (files.pinned_ns(first[0]) and len(files._files))
        files.check()
    for name, entry in sorted(files.clear().items(), key=lambda file: file[1].used_ns):
        files.add(name, entry)  # as after a restart
    files.check()
