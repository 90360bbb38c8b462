"""Speculation without a second model: several tokens of a request per step, when its text has been there before.

A decode row may carry drafts: guesses of its next tokens, computed with it in one step. The step samples after the
row's own token and after each draft; at its commit the samples are taken up to the first that differs from the draft
behind it, that one included. Each is drawn from logits that saw only true tokens, with the noise of its own place in
the request, so the tokens are those that would have come one by one. What was computed past them is overwritten later,
and never published.

Where a drafted row ends is known at its commit alone. Until then the request has no row; the next one starts where the
host says, with the token the host sends, since the device's idea of both is wrong. A row without drafts goes on as
ever, one step ahead of its commit, and may be followed by a drafted one: the guess then includes the token that is
still on the device.

NgramIndex: where a text has stood before, so that it can be guessed how it goes on. Plain Python; imports nothing.

Prompt lookup (A. Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023): what followed the last tokens when they
occurred before is likely to follow them again. Here the occurrences are found by an index that grows with the text
instead of a scan. Each entry links to the one before it with the same tokens: 4 bytes a token and a dict of distinct
n-grams.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from engine.core.block_manager import BlockManager
from engine.core.request import Request
from engine.core.step import NEWEST, RowPlan
from engine.interface.config import SpeculativeConfig

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

    def propose(self, request: Request, count: int) -> list[int]:
        """Return up to `count` tokens that may follow the committed ones. Cheap: it runs before every step."""
        ...


class NgramProposer:
    """Proposes what followed the same tokens earlier in the prompt or the output."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._index = NgramIndex(shortest=shortest, longest=longest)

    def propose(self, request: Request, count: int) -> list[int]:
        """See Proposer.propose."""
        num_prompt, num_known = len(request.prompt_token_ids), self._index.num_tokens
        if not num_known:
            self._index.extend(request.prompt_token_ids)
            num_known = num_prompt
        self._index.extend(request.output_token_ids[num_known - num_prompt :])
        return self._index.continuation(count)


class Drafter:
    """What speculating on one request needs, from its arrival to its end. Lives in the Request.

    A row that has none of its drafts accepted has cost more than it gave, so the next drafts wait for 2, 4, 8 … tokens.
    """

    def __init__(self, proposer: Proposer, *, num_tokens: int) -> None:
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._drafted_step: int | None = None  # the newest with drafts of it
        self._num_misses = 0  # drafted rows in a row with nothing accepted
        self._paused_until = 0  # output tokens

    def is_unverified(self, request: Request, committed_step_id: int) -> bool:
        """True while nobody knows where the request's next row starts. A step that was given up counts as committed."""
        return request.last_step == self._drafted_step and request.last_step > committed_step_id

    def extend(
        self, row: RowPlan, request: Request, blocks: BlockManager, *, step_id: int, most: int, num_reserved: int
    ) -> None:
        """Add up to `most` drafts to a decode row that is about to be planned for step_id, and blocks for them.

        Blocks are taken only while more than num_reserved are free, so drafts preempt nobody.
        """
        if request.last_step == self._drafted_step:
            row.token_ids = [request.output_token_ids[-1]]
        # the last place of the request is sampled, never computed
        most = min(most, self._num_tokens, request.max_num_tokens - row.start - 2)
        num_output = len(request.output_token_ids)
        if most < 1 or num_output < self._paused_until or num_output < request.params.min_tokens:
            return
        num_pending = request.num_pending_tokens
        drafts = self._proposer.propose(request, num_pending + most)[num_pending:]
        wanted = row.start + 1 + len(drafts)
        while (room := len(request.block_ids) * blocks.block_size) < wanted and blocks.num_free > num_reserved:
            row.new_block_ids = [*row.new_block_ids, blocks.grow(request)]
        drafts = drafts[: room - row.start - 1]
        if not drafts:
            return
        row.token_ids = [*(row.token_ids or [NEWEST]), *drafts]
        row.num_drafts = len(drafts)
        row.num_tokens = 1 + len(drafts)
        self._drafted_step = step_id

    def verify(self, request: Request, row: RowPlan, sampled: list[int]) -> list[int]:
        """Return what was sampled up to the first wrong draft; what was planned past that counts as never planned."""
        num_accepted = 0
        while num_accepted < row.num_drafts and sampled[num_accepted] == row.token_ids[num_accepted + 1]:
            num_accepted += 1
        if num_accepted:
            self._num_misses = 0
        else:
            self._num_misses += 1
            self._paused_until = len(request.output_token_ids) + 1 + min(2**self._num_misses, _MAX_PAUSE)
        num_rejected = row.num_drafts - num_accepted
        request.num_computed_tokens -= num_rejected
        request.num_pending_tokens -= num_rejected
        return sampled[: num_accepted + 1]


def make_drafter(config: SpeculativeConfig, request: Request) -> Drafter | None:
    """Return a drafter for a request that arrives; None if it is served token by token.

    Penalties and grammars change a place's logits by the tokens before it, which are drafts that may be wrong.
    """
    if request.params.has_penalties:
        return None
    return Drafter(NgramProposer(shortest=config.ngram_min, longest=config.ngram_max), num_tokens=config.num_tokens)
