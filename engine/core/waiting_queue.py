"""WaitingQueue: the queued requests, in the order in which they are served. Plain Python; never torch."""

from bisect import bisect_left, insort
from operator import attrgetter

from engine.core.request import Request

by_order = attrgetter("sort_key")


class WaitingQueue:
    """Queued requests, sorted by priority, arrival and number, with the sum of their tokens."""

    def __init__(self) -> None:
        self.requests: list[Request] = []  # in order; others only read it
        self.num_tokens = 0

    def add(self, request: Request) -> None:
        """Insert a request in order."""
        insort(self.requests, request, key=by_order)
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Remove a queued request, found by its key: a search for the object itself would visit the whole queue."""
        del self.requests[bisect_left(self.requests, request.sort_key, key=by_order)]
        self.num_tokens -= request.num_tokens

    def num_tokens_of_first(self, count: int) -> int:
        """Return the sum of the tokens of the first `count` requests."""
        return sum(request.num_tokens for request in self.requests[:count])

    def check(self) -> None:
        """Assert that order and token sum are right; tests call it after every step."""
        assert self.requests == sorted(self.requests, key=by_order)
        assert self.num_tokens == sum(request.num_tokens for request in self.requests)
