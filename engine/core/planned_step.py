"""PlannedStep: a step between its plan and its commit, with its requests; StepOutputs: what its commit made of it.

Never torch. Rows of steady requests are columns (engine/core/steady_rows.py), all others are objects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.core.request import Request
from engine.core.steady_rows import SteadyOutput, SteadyStep
from engine.core.step import NEWEST, RequestInit, RequestShare, RowPlan, SteadyRowsPlan, StepPlan, StepResult
from engine.interface.protocol import TokenLogprobs

if TYPE_CHECKING:
    from engine.core.checkpoints import StepKv
    from engine.core.kv_caches import KvCaches
    from engine.core.speculative import Drafter


class RowOutput(NamedTuple):
    """The tokens of one request from a committed step: one, or several with drafts.

    request.finish_reason is set if the request ended with them.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one per token, if requested


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafted rows, draft tokens and accepted draft tokens."""

    num_rows: int = 0
    num_tokens: int = 0
    num_accepted: int = 0


class StepOutputs(NamedTuple):
    """The tokens of a committed step: of steady requests, and of all others."""

    steady: list[SteadyOutput]
    singles: list[RowOutput]

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return sum(len(part.token_ids) for part in self.steady) + sum(len(row.token_ids) for row in self.singles)

    def rows(self) -> list[RowOutput]:
        """Return the tokens request by request."""
        steady = [pair for part in self.steady for pair in zip(part.requests, part.token_ids, strict=True)]
        return [*(RowOutput(request, [token_id], None) for request, token_id in steady), *self.singles]


class PlannedStep(NamedTuple):
    """A planned step that is not committed yet, with its requests."""

    step_id: int
    singles: list[tuple[Request, RowPlan]]
    freed: list[int]  # req_indices named in its plan
    kv: StepKv
    steady: list[SteadyStep]  # in the order of its plan
    new_blocks: list[tuple[int, int, int, list[int]]]  # of the steady rows: SteadyRowsPlan.new_blocks

    def plan(self, inits: list[RequestInit], shares: list[RequestShare], spared_us: int) -> StepPlan:
        """Return the plan for the executor."""
        host = self.kv.host
        req_index, start = b"".join(s.req_index for s in self.steady), b"".join(s.start for s in self.steady)
        return StepPlan(
            self.step_id,
            [row for _, row in self.singles],
            inits,
            self.freed,
            zeroed=self.kv.zeroed,
            copies_in=self.kv.copies_in,
            copies_out=self.kv.copies_out,
            steady=SteadyRowsPlan(req_index, start, self.new_blocks),
            shares=shares,
            spared_us=spared_us,
            copies_to_host=[] if host is None else host.to_host,
            copies_from_host=[] if host is None else host.from_host,
        )

    @property
    def num_steady(self) -> int:
        """The number of steady rows."""
        return sum(len(part.requests) for part in self.steady)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.num_steady + len(self.singles)

    def num_tokens(self) -> tuple[int, int]:
        """Return its prompt tokens, and the tokens of rows that decode, drafts included."""
        num_prompt, num_decode = 0, self.num_steady
        for _, row in self.singles:
            if len(row.token_ids) > 1 + row.num_drafts:
                num_prompt += row.num_tokens
            else:
                num_decode += row.num_tokens
        return num_prompt, num_decode

    def starts(self) -> list[tuple[Request, int]]:
        """Return each row's request and start, in the order of its plan."""
        steady = [pair for part in self.steady for pair in zip(part.requests, part.starts(), strict=True)]
        return [*steady, *((request, row.start) for request, row in self.singles)]

    def apply_prompt_outputs(
        self, result: StepResult, now: float
    ) -> tuple[list[Request], list[Request], list[Request]]:
        """Add prompt log-probabilities and sums to their requests.

        Returns the requests with new log-probabilities, those with a complete embedding, and those whose outputs are
        not finite, which have the finish reason "error".
        """
        num_steady = self.num_steady if result.prompt_logprobs or result.pooled else 0  # places count all rows
        with_prompt_logprobs: list[Request] = []
        embedded: list[Request] = []
        invalid: list[Request] = []
        for place, prompt_logprobs in result.prompt_logprobs.items():
            request, _ = self.singles[place - num_steady]
            if request.finish_reason is None and any(math.isnan(entry.logprob) for entry in prompt_logprobs):
                request.finish_reason = "error"
                invalid.append(request)
                continue
            request.add_prompt_logprobs(prompt_logprobs)
            with_prompt_logprobs.append(request)
        for place, total in result.pooled.items():
            request, row = self.singles[place - num_steady]
            assert request.embedding is not None
            assert row.pool_span is not None
            request.embedding.add(row.pool_span, total)
            if not request.embedding.is_whole or request.finish_reason is not None:
                continue
            if request.embedding.is_finite:
                request.first_token_s = now
                embedded.append(request)
            else:
                request.finish_reason = "error"
                invalid.append(request)
        return with_prompt_logprobs, embedded, invalid

    def oom_victims(self) -> list[Request]:
        """Return the requests to fail after the step ran out of memory; disable speculation for drafted requests.

        They are the prompt chunks with has_extras, else all prompt chunks. Without prompt chunks: none if rows have
        drafts, since the step is smaller without them; else decode rows with has_extras; else all.
        """
        drafted = [request for request, row in self.singles if row.num_drafts]
        for request in drafted:
            request.drafter = None
        live = [(request, start) for request, start in self.starts() if request.finish_reason is None]
        with_chunks = [request for request, start in live if start < request.num_prefill_tokens]
        with_extras = [request for request, _ in live if request.has_extras]
        joining = [request for request in with_chunks if request.has_extras]
        if drafted and not with_chunks:
            return []
        return joining or with_chunks or with_extras or [request for request, _ in live]


def add_drafts(
    row: RowPlan, request: Request, drafter: Drafter, caches: KvCaches, kv: StepKv, *, most: int, num_reserved: int
) -> None:
    """Add up to `most` drafts to a decode row that is about to be planned, and blocks for them.

    Blocks are taken only while a block stays free for each of num_reserved running requests, so drafts preempt none.
    """
    if request.is_drafted:
        row.token_ids = [request.output_token_ids[-1]]
    most = min(most, request.max_num_tokens - row.start - 2)  # the last token is sampled, never computed
    most = min(most, request.next_save_tokens - row.start - 2)  # a state is saved behind a row without drafts
    drafts = drafter.drafts(
        request.prompt_token_ids, request.output_token_ids, num_pending=request.num_pending_tokens, most=most
    )
    end = row.start + 1 + len(drafts)
    if end > request.num_held_tokens:
        end = caches.fit(request, end, num_reserved=num_reserved)
        row.new_blocks = [*row.new_blocks, *caches.begin_row(request, end, kv, num_reserved=0)]
        drafts = drafts[: end - row.start - 1]
    if drafts:
        row.token_ids = [*(row.token_ids or [NEWEST]), *drafts]
        row.num_drafts = len(drafts)
        row.num_tokens = 1 + len(drafts)


def apply_samples(
    request: Request, row: RowPlan, result: StepResult, *, first: int, now: float, counts: DraftCounts
) -> tuple[RowOutput, str | None]:
    """Add a row's sampled tokens, with drafts the verified ones, to its request; return them, and its finish reason.

    first: index of the row's first sample in result.token_ids. The reason is None if the request goes on, "error" if
    its logits are not finite.
    """
    if row.num_drafts:
        output, reason = _apply_verified(request, row, result, first=first, now=now, counts=counts)
    else:
        token_id, logprobs = result.token_ids[first], result.logprobs
        output = RowOutput(request, [token_id], [logprobs[first]] if first in logprobs else None)
        reason = request.append(token_id, now)
    if reason == "error":
        request.finish_reason = reason
    return output, reason


def _apply_verified(
    request: Request, row: RowPlan, result: StepResult, *, first: int, now: float, counts: DraftCounts
) -> tuple[RowOutput, str | None]:
    assert request.drafter is not None
    token_ids, logprobs, reason = [], result.logprobs, None
    sampled = result.token_ids[first : first + row.num_samples]
    verified = request.drafter.verify(row.token_ids[1:], sampled, num_output=len(request.output_token_ids))
    num_rejected = len(sampled) - len(verified)  # tokens planned after a wrong draft are no longer counted
    request.num_computed_tokens -= num_rejected
    request.num_pending_tokens -= num_rejected
    for token_id in verified:
        token_ids.append(token_id)
        reason = request.append(token_id, now)
        if reason is not None:
            break
    counts.num_rows += 1
    counts.num_tokens += row.num_drafts
    counts.num_accepted += len(token_ids) - 1
    row_logprobs = [logprobs[i] for i in range(first, first + len(token_ids))] if first in logprobs else None
    return RowOutput(request, token_ids, row_logprobs), reason
