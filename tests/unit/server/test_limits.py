"""Every limit of a request: its edge is let in, one more is refused by name; and no number is without limits."""

import pytest

from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, check_error

BODIES = ("ChatBody", "CompletionBody", "ResponsesBody", "MessagesBody", "CountTokensBody", "EmbeddingBody")
TEXT = "x" * 1024

EDGES = [
    (CHAT, "n", 128, 129),
    (CHAT, "stop", [TEXT] * 4, [TEXT] * 5),
    (CHAT, "stop", "é" * 512, "é" * 513),
    (CHAT, "top_logprobs", 20, 21),
    (CHAT, "logit_bias", {str(i): 1 for i in range(300)}, {str(i): 1 for i in range(1025)}),
    (CHAT, "logit_bias", {"5": 100}, {"5": 100.1}),
    (CHAT, "temperature", 2, 2.01),
    (CHAT, "top_p", 1, 1.01),
    (CHAT, "min_p", 1, 1.01),
    (CHAT, "presence_penalty", -2, -2.01),
    (CHAT, "frequency_penalty", 2, 2.01),
    (CHAT, "repetition_penalty", 10, 10.1),
    (CHAT, "seed", 2**63 - 1, 2**63),
    (CHAT, "priority", -(2**31), -(2**31) - 1),
    (CHAT, "timeout", 86_400, 86_401),
    (CHAT, "user", "u" * 512, "u" * 513),
    (CHAT, "cache_salt", "s" * 512, "s" * 513),
    (CHAT, "stop_token_ids", [5] * 1024, [5] * 1025),
    (CHAT, "bad_words", ["Hi"] * 128, ["Hi"] * 129),
    (CHAT, "bad_words", ["é" * 64], ["é" * 65]),
    (CHAT, "allowed_token_ids", [5] * 16_384, [5] * 16_385),
    (COMPLETIONS, "logprobs", 20, 21),
    (COMPLETIONS, "prompt", ["a"] * 1024, ["a"] * 1025),
]


# rule: Limits: n 128, stop 4 × 1 KiB, top_logprobs 20, logit_bias 1,024, prompts 1,024
@pytest.mark.parametrize(("path", "field", "edge", "beyond"), EDGES, ids=[f"{edge[1]}" for edge in EDGES])
def test_the_edge_is_let_in_and_one_more_is_not(harness, path, field, edge, beyond):
    app = harness(text="Hi")
    body = {"messages": USER_HI, "logprobs": True} if path == CHAT else {"prompt": "Hello"}
    body["max_tokens"] = 1
    allowed = app.post(path, {**body, field: edge})
    assert allowed.status_code == 200, allowed.text
    assert check_error(app.post(path, {**body, field: beyond}), 400, "invalid_parameter")["param"].startswith(field)


# rule: Limits: Messages 8,192, tools 128
def test_a_message_more_than_the_limit_is_refused(harness):
    error = check_error(harness().chat(messages=USER_HI * 8193), 400, "invalid_parameter")
    assert error["param"] == "messages"
    assert "8192" in error["message"]


# rule: Limits: Every number has two bounds in the schema
def test_every_number_of_every_body_has_two_bounds(harness):
    schemas = harness().get("/openapi.json").json()["components"]["schemas"]
    unbounded = [
        place for name in BODIES if name in schemas for place in numbers_without_bounds(schemas[name], name, schemas)
    ]
    assert unbounded == []


def numbers_without_bounds(schema, place, schemas, *, seen=()):
    """Yield where a schema takes a number of any size. Ids in prompts are checked against the vocabulary."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in seen:
            yield from numbers_without_bounds(schemas[name], place, schemas, seen=(*seen, name))
        return
    if schema.get("type") in ("integer", "number"):
        has_least = "minimum" in schema or "exclusiveMinimum" in schema
        if not (has_least and ("maximum" in schema or "exclusiveMaximum" in schema)):
            yield place
    for key, child in schema.get("properties", {}).items():
        if (place, key) != ("CompletionBody", "prompt"):
            yield from numbers_without_bounds(child, f"{place}.{key}", schemas, seen=seen)
    for key in ("anyOf", "oneOf", "allOf"):
        for child in schema.get(key, ()):
            yield from numbers_without_bounds(child, place, schemas, seen=seen)
    if isinstance(schema.get("items"), dict):
        yield from numbers_without_bounds(schema["items"], f"{place}[]", schemas, seen=seen)
