"""WaitingQueue: the requests that wait for their turn, in order of service. Plain Python; imports request only."""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from engine.core.request import Request

_sort_key = attrgetter("sort_key")


class WaitingQueue:
    """A sorted list that knows how many tokens are to be computed before its last request has its turn."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """Whose turn it is; there must be one."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=_sort_key)
        self.num_tokens += request.num_tokens

    def pop_first(self) -> Request:
        """Take out whose turn it is."""
        request = self._requests.pop(0)
        self.num_tokens -= request.num_tokens
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that is in it."""
        self._requests.remove(request)
        self.num_tokens -= request.num_tokens

    def num_tokens_of_first(self, count: int) -> int:
        """Return the tokens of the first `count` requests."""
        return sum(request.num_tokens for request in self._requests[:count])

    def check(self) -> None:
        """Assert order and count; tests call it after every step."""
        assert self._requests == sorted(self._requests, key=_sort_key)
        assert self.num_tokens == sum(request.num_tokens for request in self._requests)
