"""Speculation without a second model: several tokens of a request per step, when its text has been there before.

A decode row may carry drafts: guesses of its next tokens, computed with it in one step. The step samples after the
row's own token and after each draft; at its commit the samples are taken up to the first that differs from the draft
behind it, that one included. Each is drawn from logits that saw only true tokens, with the noise of its own place in
the request, so the tokens are those that would have come one by one. What was computed past them is overwritten later,
and never published.

Where a drafted row ends is known at its commit alone. Until then the request has no row; the next one starts where the
host says, with the token the host sends, since the device's idea of both is wrong. A row without drafts goes on as
ever, one step ahead of its commit, and may be followed by a drafted one: the guess then includes the token that is
still on the device. The scheduler plans all this (engine/core/scheduler.py); here are the guesses and their check.

NgramIndex: where a text has stood before, so that it can be guessed how it goes on. Plain Python; imports nothing.

Prompt lookup (A. Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023): what followed the last tokens when they
occurred before is likely to follow them again. Here the occurrences are found by an index that grows with the text
instead of a scan. Each entry links to the one before it with the same tokens: 4 bytes a token and a dict of distinct
n-grams.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from engine.interface.config import SpeculativeConfig
from engine.interface.protocol import SamplingParams

_MAX_CANDIDATES = 16  # occurrences compared, the latest ones
_MAX_INDEXED = 1024  # tokens per call, of which there is one for each row of a step: about a quarter of a millisecond


class NgramIndex:
    """The tokens of one request, which only grow, and their n-grams of `shortest` tokens by content."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._tokens = array("i")
        # A place is the number of tokens up to the end of an n-gram; 0: none. The latest of each n-gram, by its tokens
        # packed into one int, and for each place the one before it with the same n-gram
        self._latest: dict[int, int] = {}
        self._previous = array("i", [0])
        self._key = 0  # of the n-gram at the last place that is indexed
        self._mask = (1 << 32 * shortest) - 1

    @property
    def num_tokens(self) -> int:
        """How many tokens extend() was given."""
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens to the text."""
        self._tokens.extend(token_ids)

    def continuation(self, count: int) -> list[int]:
        """Return `count` tokens that followed the longest of the text's ends that occurred before; [] if none did.

        Compared are the last `shortest` to `longest` tokens; of equally long matches the latest counts. A match that
        reaches into the continuation goes on as it began: its text repeats itself.
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
        """Note the n-grams that another token follows, the newest of a long text in later calls."""
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


_MAX_PAUSE = 64  # tokens


class Proposer(Protocol):
    """Guesses how one request goes on."""

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """Return up to `count` tokens that may follow the output. Cheap: it runs before every step."""
        ...


class NgramProposer:
    """Proposes what followed the same tokens earlier in the prompt or the output."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._index = NgramIndex(shortest=shortest, longest=longest)

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """See Proposer.propose. The tokens of earlier calls must be those of this one, as far as they go."""
        num_prompt, num_known = len(prompt_token_ids), self._index.num_tokens
        if not num_known:
            self._index.extend(prompt_token_ids)
            num_known = num_prompt
        self._index.extend(output_token_ids[num_known - num_prompt :])
        return self._index.continuation(count)


class Drafter:
    """The drafts of one request, from its arrival to its end. Lives in the Request, and knows its tokens only.

    A row that has none of its drafts accepted has cost more than it gave, so the next drafts wait for 2, 4, 8 … tokens.
    """

    def __init__(self, proposer: Proposer, *, num_tokens: int, min_tokens: int = 0) -> None:
        """num_tokens: drafts of a row, at most. min_tokens: output before which there are none."""
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._min_tokens = min_tokens
        self._num_misses = 0  # drafted rows in a row with nothing accepted
        self._paused_until = 0  # output tokens

    def drafts(
        self, prompt_token_ids: list[int], output_token_ids: list[int], *, num_pending: int, most: int
    ) -> list[int]:
        """Return up to `most` guesses of the tokens behind the output and its num_pending tokens in flight."""
        most = min(most, self._num_tokens)
        num_output = len(output_token_ids)
        if most < 1 or num_output < self._paused_until or num_output < self._min_tokens:
            return []
        return self._proposer.propose(prompt_token_ids, output_token_ids, num_pending + most)[num_pending:]

    def verify(self, drafts: list[int], sampled: list[int], *, num_output: int) -> list[int]:
        """Return what was sampled up to the first wrong draft.

        sampled: the token after the row's own token and after each draft. num_output: tokens before these.
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
    """Return a drafter for a request that arrives; None if it is served token by token.

    Penalties and grammars change a place's logits by the tokens before it, which are drafts that may be wrong.
    """
    if params.has_penalties:
        return None
    proposer = NgramProposer(shortest=config.ngram_min, longest=config.ngram_max)
    return Drafter(proposer, num_tokens=config.num_tokens, min_tokens=params.min_tokens)
