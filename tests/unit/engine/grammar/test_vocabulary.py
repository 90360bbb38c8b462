"""Vocabularies read from names alone are those that llguidance reads, token by token and mask by mask."""

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.grammar import compiler as compiler_module
from engine.grammar.compiler import GrammarCompiler, Matcher
from engine.grammar.vocabulary import Vocabulary, read_vocabulary
from engine.interface.errors import GrammarError, UnsupportedFeature
from engine.interface.protocol import GrammarSpec
from server.config.model_source import DEMO_FOLDER
from server.structured_output.grammar_spec import json_schema_grammar, regex_grammar

DEMO = (DEMO_FOLDER / "tokenizer.json").read_bytes()
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ADDED = ["<|im_end|>", "<|endoftext|>", "<think>", "[INST]", "no bracket", "é", "▁", "<eos>", "<", "a"]
GRAMMARS = [
    json_schema_grammar({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    regex_grammar("[a-zé ▁<>]{2,9}"),
    regex_grammar("<think>|a+"),
]


def byte_level(words: list[str] = (), decoder: object = None) -> Tokenizer:
    """Return a tokenizer whose names stand for bytes, one character each, in random order."""
    names = [*ALPHABET, *(word for word in words if word not in ALPHABET)]
    random.Random(0).shuffle(names)
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoder or decoders.ByteLevel()
    return tokenizer


def byte_fallback(words: list[str] = ()) -> Tokenizer:
    """Return a tokenizer with names in UTF-8, "▁" for a space, and tokens of single bytes."""
    names = dict.fromkeys([*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "<", ">", *words])
    model = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def with_added(*contents: str) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(content) for content in contents])
    return tokenizer


def read_by_llguidance(tokenizer_json: bytes) -> GrammarCompiler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler_module, "read_vocabulary", lambda text, *, end: None)
        return GrammarCompiler(tokenizer_json)


def compiled(compiler: GrammarCompiler, spec: GrammarSpec) -> Matcher | str:
    """Return the matcher, or the error."""
    try:
        return compiler.compile(spec)
    except GrammarError as error:
        return error.message


def assert_same(tokenizer_json: bytes) -> None:
    """Assert that both ways make the same tokenizer."""
    assert read_vocabulary(tokenizer_json, end="<|end of grammar|>") is not None
    known, expected = GrammarCompiler(tokenizer_json), read_by_llguidance(tokenizer_json)
    assert (known.end_token_id, known.num_words) == (expected.end_token_id, expected.num_words)
    a, b = known._tokenizer, expected._tokenizer
    assert (a.vocab_size, a.eos_token) == (b.vocab_size, b.eos_token)
    for token_id in range(a.vocab_size):
        assert a.decode_bytes([token_id]) == b.decode_bytes([token_id]), token_id
        assert a.is_special_token(token_id) == b.is_special_token(token_id), token_id
    for spec in GRAMMARS:
        pair = compiled(known, spec), compiled(expected, spec)
        if isinstance(pair[0], str) or isinstance(pair[1], str):
            assert pair[0] == pair[1]  # its only letter is a special token
            continue
        choice = random.Random(1)
        for _ in range(12):
            mask, other = known.fill_masks([pair[0]])[0], expected.fill_masks([pair[1]])[0]
            assert (mask == other).all()
            allowed = [i for i in range(a.vocab_size) if mask[i // 32] >> (i % 32) & 1]
            token_id = choice.choice(allowed)
            assert pair[0].accept(token_id)
            assert pair[1].accept(token_id)
            assert pair[0].is_ended == pair[1].is_ended
            if pair[0].is_ended:
                break


def test_the_demos_vocabulary_is_the_same_both_ways():
    assert_same(DEMO)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(
    words=st.lists(st.text("abĠéÿ▁<>Ċ0x", min_size=2, max_size=5), max_size=6, unique=True),
    added=st.lists(st.sampled_from(ADDED), max_size=6, unique=True),
    special=st.sets(st.sampled_from(ADDED)),
)
def test_drawn_vocabularies_are_the_same_both_ways(
    make: Callable[[list[str]], Tokenizer], words: list[str], added: list[str], special: set[str]
):
    fit = [word for word in words if make is byte_fallback or "▁" not in word]
    tokenizer = make([word for word in fit if not word.startswith("<0x")])
    tokenizer.add_tokens([AddedToken(token, special=token in special, normalized=False) for token in added])
    assert_same(tokenizer.to_str().encode())


def test_a_sequence_of_one_decoder_is_that_decoder():
    assert_same(byte_level(decoder=decoders.Sequence([decoders.ByteLevel()])).to_str().encode())


def changed(change: Callable[[dict], object], make: Callable[[], Tokenizer] = byte_level) -> bytes:
    config = json.loads(make().to_str())
    change(config)
    return json.dumps(config).encode()


def add(token_id: int, content: str) -> Callable[[dict], object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return lambda config: config["added_tokens"].append({"id": token_id, "content": content, **flags})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        changed(lambda config: config["model"].update(type="WordPiece")),
        changed(lambda config: config["model"].update(vocab=[["a", 0.0]])),
        changed(lambda config: config["model"]["vocab"].update(ab=300)),  # a gap
        changed(lambda config: config["model"]["vocab"].update(ab=0)),  # an id twice
        changed(lambda config: config["model"]["vocab"].update(ab=-1)),
        changed(lambda config: config["model"]["vocab"].update({"a b": 256})),  # no byte has the name of a space
        changed(lambda config: config["model"]["vocab"].update(end=256)),
        changed(lambda config: config["model"]["vocab"].update({"<0xZZ>": 259}), byte_fallback),
        changed(lambda config: config["model"]["vocab"].update({"<0x1>": 260}), byte_fallback),
        changed(lambda config: config.update(decoder=None)),
        changed(lambda config: config.update(decoder={"type": "Metaspace"})),
        changed(lambda config: config.update(decoder={"type": "Sequence", "decoders": []})),
        changed(add(256, "end")),
        changed(add(256, "")),
        changed(add(256, "<x>"), lambda: with_added("<x>")),  # twice
        changed(
            lambda config: config.update(decoder={"type": "Sequence", "decoders": [config["decoder"]]}), byte_fallback
        ),
        changed(add(300, "<x>")),  # read as 256
        changed(add(7, "<x>")),
        changed(add(0, ALPHABET[0] + ALPHABET[0])),
    ],
)
def test_vocabularies_of_another_kind_are_left_to_llguidance(text: bytes):
    assert read_vocabulary(text, end="end") is None


@pytest.mark.parametrize(
    "decoder", [{}, *({"type": "Sequence"} | parts for parts in ({}, {"decoders": 3}, {"decoders": [{}]}))]
)
def test_decoders_at_fault_are_left_to_llguidance(decoder: dict):
    text = changed(lambda config: config.update(decoder=decoder))
    assert read_vocabulary(text, end="end") is None


def test_a_token_of_the_end_in_the_vocabulary_is_told():
    text = changed(add(256, "<|end of grammar|>"))
    with pytest.raises(UnsupportedFeature, match="out of range"):
        GrammarCompiler(text)


def test_a_vocabulary_tokenizes_by_the_byte():
    vocabulary = Vocabulary([b"a", b"ab", b"b", b"\xc3", b"end"], [4])
    assert vocabulary("aéb".encode()) == [0, 3, 2]
    assert vocabulary.eos_token_id == 4
