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
"""

from __future__ import annotations

from typing import Protocol

from engine.core.block_manager import BlockManager
from engine.core.ngram import NgramIndex
from engine.core.request import Request
from engine.core.step import NEWEST, RowPlan
from engine.interface.config import SpeculativeConfig

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
