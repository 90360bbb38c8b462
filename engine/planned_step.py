"""A step between its plan and its commit, and what a committed one gives: the scheduler's own values. Never torch."""

from typing import NamedTuple

from engine.protocol import TokenLogprobs
from engine.request import Request
from engine.step import RowPlan


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

    def blamed(self) -> list[Request]:
        """The requests that made it large: prompt chunks that ask for more than a token, else prompt chunks.

        Without any: decode rows that ask for more than a token, else all.
        """
        live = [(request, row) for request, row in self.rows if request.finish_reason is None]
        with_chunks = [request for request, row in live if row.token_ids]
        with_extras = [request for request, _ in live if request.has_extras]
        joining = [request for request in with_chunks if request.has_extras]
        return joining or with_chunks or with_extras or [request for request, _ in live]
