"""The table of sampling parameters: the engine's message and the model's defaults have what it promises."""

import msgspec
import pytest

from engine.interface.errors import InvalidParameter
from engine.interface.protocol import SamplingParams
from server.api.messages.schema import MessagesBody
from server.api.responses.schema import ResponsesBody
from server.api.sampling_fields import ModelFacts, SharedSampling, sampling_fields, wire_values
from server.api.schemas import ChatBody, CompletionBody
from server.api.strict_json import parse_body
from server.text.generation_defaults import GenerationDefaults
from server.text.tokenizer import Tokenizer
from tests.support.fakes import READY
from tests.unit.server.conftest import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    check_error,
    train_byte_level,
    train_sentencepiece_like,
)

FIELDS = sampling_fields(ChatBody)
WIRE = {field.name for field in msgspec.structs.fields(SamplingParams)}


def test_every_parameter_has_a_field_in_the_message_to_the_engine():
    assert FIELDS.keys() | {"max_tokens", "logprobs", "prompt_logprobs"} == WIRE


def test_the_model_has_a_default_for_every_parameter_that_says_so():
    of_models = {field.name for field in msgspec.structs.fields(GenerationDefaults)}
    of_models -= {"eos_token_ids", "max_new_tokens"}  # in forms of their own in the schemas
    assert {name for name, field in FIELDS.items() if field.default == "model"} == of_models


@pytest.mark.parametrize("body", [ResponsesBody, MessagesBody, CompletionBody, ChatBody])
def test_every_api_takes_the_shared_parameters_with_the_same_bounds(body):
    for name in sampling_fields(SharedSampling):
        assert body.model_fields[name].metadata == ChatBody.model_fields[name].metadata
        assert not body.model_fields[name].is_required()


BODIES = {
    CHAT: {"messages": USER_HI},
    COMPLETIONS: {"prompt": "Hello"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "tiny", "messages": USER_HI, "max_tokens": 5},
}
BYTE_LEVEL = Tokenizer(train_byte_level(), named_tokens={}, chat_template=None)
SENTENCEPIECE = Tokenizer(train_sentencepiece_like(), named_tokens={}, chat_template=None)


def words_on_the_wire(tokenizer: Tokenizer, *words: str) -> list[list[int]]:
    body = parse_body(CompletionBody, {"prompt": "x", "bad_words": list(words)})
    return wire_values(body, ModelFacts(READY, GenerationDefaults(), tokenizer))["bad_words"]


def texts(tokenizer: Tokenizer, sequences: list[list[int]]) -> set[str]:
    return {"".join(map(tokenizer.token_name, sequence)) for sequence in sequences}


# rule: Fields: `bad_words` and `allowed_token_ids` act
@pytest.mark.parametrize("path", BODIES)
def test_every_api_hands_both_filters_to_the_engine(harness, path):
    app = harness()
    reply = app.post(path, BODIES[path] | {"bad_words": ["fox"], "allowed_token_ids": [7, 5]})
    assert reply.status_code == 200, reply.text
    assert "x-quire-ignored" not in reply.headers
    params = app.client.submitted[-1].params
    assert app.ids("fox") in params.bad_words
    assert app.ids(" fox") in params.bad_words
    assert params.allowed_token_ids == [7, 5]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value", "param", "message"),
    [
        (
            "bad_words", ["a"] * 129, "",
            "must have at most 128 items, got a list of 129",
        ),
        (
            "bad_words", ["a", "b" * 65], "[1]",
            "should have at most 64 characters, got a string of 65 characters",
        ),
        ("bad_words", [""], "[0]", "should have at least 1 character, got ''"),
        ("allowed_token_ids", [], "", "must have at least 1 id, got a list of 0"),
        (
            "allowed_token_ids", [1] * 16_385, "",
            "must have at most 16384 ids, got a list of 16385",
        ),
        ("allowed_token_ids", [5, 512], "", "has the token id 512; ids are from 0 to 511"),
    ],
)  # fmt: skip
def test_what_is_over_a_limit_is_told_with_field_value_and_limit(harness, path, field, value, param, message):
    reply = harness().post(path, BODIES[path] | {field: value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"] == f"{field}{param} {message}."
    if path != "/v1/messages":  # Anthropic's form has no param
        assert check_error(reply, 400, "invalid_parameter")["param"] == field + param


def test_a_word_is_encoded_with_a_space_before_it_and_without():
    assert texts(BYTE_LEVEL, words_on_the_wire(BYTE_LEVEL, "fox")) == {"fox", "Ġfox"}
    assert words_on_the_wire(BYTE_LEVEL, " fox") == words_on_the_wire(BYTE_LEVEL, "fox")
    assert texts(SENTENCEPIECE, words_on_the_wire(SENTENCEPIECE, "fox")) == {"fox", "▁fox"}


def test_case_counts():
    lower, upper = (words_on_the_wire(BYTE_LEVEL, word) for word in ("the", "The"))
    assert not {tuple(sequence) for sequence in lower} & {tuple(sequence) for sequence in upper}


def test_white_space_alone_is_banned_as_it_is_and_no_other():
    assert texts(BYTE_LEVEL, words_on_the_wire(BYTE_LEVEL, "\n")) == {"Ċ"}
    assert texts(BYTE_LEVEL, words_on_the_wire(BYTE_LEVEL, " ")) == {"Ġ"}


def test_a_control_token_can_be_banned():
    assert [2] in words_on_the_wire(BYTE_LEVEL, "<|im_end|>")


def test_a_word_without_tokens_is_refused():
    class Mute(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    mute = Mute(train_byte_level(), named_tokens={}, chat_template=None)
    with pytest.raises(InvalidParameter, match=r"bad_words\[0\] has no tokens in this model's vocabulary") as info:
        words_on_the_wire(mute, "x")
    assert info.value.param == "bad_words"
