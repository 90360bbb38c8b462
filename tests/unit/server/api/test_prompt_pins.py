"""How long a prompt is to be kept reaches the engine from the fields of every API."""

import pytest

from server.api.prompt_pins import longest_mark, pin_s_of
from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, check_error

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MARK, LONG_MARK = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
BREAKPOINT = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
BODIES = {CHAT: {"messages": USER_HI}, RESPONSES: {"input": "hi"}, MESSAGES: {"messages": USER_HI, "max_tokens": 9}}


# rule: Fields: `prompt_cache_key`, `prompt_cache_retention` and `cache_control` keep a prompt in the prefix cache for a
#     time
@pytest.mark.parametrize(
    ("path", "fields", "pin_s"),
    [
        (CHAT, {}, 0.0),
        (CHAT, {"prompt_cache_key": "k"}, 600.0),
        (CHAT, {"prompt_cache_retention": "24h"}, 86_400.0),
        (CHAT, {"prompt_cache_key": "k", "prompt_cache_retention": "1h"}, 3600.0),
        (CHAT, {"prompt_cache_options": {}}, 1800.0),
        (CHAT, {"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "1h"}, 43_200.0),
        (CHAT, {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}, 0.0),
        (CHAT, {"messages": [{"role": "user", "content": [BREAKPOINT]}]}, 1800.0),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": [BREAKPOINT]}],
                "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
            },
            43_200.0,
        ),
        (RESPONSES, {}, 0.0),
        (RESPONSES, {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 86_400.0),
        (RESPONSES, {"input": [{"role": "user", "content": [BREAKPOINT | {"type": "input_text"}]}]}, 1800.0),
        (RESPONSES, {"prompt_cache_key": "k"}, 600.0),
        (RESPONSES, {"prompt_cache_retention": "in-memory"}, 600.0),
        (MESSAGES, {}, 0.0),
        (MESSAGES, {"cache_control": MARK}, 300.0),
        (MESSAGES, {"system": [{"type": "text", "text": "a", "cache_control": LONG_MARK}]}, 3600.0),
        (COMPLETIONS, {"prompt": "a"}, 0.0),
    ],
)
def test_the_time_reaches_the_engine(harness, path, fields, pin_s):
    app = harness()
    reply = app.post(path, {"model": "tiny", **BODIES.get(path, {}), **fields})
    assert reply.status_code == 200, reply.text
    assert "x-quire-ignored" not in reply.headers
    assert [request.pin_s for request in app.client.submitted] == [pin_s]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_unknown_time_is_refused_by_name(harness, path):
    body = {"model": "tiny", **BODIES[path], "prompt_cache_retention": "2d"}
    assert check_error(harness().post(path, body), 400, "invalid_parameter")["param"] == "prompt_cache_retention"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_options_that_cannot_be_followed_are_refused_or_named(harness, path):
    def send(**options):
        return harness().post(path, {"model": "tiny", **BODIES[path], "prompt_cache_options": options})

    assert send(comparison_response_id="r").headers["x-quire-ignored"] == "prompt_cache_options.comparison_response_id"
    for options, name, code in (
        ({"ttl": "2d"}, "ttl", "invalid_parameter"),
        ({"prewarm": True}, "prewarm", "unsupported_feature"),
    ):
        assert check_error(send(**options), 400, code)["param"] == f"prompt_cache_options.{name}"


@pytest.mark.parametrize(
    ("mark", "named"),
    [
        ("x", "prompt_cache_breakpoint must be an object, got 'x'."),
        ({"ttl": "2h"}, "prompt_cache_breakpoint.ttl must be 30m or 12h, got '2h'."),
        ({"ttl": ["30m"]}, "prompt_cache_breakpoint.ttl must be 30m or 12h."),
        ({"mode": "implicit"}, "prompt_cache_breakpoint.mode must be explicit, got 'implicit'."),
    ],
)
def test_a_breakpoint_that_asks_for_no_known_time_is_refused(harness, mark, named):
    part = {"text": "a", "prompt_cache_breakpoint": mark}
    chat = {"messages": [{"role": "user", "content": [part | {"type": "text"}]}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [part | {"type": "input_text"}]}
    for path, body in ((CHAT, chat), (RESPONSES, {"input": [output]})):
        error = check_error(harness().post(path, body), 400, "invalid_parameter")
        assert (error["message"], error["param"]) == (named, named.partition(" ")[0])


def test_a_mark_that_asks_for_no_known_time_is_refused(harness):
    for mark, named in (
        ("x", "cache_control"),
        ({}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl"),
    ):
        block = {"type": "text", "text": "a", "cache_control": mark}
        for fields, place in (
            ({"cache_control": mark}, ""),
            ({"messages": [{"role": "user", "content": [block]}]}, "messages[0].content[0]."),
            ({"system": [block]}, "system[0]."),
            (
                {"messages": [{"role": "user", "content": [RESULT | {"content": [block]}]}]},
                "messages[0].content[0].content[0].",
            ),
        ):
            reply = harness().post(MESSAGES, {"model": "tiny", "max_tokens": 9, "messages": USER_HI, **fields})
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith(f"{place}{named} ")


@pytest.mark.parametrize(
    ("control", "contents", "longest"),
    [
        (None, [], None),
        (None, ["text", None, 3, [1, "a"]], None),
        ({}, [[{"cache_control": "x"}]], None),
        ({"type": "other"}, [[{"type": "text", "text": "a"}]], None),
        (None, [[{"text": "a"}, {"text": "b", "cache_control": MARK}]], "5m"),
        (MARK, [[{"cache_control": LONG_MARK}]], "1h"),
        (None, [[{"type": "tool_result", "content": [{"type": "text", "cache_control": MARK}]}]], "5m"),
    ],
)
def test_the_longest_mark_counts_wherever_it_is(control, contents, longest):
    assert longest_mark(control, contents) == longest


def test_a_key_without_a_time_keeps_a_prompt_as_long_as_openai_does():
    assert pin_s_of("k", None) == pin_s_of(None, "in_memory") == 600.0
    assert pin_s_of(None, None) == pin_s_of("", None) == 0.0
