"""Slots are ready once every rank has pinned them."""

from engine.rank_process import _begin
from engine.tensor_parallel.slot_shares import PinSlots, RankedSlots, SlotsReady


class FakeSlots:
    """A rank's SlotSource, which pins when it is told to."""

    def __init__(self, num_ready: int) -> None:
        self.num_ready = num_ready
        self.is_growing = True

    def pin_rest(self, on_progress) -> None:
        for num_ready in (self.num_ready, 5, 8):
            self.num_ready, self.is_growing = num_ready, num_ready < 8
            on_progress()


def test_the_slowest_rank_decides():
    own = FakeSlots(4)
    slots = RankedSlots(own, [1, 2])
    assert (slots.num_ready, slots.is_growing) == (0, True)
    slots.take(1, SlotsReady(7, True))
    assert slots.num_ready == 0
    slots.take(2, SlotsReady(3, False))
    assert (slots.num_ready, slots.is_growing) == (3, True)
    own.is_growing = False
    slots.take(1, SlotsReady(9, False))
    assert (slots.num_ready, slots.is_growing) == (3, False)


def test_a_rank_pins_when_it_is_told_to_and_tells_each_piece():
    told = []
    _begin(PinSlots(), None, None, FakeSlots(2), told.append)
    assert told == [SlotsReady(2, True), SlotsReady(5, True), SlotsReady(8, False)]
