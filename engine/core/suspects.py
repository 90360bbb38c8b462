"""Suspects: requests that may have ended an earlier engine, and what of them is refused. Plain Python; never torch.

A suspect (AddRequest.is_suspect) was in a step when an engine failed. Two of them in one step could not be told apart
if this engine fails as well, so one is let in at a time: the next follows when it has a further token or has ended.
All other requests run beside it.
"""

from collections import deque
from collections.abc import Callable

from engine.core.request import Request
from engine.interface.errors import PoisonRequest
from engine.interface.protocol import AddRequest, RefuseDigest
from engine.interface.replays import REFUSED_S, digest_of


class Suspects:
    """The suspects that wait to be let in, the one that was, and the digests that are refused."""

    def __init__(self, find: Callable[[str], Request | None]) -> None:
        """find: returns a request that has not ended, by its request_id."""
        self._find = find
        self._held: deque[tuple[int, AddRequest]] = deque()  # with their client ids
        self._current = ""  # the request_id of the one let in; "": none
        self._refused: dict[bytes, float] = {}

    @property
    def is_holding(self) -> bool:
        """True while one waits."""
        return bool(self._held)

    @property
    def num_held(self) -> int:
        """The number of those that wait."""
        return len(self._held)

    def hold(self, client_id: int, message: AddRequest) -> None:
        """Let a suspect wait."""
        self._held.append((client_id, message))

    def next(self) -> tuple[int, AddRequest] | None:
        """Return the suspect to let in now, or None."""
        request = self._find(self._current) if self._current else None
        if not self._held or (request is not None and len(request.output_token_ids) <= request.num_replayed_tokens):
            return None
        client_id, message = self._held.popleft()
        self._current = message.request_id
        return client_id, message

    def has(self, request_id: str) -> bool:
        """Return whether a request waits here."""
        return any(message.request_id == request_id for _, message in self._held)

    def drop(self, request_id: str, client_id: int) -> bool:
        """Drop a waiting request of a client; return whether there was one."""
        before = len(self._held)
        kept = [held for held in self._held if (held[0], held[1].request_id) != (client_id, request_id)]
        self._held = deque(kept)
        return len(kept) < before

    def drop_client(self, client_id: int) -> None:
        """Drop the waiting requests of a client that has gone."""
        self._held = deque(held for held in self._held if held[0] != client_id)

    def drop_all(self) -> list[tuple[int, str]]:
        """Drop all that wait; return their client ids and request ids."""
        held, self._held = self._held, deque()
        return [(client_id, message.request_id) for client_id, message in held]

    def refuse(self, message: RefuseDigest, now: float) -> None:
        """Refuse requests with a digest from now on."""
        self._refused = {digest: until_s for digest, until_s in self._refused.items() if until_s > now}
        self._refused[message.digest] = message.until_s

    def check(self, message: AddRequest, now: float) -> None:
        """Raise PoisonRequest for a request that is refused."""
        if self._refused and self._refused.get(digest_of(message), 0.0) > now:
            raise PoisonRequest(
                f"A request like this one has ended the engine twice; such requests are refused for "
                f"{REFUSED_S / 60:g} minutes."
            )
