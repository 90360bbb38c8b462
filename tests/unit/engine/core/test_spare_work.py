"""Spare work has a piece when nothing waits for the loop, and one in some turns with requests, until it has ended."""

from engine.core.launch_delay import REST_S
from engine.core.spare_work import SpareWork


class Pieces:
    """Work of some pieces."""

    def __init__(self, num_pieces: int) -> None:
        self.num_left = num_pieces
        self.num_done = 0

    def __call__(self, *_: object) -> bool:
        self.num_done += 1
        self.num_left -= 1
        return self.num_left > 0


def test_idle_work_has_a_piece_in_each_turn_without_messages_and_ends():
    idle, busy = Pieces(2), Pieces(1)
    work = SpareWork(idle, busy, lambda: False)
    assert work.end_turn(had_nothing=False, is_idle=True) is work
    assert idle.num_done == 0
    assert work.end_turn(had_nothing=True, is_idle=True) is work
    assert work.patience_s(None) == REST_S
    assert work.end_turn(had_nothing=True, is_idle=True) is work  # busy work is left
    assert work.patience_s(None) is None
    assert work.end_turn(had_nothing=True, is_idle=True) is work
    assert (idle.num_done, busy.num_done) == (2, 0)


def test_busy_work_has_a_piece_in_some_turns_with_requests_and_then_nothing_is_left():
    idle, busy = Pieces(1), Pieces(2)
    work = SpareWork(idle, busy, lambda: False)
    work.end_turn(had_nothing=True, is_idle=True)
    left = [work.end_turn(had_nothing=False, is_idle=False) for _ in range(16)]
    assert busy.num_done == 2
    assert left == [work] * 15 + [None]


def test_an_idle_loop_waits_as_long_as_it_was_asked_to_but_for_a_piece():
    work = SpareWork(Pieces(1), Pieces(1), lambda: False)
    assert work.patience_s(0.0) == 0.0
    assert work.patience_s(1.0) == REST_S


def test_idle_work_is_told_of_messages():
    asked = []

    def idle(has_arrivals):
        asked.append(has_arrivals())
        return True

    SpareWork(idle, Pieces(1), lambda: True).end_turn(had_nothing=True, is_idle=True)
    assert asked == [True]
