"""Bodies and limits: what is let in, and that a refusal names field, value and limit."""

import contextlib
import warnings
from typing import get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface.errors import InvalidParameter, PromptTooLong, RequestError, UnsupportedFeature
from server.api.chat.template_messages import template_messages
from server.api.generation_spec import RequestContext, chat_spec, check_chat, check_completion, completion_spec
from server.api.ignored_fields import ignored_fields
from server.api.sampling_fields import ModelFacts
from server.api.schemas import ChatBody, CompletionBody
from server.api.strict_json import parse_body
from server.text.generation_defaults import GenerationDefaults
from server.text.tokenizer import Tokenizer
from tests.support.fakes import READY
from tests.unit.server.conftest import train_byte_level

DEFAULTS = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, eos_token_ids=(2, 3))
MODEL = ModelFacts(READY, DEFAULTS, Tokenizer(train_byte_level(), named_tokens={}, chat_template=None))
CONTEXT = RequestContext(arrival_s=100.0, timeout_s=None, seed=7)
HI = [{"role": "user", "content": "hi"}]


def chat(**fields):
    body = parse_body(ChatBody, {"messages": HI, **fields})
    check_chat(body)
    return chat_spec(body, [5] * 10, model=MODEL, context=CONTEXT)


def completion(**fields):
    body = parse_body(CompletionBody, {"prompt": "x", **fields})
    check_completion(body)
    prompts = body.prompt if isinstance(body.prompt[0], list) else [[5] * 10] * len(body.prompt)
    return completion_spec(body, prompts, model=MODEL, context=CONTEXT)


def test_a_chat_of_tokens_that_the_model_lacks_is_refused_by_its_own_field():
    """The tokenizer's vocabulary is larger than the model's: one that was made without its added tokens."""
    small = msgspec.structs.replace(READY, vocab_size=MODEL.tokenizer.vocab_size - 1)
    body = parse_body(ChatBody, {"messages": HI})
    with pytest.raises(InvalidParameter) as info:
        chat_spec(body, [5, small.vocab_size], model=MODEL._replace(limits=small), context=CONTEXT)
    assert info.value.param == "messages"
    assert str(small.vocab_size) in info.value.message


def test_logit_bias_is_declared_as_it_arrives_by_token_id():
    body = parse_body(ChatBody, {"messages": HI, "logit_bias": {"5": 1}})
    assert body.logit_bias == {5: 1.0}
    assert get_type_hints(ChatBody)["logit_bias"] == dict[int, float] | None
    with warnings.catch_warnings(action="error"):  # pydantic warns where a value is not of the declared type
        assert body.model_dump()["logit_bias"] == {5: 1.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "logit_bias should be an object, got a list of 0."),
        (True, "logit_bias should be an object, got true."),
        ({"x": 1}, "logit_bias has the key 'x', keys are token ids."),
        ({5: 1}, "logit_bias[5].[key] should be a valid string, got 5."),
        ({"5": "1"}, "logit_bias.5 should be a valid number, got '1'."),
        ({"x": "1"}, "logit_bias.x should be a valid number, got '1'."),
        ({"5": 1, "05": 2}, "logit_bias has the token 5 twice."),
        ({"5": 101}, "logit_bias has the value 101.0 for token 5, values are from -100 to 100."),
    ],
)
def test_a_wrong_logit_bias_is_named(value, message):
    with pytest.raises(InvalidParameter) as info:
        parse_body(ChatBody, {"messages": HI, "logit_bias": value})
    assert info.value.message == message


def test_a_value_is_shown_as_json_writes_it():
    for fields, shown in (({"n": True}, "got true."), ({"stream": "true"}, "got 'true'."), ({"n": 1.5}, "got 1.5.")):
        with pytest.raises(InvalidParameter, match=shown):
            parse_body(ChatBody, {"messages": HI, **fields})
    with pytest.raises(InvalidParameter, match="got null"):
        parse_body(CompletionBody, {"prompt": None})


# rule: Errors: 400 for a wrong field, with its name
# rule: Errors: A number in a string or a boolean is no number
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", "3"), ("n", True), ("n", 1.0), ("temperature", -0.1), ("temperature", 2.1),
        ("temperature", True), ("temperature", "1"), ("top_p", 1.1), ("top_p", -1), ("top_k", -2), ("top_k", 2**40),
        ("min_p", 1.5), ("repetition_penalty", 0), ("presence_penalty", 2.5), ("frequency_penalty", -2.5),
        ("max_tokens", 0), ("max_tokens", 2**70), ("max_completion_tokens", 0), ("min_tokens", -1), ("seed", 2**63),
        ("seed", 1.5), ("stop", ["a"] * 5), ("stop", ""), ("stop", ["x" * 1025]), ("stop", 3), ("stop", [3]),
        ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"-1": 1}), ("logit_bias", {"512": 1}),
        ("logit_bias", {str(i): 0 for i in range(1025)}), ("logit_bias", []), ("top_logprobs", 21),
        ("stop_token_ids", [512]), ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stream", "yes"),
        ("stream", 1), ("messages", []), ("messages", "hi"), ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", None), ("priority", 2**31), ("timeout", 0), ("timeout", 10**9), ("cache_salt", "x" * 513),
        ("stream_options", {"include_usage": 1}), ("model", 3), ("chat_template_kwargs", {"messages": []}),
        ("bad_words", "a"), ("bad_words", [""]), ("bad_words", [5]), ("bad_words", ["a"] * 129),
        ("bad_words", ["a" * 65]),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [512]), ("allowed_token_ids", 5),
        ("allowed_token_ids", [True]), ("allowed_token_ids", [5] * 16_385),
        ("tools", []), ("functions", []), ("cache_salt", ""), ("metadata", {"a": 1}), ("metadata", {"a": None}),
        ("metadata", {"a": "x" * 513}), ("metadata", {"a" * 65: "x"}),
        ("metadata", {str(i): "" for i in range(17)}), ("metadata", ["a"]),
        ("min_tokens", 250), ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", True),
    ],
)  # fmt: skip
def test_values_outside_their_limits_are_refused_by_name(field, value):
    with pytest.raises(InvalidParameter) as info:
        chat(**{field: value})
    assert info.value.param is not None
    assert info.value.param.split("[")[0].split(".")[0] == field
    assert field in info.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("audio", {}),
        ("modalities", ["audio"]), ("best_of", 2), ("prediction", {}),
        ("web_search_options", {}),
    ],
)  # fmt: skip
def test_features_of_later_are_refused_by_name(field, value):
    with pytest.raises(UnsupportedFeature) as info:
        chat(**{field: value})
    assert info.value.param == field


def test_defaults_of_refused_features_are_fine():
    chat(tool_choice="none", functions=None, response_format={"type": "text"}, modalities=["text"], best_of=2,
         n=2, store=False, metadata={"a": "b"}, user="u", service_tier="auto")  # fmt: skip
    completion(suffix="", best_of=1)


def test_null_means_absent():
    fields = [name for name in ChatBody.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(fields)) == chat()
    fields = [name for name in CompletionBody.model_fields if name != "prompt"]
    assert completion(**dict.fromkeys(fields)) == completion()


# rule: Fields: Defaults come from generation_config.json, and the request wins
def test_the_models_defaults_apply_and_the_request_wins():
    params = chat().params
    assert (params.temperature, params.top_p, params.top_k, params.stop_token_ids) == (0.6, 0.9, 20, [2, 3])
    params = chat(temperature=0, top_p=1, top_k=-1, stop_token_ids=[3, 9]).params
    assert (params.temperature, params.top_p, params.top_k, params.stop_token_ids) == (0.0, 1.0, 0, [2, 3, 9])
    assert chat(ignore_eos=True).params.stop_token_ids == []
    assert chat(top_p=0).params.top_k == 1
    assert chat(temperature=1e-300).params.is_greedy


# rule: Fields: Without a limit a chat has the rest of the context, a completion 16 tokens; `max_completion_tokens`
#     wins
def test_max_tokens_is_the_rest_of_the_context_for_chat_and_16_for_completions():
    assert chat().params.max_tokens == 246
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).params.max_tokens == 6
    assert completion().params.max_tokens == 16
    assert completion(prompt=[[1] * 250, [1]]).params.max_tokens == 6


# rule: Fields: Without a limit a chat has generation_config.json's max_new_tokens
def test_a_chat_without_a_limit_has_the_one_of_the_models_generation_config(monkeypatch):
    defaults = msgspec.structs.replace(DEFAULTS, max_new_tokens=50)
    monkeypatch.setitem(globals(), "MODEL", MODEL._replace(defaults=defaults))
    assert chat().params.max_tokens == 50
    assert chat(logprobs=True, top_logprobs=20).params.max_tokens == 50
    assert chat(max_tokens=60).params.max_tokens == 60
    assert completion().params.max_tokens == 16


# rule: Fields: Without a limit a chat has the rest of the context, a completion 16 tokens; `max_completion_tokens`
#     wins
def test_what_does_not_fit_the_context_is_refused_with_numbers():
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(PromptTooLong, match=rf"256 tokens.*257.*10 in the prompt.* {field} = 247.*246") as info:
            chat(**{field: 247})
        assert info.value.param == field
    with pytest.raises(PromptTooLong, match="max_completion_tokens = 247"):
        chat(max_tokens=5, max_completion_tokens=247)
    with pytest.raises(PromptTooLong, match="max_tokens = 250") as info:
        completion(prompt=[[1] * 10], max_tokens=250)
    assert info.value.param == "max_tokens"
    with pytest.raises(PromptTooLong, match=r"256 tokens.*256 tokens") as info:
        completion(prompt=[[1] * 256])
    assert info.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [1.5], [True], {}, 3, None, [[1], "a"], [[512]], [-1], ["a"] * 1025]
)
def test_prompts_of_other_forms_are_refused(prompt):
    with pytest.raises(InvalidParameter, match="prompt"):
        completion(prompt=prompt)


def test_too_many_choices_in_all_are_refused():
    with pytest.raises(InvalidParameter, match="1024"):
        completion(prompt=["a"] * 100, n=11)


# rule: Fields: A seed gives the same answer again
def test_seeds_are_kept_or_drawn():
    assert chat().params.seed == 7
    assert chat(seed=5).params.seed == 5
    assert 0 <= chat(seed=-1).params.seed < 2**63


def test_the_shorter_deadline_counts():
    assert chat().deadline_s is None
    assert chat(timeout=5).deadline_s == 105.0
    assert chat(timeout=5).timeout_s == 5


def test_unknown_fields_are_named():
    body = parse_body(
        ChatBody,
        {
            "messages": [{**HI[0], "cache_control": {"type": "ephemeral"}}],
            "foo": 1,
            "store": True,
            "stream": True,
            "stream_options": {"x": 1},
        },
    )
    assert ignored_fields(body) == ["foo", "store", "messages[0].cache_control", "stream_options.x"]


def ignored(**fields):
    body = parse_body(ChatBody, {"messages": HI, **fields})
    check_chat(body)
    return ignored_fields(body)


# rule: Fields: Unknown fields are named in a header, or with `--reject-unknown-fields` refused
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"parallel_tool_calls": True}, ["parallel_tool_calls"]),
        ({"parallel_tool_calls": False}, ["parallel_tool_calls"]),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, ["stream_options.include_obfuscation"]),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, ["tools"]),
        ({"functions": [{"name": "f"}], "function_call": "none"}, ["functions"]),
        (
            {"messages": [{"role": "assistant", "content": "x", "refusal": "no", "audio": {"id": "a"},
                           "function_call": {"name": "f"}, "annotations": [{}]}]},
            ["messages[0].annotations", "messages[0].audio", "messages[0].function_call", "messages[0].refusal"],
        ),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": 1}]}]},
            ["messages[1].content[0].cache_control"],
        ),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}]},
         ["messages[0].reasoning"]),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "a"}]}, []),
        ({"prompt_logprobs": 0, "n_probs": 0, "top_a": 0, "temperature_last": 0, "length_penalty": 0.0},
         ["length_penalty", "temperature_last"]),
    ],
)  # fmt: skip
def test_known_fields_without_effect_are_named(fields, names):
    assert ignored(**fields) == names


# rule: Fields: An empty list of parts, and a tool message without its call's id, are refused as OpenAI refuses them
@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": []}, "content"),
        ({"role": "assistant", "content": []}, "content"),
        ({"role": "system", "content": []}, "content"),
        ({"role": "tool", "content": [], "tool_call_id": "c"}, "content"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": None}, "tool_call_id"),
    ],
)
def test_messages_that_openai_refuses_are_refused_by_name(message, field):
    with pytest.raises(InvalidParameter) as info:
        template_messages(parse_body(ChatBody, {"messages": [*HI, message]}), knows_developer=False)
    assert info.value.param == f"messages[1].{field}"
    assert f"messages[1].{field}" in info.value.message


def test_what_asks_for_nothing_is_not_named():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert ignored(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}) == []
    answer = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
              "function_call": None, "tool_calls": [call]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}
    assert ignored(messages=[answer, result]) == []
    assert ignored(tool_choice="auto", functions=None, store=False, user="u") == []
    assert ignored(foo=None, bar="", baz=[], messages=[{**HI[0], "cache_control": None}]) == []


# rule: Limits: Messages 8,192, tools 128
@pytest.mark.parametrize("tools", ["f", {}, ["f"], [{"type": "function"}] * 129])
def test_tools_must_be_a_short_list_of_objects_also_when_none_is_called(tools):
    with pytest.raises(InvalidParameter) as info:
        chat(tools=tools, tool_choice="none")
    assert info.value.param.startswith("tools")


def messages_of(*messages):
    return template_messages(parse_body(ChatBody, {"messages": list(messages)}), knows_developer=False)


# rule: Fields: Content is a string or parts of text
def test_messages_become_what_templates_expect():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert messages_of(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        {"role": "assistant", "content": "x", "reasoning": "why"},
    ) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
    ]


# rule: Fields: Content is a string or parts of text
# rule: Security: The server fetches no URL that a user names
@pytest.mark.parametrize(
    "content",
    [None, 3, {}, [3], [{"type": "image_url", "image_url": {"url": "http://x"}}], [{"text": "a"}], [{"type": "text"}]],
)
def test_content_that_is_no_text_is_refused(content):
    with pytest.raises(RequestError) as info:
        messages_of({"role": "user", "content": content})
    assert "messages[0].content" in info.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(ChatBody.model_fields)), JSON, max_size=4))
def test_any_json_is_a_spec_or_a_request_error(fields):
    """Nothing a client can send raises anything else."""
    with contextlib.suppress(RequestError):
        chat(**fields)


def test_more_choices_than_the_server_holds_are_refused_for_good():
    few = msgspec.structs.replace(READY, max_num_seqs=2, max_queued_requests=4)
    body = parse_body(ChatBody, {"messages": HI, "n": 7})
    with pytest.raises(InvalidParameter, match=r"7 choices .* 2 at once and 4 in its queue") as caught:
        chat_spec(body, [5] * 10, model=MODEL._replace(limits=few), context=CONTEXT)
    assert caught.value.param == "n"
    body = parse_body(CompletionBody, {"prompt": ["a", "b"], "n": 3})
    assert completion_spec(body, [[5], [6]], model=MODEL._replace(limits=few), context=CONTEXT).n == 3


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        "[" * 3000 + "]" * 3000,
        '{"a": ' * 900 + "1" + "}" * 900,
        '{"a": 1e999}',
        "[1]",
    ],
)
def test_arguments_that_no_body_may_contain_stay_text(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = parse_body(ChatBody, {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]})
    (_, message) = template_messages(body, knows_developer=False)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
