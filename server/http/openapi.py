"""The OpenAPI document: FastAPI's, with bodies, replies, errors and headers. Imports fastapi, msgspec, pydantic.

The handlers parse bodies and write replies themselves, so FastAPI knows neither: both are in the ApiRoutes.
The document is made once per app.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.api.embeddings.schema import EmbeddingBody
from server.api.error_replies import AnthropicBody, ErrorBody, speaks_anthropic
from server.http.field_notes import note_of
from server.http.routes.api_route import ApiRoute, described_routes

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_PREFIX = "Answer."  # a message that is sent and a message that is answered are two schemas of one name
_HEADER_REF = "#/components/headers/"
# What answers have besides their body. On every answer: x-request-id.
_HEADERS: dict[str, tuple[Schema, str]] = {
    "x-request-id": ({"type": "string", "maxLength": 128}, "The request's own id, or a new one."),
    "x-quire-ignored": ({"type": "string"}, "Fields of the request that had no effect, comma-separated."),
    "x-quire-cache": ({"type": "string"}, "Why no more of the prompt was in the prefix cache."),
    "x-should-retry": ({"type": "string", "enum": ["false"]}, "The same request would fail again."),
    "retry-after": ({"type": "string", "pattern": "^[0-9]+$"}, "Seconds after which to try again."),
    "allow": ({"type": "string"}, "The methods that the route takes."),
    "www-authenticate": ({"type": "string"}, "How to authenticate."),
}
_STATUSES: dict[int, tuple[str, tuple[str, ...]]] = {
    400: ("The request is malformed, or a field is wrong or not served", ("x-should-retry",)),
    401: ("The API key is missing or wrong", ("x-should-retry", "www-authenticate")),
    403: ("The API key lacks the route's role", ("x-should-retry",)),
    404: ("No such model", ("x-should-retry",)),
    405: ("The route does not take this method", ("x-should-retry", "allow")),
    408: ("The request's time is over", ("x-should-retry",)),
    409: ("The request was cancelled", ("x-should-retry",)),
    413: ("The body is over the limit", ("x-should-retry",)),
    415: ("The content type is not JSON", ("x-should-retry",)),
    429: ("The queue is full", ("retry-after",)),
    431: ("The headers are over the limit", ("x-should-retry",)),
    500: ("The server failed", ()),
    503: ("Not ready, shutting down, or out of memory for this request", ("retry-after",)),
}
_ANY_ROUTE = (400, 405, 431, 500)
_WITH_BODY = (404, 408, 409, 413, 415, 429, 503)


def openapi_document(
    app: FastAPI, routes: Sequence[ApiRoute], *, needs_key: bool, vocab_size: int | None = None
) -> Schema:
    """Return the whole document. routes: the app's; needs_key: API keys are set; vocab_size: None if not known yet."""
    document = get_openapi(title=app.title, version=app.version, routes=described_routes(routes))
    shown = {route.document_path: route for route in routes if route.summary}
    schemas = {**_body_schemas(shown.values()), **_answer_schemas(shown.values())}
    schemas = {name: _with_notes(schema, name) for name, schema in schemas.items()}
    if vocab_size is not None:
        schemas = _with_token_ids(schemas, vocab_size)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _fill_in(operation, shown[path], needs_key=needs_key)
    document["components"] = {
        "schemas": schemas,
        "headers": {name: {"description": text, "schema": schema} for name, (schema, text) in _HEADERS.items()},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"x-api-key": []}]
    return document


def _with_notes(value: Any, name: str) -> Any:
    """Return a schema whose fields, also those of the schemas within it, have their descriptions."""
    if isinstance(value, list):
        return [_with_notes(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_notes(item, name) for key, item in value.items()}
    if isinstance(value.get("properties"), dict) and "properties" in found:
        found["properties"] = {
            field: {"description": note, **schema}
            if (note := note_of(name, field)) and isinstance(schema, dict)
            else schema
            for field, schema in found["properties"].items()
        }
    return found


def _with_token_ids(value: Any, vocab_size: int) -> Any:
    """Return the schemas with the vocabulary's bound of token ids."""
    if isinstance(value, list):
        return [_with_token_ids(item, vocab_size) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_token_ids(item, vocab_size) for key, item in value.items()}
    return found | {"maximum": vocab_size - 1} if value.get("format") == "token-id" else found


def _fill_in(operation: Schema, route: ApiRoute, *, needs_key: bool) -> None:
    statuses = [*_ANY_ROUTE, *route.error_statuses]
    if route.body is not None:
        content = _json_content(route.body.__name__)
        if route.example is not None:
            content["application/json"]["example"] = dict(route.example)
        operation["requestBody"] = {"required": True, "content": content}
        statuses += _WITH_BODY
    elif "{" in route.path:
        statuses.append(404)
    if needs_key and not route.is_public:
        statuses += [401, 403] if route.role else [401]
    error = _json_content(_name(AnthropicBody if speaks_anthropic(route.path) else ErrorBody))
    responses: Schema = {"200": _success(route)}
    for status in sorted(statuses):
        description, headers = _STATUSES[status]
        responses[str(status)] = _response(description, error, headers)
    if route.is_state:
        responses["503"] = {**responses["200"], "description": "Not now; the body says why"}
    if route.is_public:
        operation["security"] = []
    operation["responses"] = responses


def _success(route: ApiRoute) -> Schema:
    headers: tuple[str, ...] = ("x-quire-ignored",) if route.body is not None else ()
    if headers and route.stream is not None:
        headers = (*headers, "x-quire-cache")
    if route.answer is None:
        return _response("Success", {route.media_type: {}}, headers)
    content = _json_content(_name(route.answer))
    if route.is_list:
        content = {"application/json": {"schema": {"type": "array", "items": content["application/json"]["schema"]}}}
    if route.has_page:
        content["text/html"] = {"schema": {"type": "string"}}
    if route.stream is not None:
        data = route.stream if isinstance(route.stream, str) else f"{_name(route.stream)}, and [DONE] at the end"
        event = {"data": {"type": "string", "description": data}, "event": {"type": "string"}}
        content["text/event-stream"] = {"schema": {"type": "object", "properties": event}}
    return _response("Success", content, headers)


def _name(kind: type[msgspec.Struct]) -> str:
    return _PREFIX + kind.__name__


def _response(description: str, content: Schema, headers: tuple[str, ...]) -> Schema:
    named = {name: {"$ref": _HEADER_REF + name} for name in ("x-request-id", *headers)}
    return {"description": description, "headers": named, "content": content}


def _json_content(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF + name}}}


def _body_schemas(routes: Iterable[ApiRoute]) -> Schema:
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    schemas: Schema = {}
    for body in sorted(bodies, key=lambda body: body is EmbeddingBody):  # the last one, so that the bytes stay
        schema = body.model_json_schema(ref_template=_REF + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
    return schemas


def _answer_schemas(routes: Iterable[ApiRoute]) -> Schema:
    types: set[type[msgspec.Struct]] = {ErrorBody, AnthropicBody}
    for route in routes:
        types.update(kind for kind in (route.answer, route.stream) if isinstance(kind, type))
    in_order = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(in_order, ref_template=_REF + _PREFIX + "{name}")
    return {_PREFIX + name: schema for name, schema in components.items()}
