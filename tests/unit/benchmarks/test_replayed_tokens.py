"""Comparisons of streams' tokens: what is read from events, where texts part, and what the figures count."""

import json

import pytest

from benchmarks.replayed_tokens import TokenStream, compared, summary, typical_gap


def event(token_ids: list[int], logprobs: list[float], tops: list[dict[str, float]]) -> dict[str, object]:
    told = {"token_logprobs": logprobs, "top_logprobs": tops}
    return {"choices": [{"index": 0, "text": "x" * len(token_ids), "token_ids": token_ids, "logprobs": told}]}


def stream(token_ids: list[int], logprobs: list[float] | None = None, gap: float = 0.5) -> TokenStream:
    made = TokenStream("0", 0.0, 200)
    values = logprobs or [-1.0] * len(token_ids)
    for place, (token_id, logprob) in enumerate(zip(token_ids, values, strict=True)):
        told = event([token_id], [logprob], [{"a": logprob, "b": logprob - gap}])
        made.take(json.dumps(told).encode(), float(place))
    return made


def test_a_stream_has_its_tokens_their_gaps_and_its_replays() -> None:
    made = TokenStream("3", 0.0, 200)
    first = {"choices": [{"index": 0, "text": "", "token_ids": [], "prompt_token_ids": [7, 8], "logprobs": None}]}
    tops = [{" a": -0.5, " b": -2.0}, {"�": -1.0}]
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "timings": {"replays": 1}}
    for at_s, payload in enumerate((first, event([5, 6], [-0.5, -1.0], tops), last)):
        made.take(json.dumps(payload).encode(), float(at_s))
    made.take(b"[DONE]", 4.0)
    assert made.is_whole
    assert (made.prompt_ids, made.token_ids, made.logprobs, made.gaps) == ([7, 8], [5, 6], [-0.5, -1.0], [1.5, None])
    assert made.num_replays == 1
    assert (made.num_tokens_at(1.0), made.num_tokens_at(1.1)) == (0, 2)
    assert typical_gap([made]) == 1.5
    assert typical_gap([]) is None


def test_a_comparison_tells_where_texts_part_and_how_close_the_choice_was() -> None:
    found = compared(stream([1, 2, 3, 4], [-1.0, -1.0, -1.5, -9.0]), stream([1, 2, 3, 5], gap=0.25), begin=1)
    assert (found.begin, found.end, found.is_equal, found.gap) == (1, 3, False, 0.25)
    assert found.logprob_distances == [0.0, 0.5]  # of the equal tokens from begin on


def test_tokens_in_front_belong_to_the_prompt() -> None:
    whole = stream([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0])
    found = compared(stream([3, 4], [-3.0, -4.0]), whole, ahead=2)
    assert (found.is_equal, found.end, found.logprob_distances) == (True, 2, [0.0, 0.0])


@pytest.mark.parametrize(("one", "other"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2])])
def test_a_stream_that_ends_sooner_or_later_differs(one: list[int], other: list[int]) -> None:
    found = compared(stream(one), stream(other))
    assert (found.is_equal, found.end) == (False, 2)


def test_a_stream_that_differs_before_its_replay_says_nothing_of_the_replay() -> None:
    expected = stream([1, 2, 3, 4])
    figures = summary(
        [
            compared(stream([1, 2, 3, 4]), expected, begin=2),
            compared(stream([1, 2, 9, 4]), expected, begin=2),
            compared(stream([1, 2, 3, 9], [-1.0, -1.0, -1.25, -1.0]), expected, begin=2),
            compared(stream([9, 2, 3, 4]), expected, begin=2),
        ]
    )
    assert (figures["streams"], figures["differed_before"], figures["equal"]) == (4, 1, 1)
    assert figures["share_equal"] == round(1 / 3, 4)
    assert figures["first_differing_positions"] == [2, 3]
    assert figures["of_these_after_begin"] == [0, 1]
    assert (figures["tokens"], figures["tokens_for_a_difference"]) == (2 + 1 + 2, 2.5)
    assert figures["gap_at_the_difference"] == {"p50": 0.5, "p99": 0.5, "max": 0.5}
    assert figures["logprob_distance"]["max"] == 0.25
    assert figures["share_of_logprobs_equal"] == round(2 / 3, 4)


def test_without_streams_there_are_no_shares() -> None:
    figures = summary([])
    assert (figures["streams"], figures["share_equal"], figures["tokens_for_a_difference"]) == (0, None, None)
    assert figures["logprob_distance"] == {}
