"""Replays: how an open request goes on after its engine has ended. Plain values; never torch, a socket or a clock.

Noise is a hash of seed and position, and matchers, penalties and limits of reasoning follow from the tokens. So a
prompt with the tokens that its client has is all that the next engine needs: it computes the token after them, which is
the one that the earlier engine would have sent.

If an engine that had begun a request fails before the request got a further token, the request may be the cause: it
goes on as a suspect, and the engine runs one suspect at a time, beside requests that are none. If that engine fails as
well, one of those may have been the cause, so the suspect goes on isolated: no other request is in a step of the engine
until it has a further token. A request is poison if its engine has failed twice or more at the same token, the last
time while it was alone in it. So no request is blamed for another one, however long its prompt takes to compute. A
kill from outside is no fault, and accuses nobody.
A request is also given up when more engines in a row than there are replays have ended under it, by faults or before
anyone got a token. A suspect that was not alone yet has a few more, since nothing is known of it: given up now, its
client would send it again, and it would end as many engines again.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from engine.interface.errors import EngineDead, PoisonRequest, ServiceError
from engine.interface.protocol import AddRequest, CacheReport

REFUSED_S = 600.0  # how long requests like one that was poison are refused
_MANY_FAULTS = 2  # in a row, after which a request is isolated; or poison, if it was alone at the last
_MORE_REPLAYS = 3  # of a suspect that was alone in no engine yet


class Journal:
    """One open request, and what its client has of its answer."""

    def __init__(self, request: AddRequest) -> None:
        self._request = request
        self._output = array("i", request.output)  # what it goes on behind, and what has come since
        self._num_prompt_logprobs = 0
        self._num_submitted = len(self._output)  # output tokens at its last submission
        self.is_submitted = False  # an engine was sent it
        self._is_begun = False  # by the present engine
        self._is_alone = False  # in it
        self._was_alone = False  # in it or an earlier one, since its last token
        self._is_accepted = False  # by the present engine or an earlier one
        self._num_stuck = 0  # in a row
        self._num_faults = 0  # of these ends
        self.num_replays = 0
        self.cache: CacheReport | None = None  # of its first admission

    @property
    def digest(self) -> bytes:
        """See digest_of()."""
        return digest_of(self._request)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that a replay computes again: prompt and output."""
        return self._request.num_prompt_tokens + len(self._output)

    @property
    def has_output(self) -> bool:
        """True once a token has come."""
        return bool(self._output)

    @property
    def goes_on(self) -> bool:
        """True if another engine has let the request in, or has made its first tokens, before it came here."""
        return bool(self._request.output) or self._request.num_replays > 0

    @property
    def is_accepted(self) -> bool:
        """True if an engine has accepted the request, and counted it for its tenant."""
        return self._is_accepted or self._request.is_charged

    @property
    def is_begun(self) -> bool:
        """True if the present engine has begun to compute the request, and has not set it aside."""
        return self._is_begun

    def note_wait(self) -> None:
        """Record that the request waits for an engine to serve, before its first submission."""
        self._request = msgspec.structs.replace(self._request, has_waited=True)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add output tokens."""
        self._output.extend(token_ids)

    def add_prompt_logprobs(self, count: int) -> None:
        """Count log-probabilities of the prompt."""
        self._num_prompt_logprobs += count

    def accept(self) -> None:
        """Record that an engine has accepted the request, and counted it for its tenant."""
        self._is_accepted = True

    def isolate(self) -> None:
        """Record that no other request is in a step of the engine until this one has a further token."""
        self._is_alone = self._was_alone = True

    def begin(self, cache: CacheReport | None) -> None:
        """Record that the engine works on the request."""
        self._is_begun = self._is_accepted = True
        self.cache = self.cache or cache

    def set_aside(self) -> None:
        """Record that it is in no step of the engine until that works on it again: it ends none meanwhile."""
        self._is_begun = False

    def end_engine(self, *, is_fault: bool, had_progress: bool, max_replays: int) -> ServiceError | None:
        """Record an engine's end. Return the error that ends the request, or None: it is to be submitted again.

        is_fault: a request may be the cause. had_progress: some request got a token, or its embedding, from
        this engine.
        """
        if len(self._output) > self._num_submitted:
            self._num_stuck = self._num_faults = 0
            self._was_alone = False
        if not self._is_begun:
            self._is_alone = False
            return None
        self._num_stuck += is_fault or not had_progress
        self._num_faults += is_fault
        is_proof = self._is_alone and is_fault
        self._is_begun = self._is_alone = False
        if self._num_faults >= _MANY_FAULTS and is_proof:
            return PoisonRequest(
                f"The engine died {self._num_faults} times when it was about to compute token {len(self._output) + 1} "
                f"of this answer, the last time with no other request; requests like it are refused for "
                f"{REFUSED_S / 60:g} minutes."
            )
        num_more = _MORE_REPLAYS if self._num_faults and not self._was_alone else 0
        if self._num_stuck > max_replays + num_more:
            return EngineDead(
                f"The engine stopped {self._num_stuck} times in a row while it served this request without a further "
                f"token; the limit is {max_replays} replays (--max-replays)."
            )
        return None

    def submit(self) -> AddRequest:
        """Return the request for the next engine; the first time as it is."""
        if not self.is_submitted:
            self.is_submitted = True
            return self._request
        self.num_replays += 1
        self._num_submitted = len(self._output)
        return msgspec.structs.replace(
            self._request,
            output=self._output.tobytes(),
            num_prompt_logprobs=self._num_prompt_logprobs,
            num_replays=self._request.num_replays + self.num_replays,
            is_suspect=self._num_faults > 0,
            is_isolated=self._num_faults >= _MANY_FAULTS,
            is_charged=self.is_accepted,
            hand_over=None,
            # an engine that ended before the first token has not counted it
            counts_prompt=self._request.counts_prompt and not self._output,
        )


def digest_of(request: AddRequest) -> bytes:
    """Return a hash of what the engine computes for a request: equal for its repetitions, with any seed."""
    content = (
        request.prompt,
        msgspec.structs.replace(request.params, seed=0),
        request.grammar,
        request.pooling,
        request.lora_index,
        request.thinking,
    )
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()
