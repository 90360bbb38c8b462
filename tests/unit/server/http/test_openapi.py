"""The OpenAPI document says what the server does: bodies, answers, every status, keys."""

import pytest

from server.http import field_notes
from tests.unit.server.conftest import CHAT, COMPLETIONS


@pytest.fixture
def document(harness):
    return harness().get("/openapi.json").json()


def test_every_reference_leads_somewhere(document):
    found = list(references(document))
    assert found
    for reference in found:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def references(value):
    if isinstance(value, dict):
        for key, child in value.items():
            if key == "$ref":
                yield child
            else:
                yield from references(child)
    elif isinstance(value, list):
        for child in value:
            yield from references(child)


# rule: Endpoints: The OpenAPI document names every answer, status and header, and is kept
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_generating_routes_name_every_status_with_its_body(document, path):
    responses = document["paths"][path]["post"]["responses"]
    assert sorted(responses) == ["200", "400", "404", "405", "408", "409", "413", "415", "429", "431", "500", "503"]
    for status, response in responses.items():
        assert "x-request-id" in response["headers"]
        if status != "200":
            reference = response["content"]["application/json"]["schema"]["$ref"]
            assert "error" in schema(document, reference)["properties"]
    assert "retry-after" in responses["429"]["headers"]
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}


def test_embeddings_are_whole_answers(document):
    responses = document["paths"]["/v1/embeddings"]["post"]["responses"]
    assert sorted(responses) == ["200", "400", "404", "405", "408", "409", "413", "415", "429", "431", "500", "503"]
    assert list(responses["200"]["content"]) == ["application/json"]
    whole = schema(document, responses["200"]["content"]["application/json"]["schema"]["$ref"])
    assert set(whole["properties"]) == {"object", "data", "model", "usage"}
    assert "x-quire-ignored" in responses["200"]["headers"]


def schema(document, reference):
    return document["components"]["schemas"][reference.rsplit("/", 1)[1]]


def test_no_status_is_documented_that_never_comes(document):
    statuses = {status for path in document["paths"].values() for way in path.values() for status in way["responses"]}
    assert "422" not in statuses
    assert "401" not in statuses
    assert "securitySchemes" not in document["components"]


def test_with_keys_all_but_the_public_routes_need_one(harness):
    document = harness(api_key_hashes=["0" * 64]).app.openapi()
    assert document["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "www-authenticate" in document["paths"][CHAT]["post"]["responses"]["401"]["headers"]
    for path in ("/health", "/ready", "/version"):
        assert document["paths"][path]["get"]["security"] == []
        assert "401" not in document["paths"][path]["get"]["responses"]
    assert "401" in document["paths"]["/metrics"]["get"]["responses"]


# rule: Endpoints: The OpenAPI document is as strict as the server
def test_the_document_bounds_token_ids_by_the_vocabulary_once_it_is_known(harness):
    app = harness()
    ready, app.client.ready = app.client.ready, None
    assert token_bounds(app.app.openapi()) == {2**31 - 1}
    app.client.ready = ready
    assert token_bounds(app.app.openapi()) == {ready.vocab_size - 1}


def token_bounds(value) -> set[int]:
    """Return the bounds of every token id in a document."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = {value["maximum"]} if isinstance(value, dict) and value.get("format") == "token-id" else set()
    return own.union(*map(token_bounds, children))


def test_fields_that_are_never_served_are_documented_as_null(document):
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {name for name, field in fields.items() if field.get("type") == "null"} == {
        "audio",
        "functions",
        "prediction",
        "web_search_options",
    }


def test_the_document_names_the_kinds_of_items_blocks_and_tools(document):
    schemas = document["components"]["schemas"]
    items = next(kind for kind in schemas["ResponsesBody"]["properties"]["input"]["anyOf"] if "items" in kind)
    kinds = {kind["properties"]["type"].get("const") for kind in items["items"]["anyOf"]}
    assert {"function_call", "custom_tool_call", "reasoning"} < kinds
    blocks = {}
    for message in schemas["MessageParam"]["anyOf"]:
        content = next(kind for kind in message["properties"]["content"]["anyOf"] if "items" in kind)
        kinds = {kind["properties"]["type"].get("const") for kind in content["items"]["anyOf"]}
        blocks[message["properties"]["role"]["const"]] = kinds - {None}
    assert blocks == {
        "user": {"text", "tool_result"},
        "assistant": {"text", "thinking", "tool_use"},
        "system": {"text"},
    }


# rule: Endpoints: The OpenAPI document names every answer, status and header, and is kept
def test_every_field_of_every_schema_is_described(document):
    schemas = document["components"]["schemas"]
    missing = [
        f"{name}.{field}"
        for name, found in schemas.items()
        for field, about in found.get("properties", {}).items()
        if not about.get("description", "").endswith((".", "…"))
    ]
    assert missing == []


def test_every_sentence_about_a_field_of_a_request_is_of_one_that_there_is(document):
    schemas = document["components"]["schemas"]
    assert set(field_notes._ASKED) - fields_of(schemas) == set()


def fields_of(value) -> set[str]:
    """Return the names of all fields in a schema, also of those within it."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = set(value["properties"]) if isinstance(value, dict) and isinstance(value.get("properties"), dict) else set()
    return own.union(*map(fields_of, children))


def test_every_body_has_an_example_that_its_route_takes(harness, document):
    app = harness()
    for path, ways in document["paths"].items():
        if "requestBody" in ways.get("post", {}):
            example = ways["post"]["requestBody"]["content"]["application/json"]["example"]
            reply = app.request("POST", path, json=example)
            wrong = reply.json().get("error", {}).get("code") if reply.status_code != 200 else None
            assert wrong in (None, "unsupported_feature"), (path, reply.text)
