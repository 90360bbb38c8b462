"""The accounts: what the server counted on /metrics against what its clients saw.

    requests in = answered + aborted + refused

Each line of the account has a counted number and the bounds that the clients' answers give. Bounds are one number but
for clients that cannot know: one that left before its answer began may have been a 200 or a 499, and a killed process
takes the counts of its last second along.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.interface.metrics import FAILURES
from tests.chaos.client import Answer

GET_ROUTES = frozenset({"/health", "/ready", "/metrics"})  # of those who watch
ENGINE_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings"})  # one input, one choice each
_REFUSED = frozenset({"overloaded", "rate_limit_exceeded", "not_ready", "draining"})
_NOT_REJECTED = frozenset({*FAILURES, "slow_client", "client_gone"})


class Line(NamedTuple):
    """One line of the account."""

    name: str
    counted: int
    low: int
    high: int

    @property
    def is_true(self) -> bool:
        """Whether the counted number is within the bounds."""
        return self.low <= self.counted <= self.high

    def __str__(self) -> str:
        bounds = str(self.low) if self.low == self.high else f"{self.low} to {self.high}"
        return f"{self.name}: /metrics has {self.counted}, the clients saw {bounds}"


def account(
    before: Mapping[str, float], after: Mapping[str, float], answers: Sequence[Answer], *, killed: str = ""
) -> list[Line]:
    """Return the lines. killed: the process that took counts along: "", "engine" or "worker"."""
    delta = {name: int(value - before.get(name, 0)) for name, value in after.items()}
    counted = [answer for answer in answers if answer.is_counted]
    lines = [*_http_lines(delta, counted), *_outcome_lines(delta, counted)]
    if killed == "worker":
        lines = [line._replace(low=0) for line in lines]
    engine_lines = _engine_lines(delta, counted)
    return [*lines, *(line._replace(low=0) if killed else line for line in engine_lines)]


def _http_lines(delta: Mapping[str, int], answers: Sequence[Answer]) -> Iterable[Line]:
    classes = dict.fromkeys(("2xx", "4xx", "5xx"), 0)
    for name, value in delta.items():
        if name.startswith("quire_http_requests_total{"):
            route, status = (label.partition("=")[2] for label in name[:-1].partition("{")[2].rsplit(",", 1))
            classes[status] += value if route not in GET_ROUTES else 0
    num_cut = sum(answer.status == 0 and answer.end == "cut" for answer in answers)
    num_open = sum(answer.status == 0 for answer in answers)
    yield Line("requests in", sum(classes.values()), len(answers) - num_cut, len(answers))
    for name, value in classes.items():
        low = sum(f"{answer.status // 100}xx" == name for answer in answers)
        yield Line(f"answered {name}", value, low, low + num_open)


def _outcome_lines(delta: Mapping[str, int], answers: Sequence[Answer]) -> Iterable[Line]:
    refused = sum(
        answer.code not in _NOT_REJECTED if answer.status >= 400 else answer.code in _REFUSED for answer in answers
    )
    failed = sum(answer.code in FAILURES for answer in answers)
    unsure = sum(answer.status == 0 for answer in answers)
    yield Line("refused", _sum(delta, "quire_requests_rejected_total"), refused, refused + unsure)
    yield Line("failed", _sum(delta, "quire_requests_failed_total"), failed, failed + unsure)
    left = [answer for answer in answers if answer.end == "left"]
    most = len(left) + sum(answer.end == "cut" or answer.code == "slow_client" for answer in answers)
    least = sum(answer.status == 200 for answer in left)
    yield Line("clients that left", delta.get("quire_http_disconnects_total", 0), least, most)


def _engine_lines(delta: Mapping[str, int], answers: Sequence[Answer]) -> Iterable[Line]:
    generations = [answer for answer in answers if answer.path in ENGINE_PATHS]
    whole = sum(answer.end == "answered" and answer.status == 200 and not answer.code for answer in generations)
    unsure = sum(answer.status == 0 or answer.end == "cut" for answer in generations)
    ended = {reason: delta.get(f"quire_requests_finished_total{{finished_reason={reason}}}", 0) for reason in _REASONS}
    yield Line("ended by the engine", ended["stop"] + ended["length"], whole, whole + unsure)
    aborted = [answer for answer in generations if answer.end == "left"]
    least = sum(answer.status == 200 for answer in aborted)
    most = len(aborted) + sum(answer.end == "cut" or answer.code in FAILURES for answer in generations)
    yield Line("aborted", ended["abort"], least, most)


_REASONS = ("stop", "length", "abort", "error")


def _sum(delta: Mapping[str, int], name: str) -> int:
    return sum(value for series, value in delta.items() if series.partition("{")[0] == name)
