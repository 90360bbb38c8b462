"""StopChecker: the same cut for any chunking; nothing leaked, nothing lost, no more held than needed."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from server.text.detokenizer import StopChecker

TEXT = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4)


def whole_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The specification: the match that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def chunked(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


# rule: Fields: `stop` ends an answer, also where it spans chunks
@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_any_chunking_equals_a_search_of_the_whole_text(text, stops, cuts):
    checker = StopChecker(stops)
    out = "".join(map(checker.push, chunked(text, cuts)))
    if checker.matched is None:
        out += checker.finish()
    assert (out, checker.matched) == whole_search(text, stops)


# rule: Fields: `stop_token_ids`, `min_tokens` and `include_stop_str_in_output` act
@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_the_stop_string_ends_the_output_when_it_is_included(text, stops, cuts):
    checker = StopChecker(stops, include_in_output=True)
    out = "".join(map(checker.push, chunked(text, cuts)))
    if checker.matched is None:
        out += checker.finish()
    before, matched = whole_search(text, stops)
    assert out == before + (matched or "")


# rule: Streams: No byte of a stop string leaks; a partial match that fails is sent unchanged
@given(TEXT, STOPS)
def test_only_the_longest_suffix_that_may_become_a_stop_string_is_held(text, stops):
    checker = StopChecker(stops)
    out = ""
    for i, char in enumerate(text):
        out += checker.push(char)
        if checker.matched is not None:
            break
        seen = text[: i + 1]
        held = max(k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k]))
        assert out == seen[: len(seen) - held]


def test_text_after_the_match_is_dropped():
    checker = StopChecker(["END"])
    assert checker.push("oneENDtwo") == "one"
    assert checker.push("three") == ""
    assert checker.finish() == ""


# rule: Streams: No byte of a stop string leaks; a partial match that fails is sent unchanged
def test_a_partial_match_that_fails_is_released_unaltered():
    checker = StopChecker(["<stop>"])
    assert [checker.push(part) for part in ("a<st", "op", "!b")] == ["a", "", "<stop!b"]
