"""The account between /metrics and the clients: it agrees when it should, and each wrong count is found."""

from collections import Counter

import pytest

from tests.chaos.client import Answer
from tests.chaos.ledger import account

_PATH = "/v1/completions"
_ANSWERS = [
    *(Answer("answered", 200, path=_PATH) for _ in range(3)),
    Answer("answered", 200, "engine_dead", path=_PATH),
    Answer("answered", 429, "overloaded", path=_PATH),
    Answer("answered", 400, "invalid_parameter", path=_PATH),
    Answer("left", 200, path=_PATH),
    Answer("left", 0, path=_PATH),
    Answer("answered", 431, "headers_too_large", path=_PATH, is_counted=False),
]
_COUNTED = {
    f"quire_http_requests_total{{route={_PATH},status=2xx}}": 5,
    f"quire_http_requests_total{{route={_PATH},status=4xx}}": 3,
    f"quire_http_requests_total{{route={_PATH},status=5xx}}": 0,
    "quire_http_requests_total{route=/health,status=2xx}": 99,
    "quire_requests_rejected_total{reason=overloaded}": 1,
    "quire_requests_rejected_total{reason=invalid}": 1,
    "quire_requests_failed_total{reason=engine_dead}": 1,
    "quire_http_disconnects_total": 2,
    "quire_requests_finished_total{finished_reason=length}": 2,
    "quire_requests_finished_total{finished_reason=stop}": 1,
    "quire_requests_finished_total{finished_reason=abort}": 1,
}


def wrong(counted: dict[str, int], answers: list[Answer] = _ANSWERS, *, killed: str = "") -> list[str]:
    before = dict.fromkeys(counted, 7.0)
    after = {name: 7.0 + value for name, value in counted.items()}
    return [line.name for line in account(before, after, answers, killed=killed) if not line.is_true]


def test_counters_that_agree_with_the_clients_are_right() -> None:
    assert wrong(_COUNTED) == []


@pytest.mark.parametrize(
    ("series", "change", "line"),
    [
        (f"quire_http_requests_total{{route={_PATH},status=2xx}}", -1, "requests in"),
        (f"quire_http_requests_total{{route={_PATH},status=5xx}}", 2, "answered 5xx"),
        ("quire_requests_rejected_total{reason=overloaded}", -1, "refused"),
        ("quire_requests_rejected_total{reason=invalid}", 2, "refused"),
        ("quire_requests_failed_total{reason=engine_dead}", -1, "failed"),
        ("quire_http_disconnects_total", 1, "clients that left"),
        ("quire_requests_finished_total{finished_reason=length}", -1, "ended by the engine"),
        ("quire_requests_finished_total{finished_reason=abort}", 3, "aborted"),
    ],
)
def test_a_wrong_count_is_found(series: str, change: int, line: str) -> None:
    assert line in wrong({**_COUNTED, series: _COUNTED[series] + change})


def test_a_client_that_left_before_its_answer_counts_as_either() -> None:
    early = [Answer("left", 0, path=_PATH)]
    for status in ("2xx", "4xx"):
        assert wrong({f"quire_http_requests_total{{route={_PATH},status={status}}}": 1}, early) == []
    assert wrong({}, early) == ["requests in"]


def test_a_killed_process_may_take_counts_along_but_not_add_any() -> None:
    half = {name: value // 2 for name, value in _COUNTED.items()}
    assert wrong(half)
    assert wrong(half, killed="worker") == []
    assert "requests in" in wrong(half, killed="engine")  # the workers count those
    more = {name: 2 * value for name, value in _COUNTED.items()}
    assert "answered 2xx" in wrong(more, killed="worker")


def test_an_outcome_names_an_error_inside_a_stream() -> None:
    outcomes = Counter(answer.outcome for answer in _ANSWERS)
    assert outcomes == {"200": 3, "200 engine_dead": 1, "429": 1, "400": 1, "431": 1, "left": 2}
