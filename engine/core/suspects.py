"""Suspects: requests that may have ended an earlier engine, and what of them is refused. Plain Python; never torch.

A suspect (AddRequest.is_suspect) was in a step when an engine failed. Two of them in one step could not be told apart
if this engine fails as well, so one is let in at a time: the next follows when it has a further token or has ended.
All other requests run beside it, unless it is isolated (AddRequest.is_isolated), or is let in while no other request is
open: then nothing else is let in meanwhile. For an isolated one the open requests of all HTTP workers are set aside:
they are preempted, and go on when it has a further token or has ended. So nobody waits longer than it computes, and
while its grammar compiles they run. Of those that are wholly alone in their steps the worker is told (Alone): if this
engine fails too, they are the cause, and all workers know which had been set aside (SetAside) and are none.
"""

from collections import deque
from collections.abc import Callable

from engine.core.outputs import Transport
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.interface.errors import PoisonRequest
from engine.interface.protocol import AddRequest, Alone, RefuseDigest, SetAside
from engine.interface.replays import REFUSED_S, digest_of

_Held = tuple[int, AddRequest]


class Suspects:
    """The requests that wait to be let in, the suspect that was, and the digests that are refused."""

    def __init__(
        self,
        find: Callable[[str], Request | None],
        scheduler: Scheduler,
        *,
        is_empty: Callable[[], bool],
        transport: Transport,
        announce: Callable[[list[Request]], None],
    ) -> None:
        """find: returns a request that has not ended, by its request_id. is_empty: no request is open or in a step.

        announce: tells the workers that work on requests begins (Begun).
        """
        self._find = find
        self._scheduler = scheduler
        self._is_empty = is_empty
        self._transport = transport
        self._announce = announce
        self._isolated: deque[_Held] = deque()  # with their client ids
        self._held: deque[_Held] = deque()  # other suspects
        self._behind: deque[_Held] = deque()  # no suspects, behind one that is isolated
        self._current = ""  # the request_id of the suspect let in last; "": none
        self._is_gated = False  # nothing is let in until that one has a further token
        self._alone: tuple[int, str] | None = None  # for which others are set aside: its client id and request_id
        self._set_aside: dict[str, Request] = {}  # by request_id: they had begun
        self._refused: dict[bytes, float] = {}

    @property
    def is_holding(self) -> bool:
        """True while one waits."""
        return bool(self._isolated or self._held or self._behind)

    @property
    def num_requests(self) -> int:
        """The number of isolated requests that wait, and of those behind them."""
        return len(self._isolated) + len(self._behind)

    @property
    def num_tokens(self) -> int:
        """Their tokens: prompts, and what earlier engines made."""
        messages = [message for queue in (self._isolated, self._behind) for _, message in queue]
        return sum(message.num_prompt_tokens + len(message.output) // 4 for message in messages)

    def holds(self, message: AddRequest) -> bool:
        """Return whether a request has to wait here."""
        return message.is_suspect or bool(self._isolated or self._behind) or (self._is_gated and self._is_unproven)

    def hold(self, client_id: int, message: AddRequest) -> None:
        """Let a request wait."""
        queue = self._isolated if message.is_isolated else self._held if message.is_suspect else self._behind
        queue.append((client_id, message))

    def next(self) -> _Held | None:
        """Return the request to let in now, or None."""
        if self._is_unproven and (self._is_gated or self._isolated or not self._behind):
            return None
        queue = next((queue for queue in (self._isolated, self._behind, self._held) if queue), None)
        if queue is None:
            return None
        client_id, message = queue.popleft()
        if message.is_suspect:
            is_alone = self._is_empty()
            self._go_on()
            self._current = message.request_id
            self._is_gated = message.is_isolated or is_alone
            if is_alone:
                self._transport.send(client_id, Alone(message.request_id))
            elif message.is_isolated:
                self._alone = client_id, message.request_id
        return client_id, message

    def set_others_aside(self) -> None:
        """Preempt all other requests for an isolated one that is queued, until it is proven. Call before each step.

        It starts, and its worker is told, when no step in flight has rows of others.
        """
        if self._alone is None:
            return
        (client_id, request_id), waiting = self._alone, self._scheduler.waiting
        if self._current != request_id or not self._is_unproven:
            self._go_on()
        elif waiting.only == request_id:
            self._tell_set_aside(request_id)  # whose grammar has been compiled meanwhile
        elif request_id in self._scheduler.requests:
            waiting.only = ""
            if self._scheduler.preempt_all():
                waiting.only = request_id
                self._tell_set_aside(request_id)
                self._transport.send(client_id, Alone(request_id))

    def drop(self, request_id: str, client_id: int) -> bool:
        """Drop a waiting request of a client; return whether there was one."""
        return self._drop(lambda held: (held[0], held[1].request_id) == (client_id, request_id)) > 0

    def drop_client(self, client_id: int) -> None:
        """Drop the waiting requests of a client that has gone."""
        self._drop(lambda held: held[0] == client_id)

    def refuse(self, message: RefuseDigest, now: float) -> None:
        """Refuse requests with a digest from now on."""
        self._refused = {digest: until_s for digest, until_s in self._refused.items() if until_s > now}
        self._refused[message.digest] = message.until_s

    def check(self, message: AddRequest, now: float) -> None:
        """Raise PoisonRequest for a request that is refused."""
        if self._refused and self._refused.get(digest_of(message), 0.0) > now:
            raise PoisonRequest(
                f"A request like this one has ended the engine again and again; such requests are refused for "
                f"{REFUSED_S / 60:g} minutes."
            )

    @property
    def _queues(self) -> tuple[deque[_Held], ...]:
        return self._isolated, self._behind, self._held

    @property
    def _is_unproven(self) -> bool:
        """True while the suspect let in last has no further token and has not ended."""
        request = self._find(self._current) if self._current else None
        return request is not None and len(request.output_token_ids) <= request.num_replayed_tokens

    def _tell_set_aside(self, request_id: str) -> None:
        """Tell the workers which requests have begun and are in no step any more: all but the one that is alone."""
        untold = [
            request
            for request in self._scheduler.requests.values()
            if request.first_scheduled_s is not None or request.matcher
            if request.request_id != request_id and self._set_aside.get(request.request_id) is not request
        ]
        messages: dict[int, SetAside] = {}
        for request in untold:
            self._set_aside[request.request_id] = request
            messages.setdefault(request.client_id, SetAside([])).request_ids.append(request.request_id)
        for client_id, message in messages.items():
            self._transport.send(client_id, message)

    def _go_on(self) -> None:
        """Let those go on that were set aside."""
        self._alone = self._scheduler.waiting.only = None
        set_aside, self._set_aside = self._set_aside, {}
        self._announce([request for name, request in set_aside.items() if self._find(name) is request])

    def _drop(self, is_dropped: Callable[[_Held], bool]) -> int:
        num_dropped = 0
        for queue in self._queues:
            kept = [held for held in queue if not is_dropped(held)]
            num_dropped += len(queue) - len(kept)
            queue.clear()
            queue.extend(kept)
        return num_dropped
