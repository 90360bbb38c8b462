"""The n-gram index finds what a search through the whole text finds, however the text grew."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.speculative import _MAX_CANDIDATES, _MAX_INDEXED, NgramIndex


def search(text: list[int], count: int, *, shortest: int, longest: int) -> list[int]:
    """What NgramIndex.continuation means, by looking everywhere: the longest match, the latest of equals."""
    places = [place for place in range(len(text)) if ends_alike(text, place, shortest)][-_MAX_CANDIDATES:]
    for length in range(longest, shortest - 1, -1):
        for place in reversed(places):
            if ends_alike(text, place, length):
                guessed = list(text)
                for i in range(count):
                    guessed.append(guessed[place + i])
                return guessed[len(text) :]
    return []


def ends_alike(text: list[int], place: int, length: int) -> bool:
    return length <= place < len(text) and text[place - length : place] == text[len(text) - length :]


@settings(deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 9),
)
def test_it_continues_as_a_search_of_the_whole_text_says(
    pieces: list[list[int]], shortest: int, more: int, count: int
) -> None:
    index, text = NgramIndex(shortest=shortest, longest=shortest + more), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.num_tokens == len(text)
        assert index.continuation(count) == search(text, count, shortest=shortest, longest=shortest + more)


def test_large_token_ids_are_told_apart() -> None:
    index = NgramIndex(shortest=2, longest=2)
    index.extend([2**31 - 1, 0, 7, 0, 2**31 - 1, 8, 1, 0])
    assert index.continuation(1) == []
    index.extend([2**31 - 1])
    assert index.continuation(3) == [8, 1, 0]


def test_a_match_that_reaches_the_end_goes_round() -> None:
    index = NgramIndex(shortest=2, longest=4)
    index.extend([9, 5, 6, 7, 5, 6, 7, 5])
    assert index.continuation(7) == [6, 7, 5, 6, 7, 5, 6]
    assert index.continuation(0) == []


def test_a_long_prompt_is_indexed_in_pieces_and_then_known_whole() -> None:
    text = [*range(3 * _MAX_INDEXED), _MAX_INDEXED * 2 + 5, _MAX_INDEXED * 2 + 6]
    index = NgramIndex(shortest=2, longest=4)
    index.extend(text)
    answers = [index.continuation(2) for _ in range(4)]
    assert answers == [[], [], [_MAX_INDEXED * 2 + 7, _MAX_INDEXED * 2 + 8], answers[2]]
