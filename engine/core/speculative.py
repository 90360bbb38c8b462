"""Drafter and NgramIndex: n-gram speculative decoding, without a draft model. Plain Python; never torch.

A decode row may carry drafts: guesses of its next tokens, computed together with it in one step. The step samples after
the row's own token and after each draft. At its commit the samples are accepted up to and including the first that
differs from the draft at its position. Each sample is drawn from logits over accepted tokens only, with the noise of
its own position in the request, so the output equals that without speculation. Keys and values computed after them are
overwritten later and never published.

The end of a row with drafts is known only at its commit. Until then the request has no further row; the host sends the
start and the token of its next row, since the device's values are wrong. A row without drafts runs one step ahead of
its commit, and a row with drafts may follow it: the guess then includes the token that is still on the device.
The scheduler plans the rows (engine/core/scheduler.py); this module proposes drafts and verifies them.

NgramIndex implements prompt lookup (A. Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023): the tokens that
followed an earlier occurrence of the last tokens are likely to follow again. Instead of a scan, an index that grows
with the text finds the occurrences. Each entry links to the previous one with the same tokens: 4 bytes per token and a
dict of distinct n-grams.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from engine.core.thinking import ThinkingState
from engine.interface.config import SpeculativeConfig
from engine.interface.protocol import SamplingParams

_MAX_CANDIDATES = 16  # the latest occurrences, which are compared
_MAX_INDEXED = 1024  # tokens indexed per call, about 0.25 ms; each row of a step makes one call
_MAX_PAUSE = 64  # output tokens without drafts


class NgramIndex:
    """An index of one request's tokens by their n-grams of `shortest` tokens. Tokens are only appended."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._tokens = array("i")
        # A place is the number of tokens up to the end of an n-gram; 0: none. _latest: the last place of each n-gram,
        # by its tokens packed into one int. _previous: for each place the preceding one with the same n-gram
        self._latest: dict[int, int] = {}
        self._previous = array("i", [0])
        self._key = 0  # the n-gram at the last indexed place
        self._mask = (1 << 32 * shortest) - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the text."""
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens to the text."""
        self._tokens.extend(token_ids)

    def continuation(self, count: int) -> list[int]:
        """Return the `count` tokens after the best earlier occurrence of the text's end; [] without an occurrence.

        The best occurrence matches the most of the last `shortest` to `longest` tokens; among equally long matches it
        is the latest. If fewer than `count` tokens follow it, they are repeated: the text has this period.
        """
        self._index()
        found = self._find()
        if not found:
            return []
        tokens, period = self._tokens, len(self._tokens) - found
        following = tokens[found : found + count].tolist()
        while len(following) < count:
            following.append(following[-period])
        return following

    def _index(self) -> None:
        """Index all n-grams but the last, at most _MAX_INDEXED per call; later calls index the rest."""
        tokens, latest, previous, key = self._tokens, self._latest, self._previous, self._key
        first = len(previous) - 1
        for place, token_id in enumerate(tokens[first : min(len(tokens) - 1, first + _MAX_INDEXED)], first + 1):
            key = (key << 32 | token_id) & self._mask
            if place < self._shortest:
                previous.append(0)
            else:
                previous.append(latest.get(key, 0))
                latest[key] = place
        self._key = key

    def _find(self) -> int:
        """Return the place of the best earlier occurrence of the text's end, or 0."""
        tokens, end = self._tokens, len(self._tokens)
        if end <= self._shortest:
            return 0
        key = 0
        for token_id in tokens[-self._shortest :]:
            key = key << 32 | token_id
        place, best, best_length = self._latest.get(key, 0), 0, 0
        for _ in range(_MAX_CANDIDATES):
            if not place or best_length == self._longest:
                break
            length, limit = self._shortest, min(self._longest, place)
            while length < limit and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._previous[place]
        return best


class Proposer(Protocol):
    """Proposes the next tokens of one request."""

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """Return up to `count` tokens that may follow the output. Cheap: it runs before every step."""
        ...


class NgramProposer:
    """Proposes the tokens that followed the same n-gram earlier in the prompt or the output."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._index = NgramIndex(shortest=shortest, longest=longest)

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """See Proposer.propose. Each call must extend the tokens of the previous call."""
        num_prompt, num_known = len(prompt_token_ids), self._index.num_tokens
        if not num_known:
            self._index.extend(prompt_token_ids)
            num_known = num_prompt
        self._index.extend(output_token_ids[num_known - num_prompt :])
        return self._index.continuation(count)


class Drafter:
    """Proposes and verifies the drafts of one request, from its arrival to its end. The Request owns it.

    A row without accepted drafts costs more than it gains, so after 1, 2, 3 … such rows drafts pause for 2, 4, 8 …
    tokens.
    """

    def __init__(self, proposer: Proposer, *, num_tokens: int, min_tokens: int = 0) -> None:
        """num_tokens: maximum number of drafts per row. min_tokens: output tokens before the first drafts."""
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._min_tokens = min_tokens
        self._num_misses = 0  # consecutive rows with drafts of which none was accepted
        self._paused_until = 0  # number of output tokens
        self.thinking: ThinkingState | None = None  # the request's; drafts end where a token may be forced

    def drafts(
        self, prompt_token_ids: list[int], output_token_ids: list[int], *, num_pending: int, most: int
    ) -> list[int]:
        """Return up to `most` drafts, which follow the output and its num_pending tokens in flight."""
        most = min(most, self._num_tokens)
        if self.thinking is not None:  # a row samples one token more than it has drafts
            most = min(most, self.thinking.num_free - num_pending - 1)
        num_output = len(output_token_ids)
        if most < 1 or num_output < self._paused_until or num_output < self._min_tokens:
            return []
        return self._proposer.propose(prompt_token_ids, output_token_ids, num_pending + most)[num_pending:]

    def verify(self, drafts: list[int], sampled: list[int], *, num_output: int) -> list[int]:
        """Return the samples up to and including the one that replaces the first wrong draft.

        sampled: the tokens sampled after the row's own token and after each draft. num_output: output tokens before.
        """
        num_accepted = 0
        while num_accepted < len(drafts) and sampled[num_accepted] == drafts[num_accepted]:
            num_accepted += 1
        if num_accepted:
            self._num_misses = 0
        else:
            self._num_misses += 1
            self._paused_until = num_output + 1 + min(2**self._num_misses, _MAX_PAUSE)
        return sampled[: num_accepted + 1]


def make_drafter(config: SpeculativeConfig, params: SamplingParams) -> Drafter | None:
    """Return a drafter for a new request; None if it has penalties.

    Penalties change the logits of a position by the tokens before it, which may be wrong drafts.
    """
    if params.has_penalties:
        return None
    proposer = NgramProposer(shortest=config.ngram_min, longest=config.ngram_max)
    return Drafter(proposer, num_tokens=config.num_tokens, min_tokens=params.min_tokens)
