"""PlannedStep: a step between its plan and its commit, and RowOutput, its result per request. Never torch."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.request import Request
from engine.core.step import RowPlan, StepResult
from engine.interface.protocol import TokenLogprobs


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


class PlannedStep(NamedTuple):
    """A planned step that is not committed yet, with its requests."""

    step_id: int
    rows: list[tuple[Request, RowPlan]]
    freed: list[int]  # req_indices named in its plan

    def apply_prompt_outputs(self, result: StepResult, now: float) -> tuple[list[Request], list[Request]]:
        """Add prompt log-probabilities and sums to their requests.

        Returns the requests with new log-probabilities, and those with a complete embedding.
        """
        with_prompt_logprobs: list[Request] = []
        embedded: list[Request] = []
        for place, prompt_logprobs in result.prompt_logprobs.items():
            request, _ = self.rows[place]
            request.add_prompt_logprobs(prompt_logprobs)
            with_prompt_logprobs.append(request)
        for place, total in result.pooled.items():
            request, row = self.rows[place]
            assert request.embedding is not None
            assert row.pool_span is not None
            request.embedding.add(row.pool_span, total)
            if request.embedding.is_whole and request.finish_reason is None:
                request.first_token_s = now
                embedded.append(request)
        return with_prompt_logprobs, embedded

    def oom_victims(self) -> list[Request]:
        """Return the requests to fail after the step ran out of memory; disable speculation for drafted requests.

        They are the prompt chunks with has_extras, else all prompt chunks. Without prompt chunks: none if rows have
        drafts, since the step is smaller without them; else decode rows with has_extras; else all.
        """
        drafted = [request for request, row in self.rows if row.num_drafts]
        for request in drafted:
            request.drafter = None
        live = [(request, row) for request, row in self.rows if request.finish_reason is None]
        with_chunks = [request for request, row in live if row.start < request.num_prefill_tokens]
        with_extras = [request for request, _ in live if request.has_extras]
        joining = [request for request in with_chunks if request.has_extras]
        if drafted and not with_chunks:
            return []
        return joining or with_chunks or with_extras or [request for request, _ in live]


def apply_verified(
    request: Request, row: RowPlan, result: StepResult, *, first: int, now: float, counts: DraftCounts
) -> tuple[RowOutput, str | None]:
    """Add the verified tokens of a row with drafts to its request; return them, and the finish reason or None.

    first: index of the row's first sample in result.token_ids.
    """
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
