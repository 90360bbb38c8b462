"""ThinkingState: follows one request's reasoning by its committed tokens, and ends it at its limit. Plain Python.

    before ── start_ids ─→ (opening ── all opening_ids ─→) inside ── end_id ─→ over
                                                             └─ max_tokens ─→ forcing ── all forced_ids ─→ over

Once the limit is reached, the next tokens are forced: engine/core/grammars.py leaves no other one in the row's mask, so
they are sampled, committed and sent as all tokens are. The masks are made after the commit of all earlier tokens, and a
row has no more drafts than tokens that are free in any case (num_free), so no token is sampled past the limit.
A format whose answers may reason again (is_repeated) has one limit for all of it.
"""

from __future__ import annotations

from enum import Enum, auto

from engine.interface.protocol import ThinkingBudget

_MAX_BEFORE = 4  # tokens (whitespace) before the start of a reasoning that only begins an answer
UNLIMITED = 2**31


class _Place(Enum):
    BEFORE = auto()
    OPENING = auto()  # the rest of what opens it is forced
    INSIDE = auto()
    FORCING = auto()
    CHOOSING = auto()  # the next token must be none of not_after_ids
    OVER = auto()


class ThinkingState:
    """The reasoning of one request so far."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._num_left = budget.max_tokens
        self._num_seen = 0  # tokens before the start
        self._num_matched = 0  # of start_ids
        self._num_forced = 0
        self._place = _Place.BEFORE
        if budget.is_open:
            self._enter()

    @property
    def forced_token(self) -> int | None:
        """The only token that may be sampled next, or None."""
        match self._place:
            case _Place.OPENING:
                return self._budget.opening_ids[self._num_forced]
            case _Place.FORCING:
                return self._budget.forced_ids[self._num_forced]
        return None

    @property
    def banned_tokens(self) -> list[int]:
        """Tokens that must not be sampled next."""
        return self._budget.not_after_ids if self._place is _Place.CHOOSING else []

    @property
    def is_acting(self) -> bool:
        """True if the next token is not free."""
        return self._place in (_Place.OPENING, _Place.FORCING, _Place.CHOOSING)

    @property
    def num_free(self) -> int:
        """The number of next tokens that are free, whatever they are."""
        match self._place:
            case _Place.BEFORE:
                num_start = len(self._budget.start_ids) - self._num_matched
                return num_start if self._budget.opening_ids else num_start + self._num_left
            case _Place.INSIDE:
                return self._num_left
            case _Place.OVER:
                return UNLIMITED
        return 0

    def advance(self, token_ids: list[int]) -> None:
        """Take committed tokens."""
        for token_id in token_ids:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        match self._place:
            case _Place.BEFORE:
                self._match_start(token_id)
            case _Place.OPENING:
                self._num_forced += 1
                if self._num_forced == len(self._budget.opening_ids):
                    self._enter()
            case _Place.INSIDE if token_id == self._budget.end_id:
                self._leave()
            case _Place.INSIDE:
                self._num_left -= 1
                if self._num_left <= 0:
                    self._force()
            case _Place.FORCING:
                self._num_forced += 1
                if self._num_forced == len(self._budget.forced_ids):
                    self._leave()
                    if self._budget.not_after_ids:
                        self._place = _Place.CHOOSING
            case _Place.CHOOSING:
                self._leave()

    def _match_start(self, token_id: int) -> None:
        start = self._budget.start_ids
        if token_id == start[self._num_matched]:
            self._num_matched += 1
        else:
            self._num_matched = int(token_id == start[0])
        self._num_seen += 1
        if self._num_matched == len(start):
            self._num_matched = 0
            if self._budget.opening_ids:
                self._place, self._num_forced = _Place.OPENING, 0
            else:
                self._enter()
        elif self._num_seen - self._num_matched >= _MAX_BEFORE and not self._budget.is_repeated:
            self._place = _Place.OVER

    def _enter(self) -> None:
        self._place = _Place.INSIDE
        if self._num_left <= 0:
            self._force()

    def _force(self) -> None:
        self._place, self._num_forced = _Place.FORCING, 0

    def _leave(self) -> None:
        self._place = _Place.BEFORE if self._budget.is_repeated else _Place.OVER
