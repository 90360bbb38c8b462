"""The table of sampling parameters: the engine's message and the model's defaults have what it promises."""

import msgspec
import pytest

from engine.interface.protocol import SamplingParams
from server.api.messages.schema import MessagesBody
from server.api.responses.schema import ResponsesBody
from server.api.sampling_fields import SharedSampling, sampling_fields
from server.api.schemas import ChatBody, CompletionBody
from server.text.generation_defaults import GenerationDefaults

FIELDS = sampling_fields(ChatBody)
WIRE = {field.name for field in msgspec.structs.fields(SamplingParams)}


def test_every_parameter_has_a_field_in_the_message_to_the_engine():
    assert FIELDS.keys() | {"max_tokens", "logprobs", "prompt_logprobs"} == WIRE


def test_the_model_has_a_default_for_every_parameter_that_says_so():
    of_models = {field.name for field in msgspec.structs.fields(GenerationDefaults)} - {"eos_token_ids"}
    assert {name for name, field in FIELDS.items() if field.default == "model"} == of_models


@pytest.mark.parametrize("body", [ResponsesBody, MessagesBody, CompletionBody, ChatBody])
def test_every_api_takes_the_shared_parameters_with_the_same_bounds(body):
    for name in sampling_fields(SharedSampling):
        assert body.model_fields[name].metadata == ChatBody.model_fields[name].metadata
        assert not body.model_fields[name].is_required()
