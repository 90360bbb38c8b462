"""A step between its plan and its commit, and what a committed one gives: the scheduler's own values. Never torch."""

from typing import NamedTuple

from engine.protocol import TokenLogprobs
from engine.request import Request
from engine.step import RowPlan, StepResult


class RowOutput(NamedTuple):
    """One committed token. If it is the request's last, request.finish_reason is set."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None


class PlannedStep(NamedTuple):
    """A planned step that is not committed yet."""

    step_id: int
    rows: list[tuple[Request, RowPlan]]
    freed: list[int]  # req_indices named in its plan

    def take_in(self, result: StepResult, now: float) -> tuple[list[Request], list[Request]]:
        """Give its requests what came of their prompts; return those with scores, and those whose vector is whole."""
        scored: list[Request] = []
        embedded: list[Request] = []
        for place, scores in result.prompt_logprobs.items():
            request, _ = self.rows[place]
            request.add_scores(scores)
            scored.append(request)
        for place, total in result.pooled.items():
            request, row = self.rows[place]
            assert request.pooled is not None
            assert row.pools is not None
            request.pooled.add(row.pools, total)
            if request.pooled.is_whole and request.finish_reason is None:
                request.first_token_s = now
                embedded.append(request)
        return scored, embedded

    def blamed(self) -> list[Request]:
        """The requests that made it large: prompt chunks that ask for more than a token, else prompt chunks.

        Without any: decode rows that ask for more than a token, else all.
        """
        live = [(request, row) for request, row in self.rows if request.finish_reason is None]
        with_chunks = [request for request, row in live if row.token_ids]
        with_extras = [request for request, _ in live if request.has_extras]
        joining = [request for request in with_chunks if request.has_extras]
        return joining or with_chunks or with_extras or [request for request, _ in live]
