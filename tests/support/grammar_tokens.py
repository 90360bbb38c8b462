"""A vocabulary of 46 tokens that JSON of a few letters can be written in, for a model of 50."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.grammar.compiler import GrammarCompiler

EOS = 0
_CHARACTERS = '{}[]":,.-+\\ \n0123456789abcefklnrstuE'
_MERGES = [('"', ":"), ("{", '"'), ('"', "}"), ("t", "r"), ("u", "e"), ('"', ",")]


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a byte-level BPE in which token 0 is special."""
    letters = {" ": "Ġ", "\n": "Ċ"}
    singles = [letters.get(character, character) for character in _CHARACTERS]
    vocab = {token: i for i, token in enumerate(["<eos>", *singles, *("".join(pair) for pair in _MERGES)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    assert made.get_vocab_size() < 50
    return made


@functools.cache
def compiler() -> GrammarCompiler:
    """Return the compiler for it."""
    return GrammarCompiler(tokenizer().to_str().encode())


def text_of(token_ids: list[int]) -> str:
    """Return what an answer says, without a stop token at its end."""
    return tokenizer().decode([token_id for token_id in token_ids if token_id != EOS])


def matches(schema: dict, value: object) -> bool:
    """Judge a value by the few JSON schema keywords that the tests use."""
    if "anyOf" in schema:
        return any(matches(option, value) for option in schema["anyOf"])
    if "enum" in schema:
        return json.dumps(value) in map(json.dumps, schema["enum"])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            is_fine = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return is_fine and all(matches(schema["items"], item) for item in value)
        case "object":
            is_fine = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
            return is_fine and all(matches(schema["properties"][name], item) for name, item in value.items())
    raise AssertionError(schema)
