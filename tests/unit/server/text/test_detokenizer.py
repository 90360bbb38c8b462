"""Detokenizer: the pieces joined are the whole decode; no character comes out in parts."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from server.text.detokenizer import _BYTE_OF_CHAR, ByteLevelDetokenizer, WindowDetokenizer
from server.text.tokenizer import Tokenizer as ServerTokenizer
from server.text.tokenizer import load_tokenizer
from tests.unit.server.conftest import byte_fallback_ids, train_byte_level, train_sentencepiece_like

BYTE_LEVEL = train_byte_level()


SENTENCEPIECE = train_sentencepiece_like()
METASPACE = Tokenizer.from_str(SENTENCEPIECE.to_str())
METASPACE.decoder = decoders.Metaspace(prepend_scheme="first")


def streamed(
    tokenizer: Tokenizer,
    token_ids: list[int],
    cuts: list[int],
    *,
    skip_special_tokens: bool = True,
    context: Sequence[int] = (),
) -> str:
    detokenizer = ServerTokenizer(tokenizer, named_tokens={}, chat_template=None).detokenizer(
        skip_special_tokens=skip_special_tokens, context=context
    )
    borders = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    parts = [detokenizer.push(token_ids[a:b]) for a, b in pairwise(borders)]
    return "".join([*parts, detokenizer.finish()])


CUTS = st.lists(st.integers(0, 100), max_size=12)


# rule: Streams: A character in several tokens comes out whole, without U+FFFD
@given(st.text(max_size=40), CUTS)
def test_byte_level_text_comes_back_however_it_is_split(text, cuts):
    assert streamed(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids, cuts) == text.replace("<|im_end|>", "")


@given(st.lists(st.integers(0, 420), max_size=30), CUTS, st.booleans())
def test_byte_level_equals_whole_decode_for_any_ids(ids, cuts, skip):
    """Also for ids that are no UTF-8 and ids beyond the vocabulary."""
    assert streamed(BYTE_LEVEL, ids, cuts, skip_special_tokens=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet="abe lo日é😀\n", max_size=25), CUTS)
def test_byte_fallback_text_comes_back_however_it_is_split(text, cuts):
    ids = byte_fallback_ids(SENTENCEPIECE, text)
    assert SENTENCEPIECE.decode(ids) == text
    assert streamed(SENTENCEPIECE, ids, cuts) == text


@given(st.lists(st.integers(0, 299), max_size=30), CUTS, st.booleans())
def test_metaspace_equals_whole_decode_for_any_ids(ids, cuts, skip):
    assert streamed(METASPACE, ids, cuts, skip_special_tokens=skip) == METASPACE.decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet="abe lo日é😀\n", max_size=60), st.integers(0, 60), CUTS)
def test_text_goes_on_from_its_prompt_as_in_a_whole_decode(text, num_prompt_chars, cuts):
    """Llama 2's decoder strips the first space of a text, which is not the first space of an answer."""
    num_prompt = len(byte_fallback_ids(SENTENCEPIECE, text[:num_prompt_chars]))
    ids = byte_fallback_ids(SENTENCEPIECE, text)
    answer = streamed(SENTENCEPIECE, ids[num_prompt:], cuts, context=ids[:num_prompt])
    assert answer == SENTENCEPIECE.decode(ids)[len(SENTENCEPIECE.decode(ids[:num_prompt])) :]


@given(st.lists(st.integers(0, 299), max_size=30), st.integers(0, 30), CUTS, st.booleans())
def test_any_ids_go_on_from_any_prompt_as_in_a_whole_decode(ids, num_prompt, cuts, skip):
    prompt, answer = ids[:num_prompt], ids[num_prompt:]
    whole, before = (METASPACE.decode(part, skip_special_tokens=skip) for part in (ids, prompt))
    assert streamed(METASPACE, answer, cuts, skip_special_tokens=skip, context=prompt) == whole[len(before) :]


@pytest.mark.parametrize("num_cut", [1, 2])
def test_nothing_is_lost_after_a_prompt_that_ends_inside_a_character(num_cut):
    ids = byte_fallback_ids(SENTENCEPIECE, "a日")
    rest = byte_fallback_ids(SENTENCEPIECE, "bcd")[1:]
    context = ids[: len(ids) - num_cut]
    assert streamed(SENTENCEPIECE, ids[-num_cut:] + rest, [], context=context) == "日bcd"
    ids = [BYTE_LEVEL.token_to_id(byte_char(byte)) for byte in "a日bcd".encode()]
    assert streamed(BYTE_LEVEL, ids[4 - num_cut :], [], context=ids[: 4 - num_cut]) == "日bcd"


# rule: Streams: A character in several tokens comes out whole, without U+FFFD
@pytest.mark.parametrize("text", ["😀", "👍🏽", "日本語", "👨‍👩‍👧", "é"])
def test_a_character_is_never_given_in_parts(text):
    tokenizer = ServerTokenizer(BYTE_LEVEL, named_tokens={}, chat_template=None)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    by_byte = [BYTE_LEVEL.token_to_id(byte_char(byte)) for byte in text.encode()]
    parts = [detokenizer.push([token_id]) for token_id in by_byte]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)


def byte_char(byte: int) -> str:
    return {value: char for char, value in _BYTE_OF_CHAR.items()}[byte]


# rule: Fields: `skip_special_tokens` acts
def test_special_tokens_are_shown_when_asked_for():
    ids = [*BYTE_LEVEL.encode("a").ids, BYTE_LEVEL.token_to_id("<|im_end|>"), *BYTE_LEVEL.encode("b").ids]
    assert streamed(BYTE_LEVEL, ids, [1, 2]) == "ab"
    assert streamed(BYTE_LEVEL, ids, [1, 2], skip_special_tokens=False) == "a<|im_end|>b"


def test_the_cheap_detokenizer_is_chosen_for_byte_level(model_folder: Path):
    tokenizer = load_tokenizer(model_folder)
    assert isinstance(tokenizer.detokenizer(skip_special_tokens=True), ByteLevelDetokenizer)
    other = ServerTokenizer(SENTENCEPIECE, named_tokens={}, chat_template=None)
    assert isinstance(other.detokenizer(skip_special_tokens=True), WindowDetokenizer)


def test_token_bytes_joined_are_the_text(model_folder: Path):
    tokenizer = load_tokenizer(model_folder)
    ids = tokenizer.encode("naïve 日本 😀!")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "naïve 日本 😀!"
    other = ServerTokenizer(SENTENCEPIECE, named_tokens={}, chat_template=None)
    ids = byte_fallback_ids(SENTENCEPIECE, "a 日é")
    assert b"".join(map(other.token_bytes, ids)).decode() == " a 日é"
