"""The OpenAPI document: FastAPI's, with bodies, replies, errors and headers. Imports fastapi, msgspec, pydantic.

The routes parse bodies and write replies themselves, so FastAPI knows neither. A route that reads a body names its
schema in `openapi_extra={"x-body": …}`; the replies are in _ANSWERS, by path. The document is made once per app.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from server.api.embeddings.run import EmbeddingList
from server.api.error_replies import AnthropicBody, ErrorBody, speaks_anthropic
from server.api.messages.objects import Message, TokenCount
from server.api.objects import (
    CancelledRequest,
    ChatChunk,
    ChatCompletion,
    Detokenized,
    ModelCard,
    ModelList,
    Rendered,
    TextCompletion,
)
from server.api.responses.objects import Response
from server.http.routes.kv_feed import KvState

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_PREFIX = "Answer."  # a message that is sent and a message that is answered are two schemas of one name
_HEADER_REF = "#/components/headers/"
# What answers have besides their body. On every answer: x-request-id.
_HEADERS: dict[str, tuple[Schema, str]] = {
    "x-request-id": ({"type": "string", "maxLength": 128}, "The request's own id, or a new one."),
    "x-quire-ignored": ({"type": "string"}, "Fields of the request that had no effect, comma-separated."),
    "x-should-retry": ({"type": "string", "enum": ["false"]}, "The same request would fail again."),
    "retry-after": ({"type": "string", "pattern": "^[0-9]+$"}, "Seconds after which to try again."),
    "allow": ({"type": "string"}, "The methods that the route takes."),
    "www-authenticate": ({"type": "string"}, "How to authenticate."),
}
_STATUSES: dict[int, tuple[str, tuple[str, ...]]] = {
    400: ("The request is malformed, or a field is wrong or not served", ("x-should-retry",)),
    401: ("The API key is missing or wrong", ("x-should-retry", "www-authenticate")),
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
_PUBLIC = ("/health", "/ready", "/version")  # no key is asked for


class _Answers(msgspec.Struct, frozen=True):
    """The 200 reply of a route. stream: the data of its events, and their end."""

    whole: type[msgspec.Struct]
    stream: str | None = None
    is_list: bool = False


class Health(msgspec.Struct):
    """The reply of GET /health; detail: the fault."""

    status: str
    detail: str | msgspec.UnsetType = msgspec.UNSET


class Ready(msgspec.Struct):
    """The reply of GET /ready; done: the finished part of the stage, 0 to 1."""

    stage: str
    done: float


class Version(msgspec.Struct):
    """The reply of GET /version."""

    version: str


def _name(kind: type[msgspec.Struct]) -> str:
    return _PREFIX + kind.__name__


_ANSWERS: dict[str, _Answers] = {
    "/v1/chat/completions": _Answers(ChatCompletion, f"{_name(ChatChunk)}, and [DONE] at the end"),
    "/v1/completions": _Answers(TextCompletion, f"{_name(TextCompletion)}, and [DONE] at the end"),
    "/v1/responses": _Answers(Response, "OpenAI's named events, from response.created to response.completed"),
    "/v1/messages": _Answers(Message, "Anthropic's named events, from message_start to message_stop"),
    "/v1/messages/count_tokens": _Answers(TokenCount),
    "/v1/embeddings": _Answers(EmbeddingList),
    "/v1/chat/completions/render": _Answers(Rendered),
    "/v1/completions/render": _Answers(Rendered, is_list=True),
    "/v1/requests/{request_id}": _Answers(CancelledRequest),
    "/detokenize": _Answers(Detokenized),
    "/v1/models": _Answers(ModelList),
    "/v1/models/{model_id}": _Answers(ModelCard),
    "/health": _Answers(Health),
    "/ready": _Answers(Ready),
    "/version": _Answers(Version),
    "/kv/snapshot": _Answers(KvState),
}
_MAY_BE_503 = ("/kv/snapshot",)  # with an error
_ALSO_503 = ("/health", "/ready")  # with the same body as their 200


def openapi_document(app: FastAPI, *, bodies: Mapping[str, type[BaseModel]], needs_key: bool) -> Schema:
    """Return the whole document. bodies: by the names in x-body; needs_key: API keys are set."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = {**_body_schemas(bodies), **_answer_schemas()}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _fill_in(operation, path, needs_key=needs_key and path not in _PUBLIC)
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


def _fill_in(operation: Schema, path: str, *, needs_key: bool) -> None:
    statuses = [*_ANY_ROUTE]
    if (name := operation.pop("x-body", None)) is not None:
        operation["requestBody"] = {"required": True, "content": _json_content(name)}
        statuses += _WITH_BODY
    elif "{" in path:
        statuses.append(404)
    if path in _MAY_BE_503:
        statuses.append(503)
    if needs_key:
        statuses.append(401)
    error = _json_content(_name(AnthropicBody if speaks_anthropic(path) else ErrorBody))
    responses: Schema = {"200": _success(path, has_body=name is not None)}
    for status in sorted(statuses):
        description, headers = _STATUSES[status]
        responses[str(status)] = _response(description, error, headers)
    if path in _ALSO_503:
        responses["503"] = {**responses["200"], "description": "Not now; the body says why"}
    if not needs_key and path in _PUBLIC:
        operation["security"] = []
    operation["responses"] = responses


def _success(path: str, *, has_body: bool) -> Schema:
    headers = ("x-quire-ignored",) if has_body else ()
    answers = _ANSWERS.get(path)
    if answers is None:
        return _response("Success", {"text/plain" if path == "/metrics" else "application/json": {}}, headers)
    content = _json_content(_name(answers.whole))
    if answers.is_list:
        content = {"application/json": {"schema": {"type": "array", "items": content["application/json"]["schema"]}}}
    if answers.stream is not None:
        event = {"data": {"type": "string", "description": answers.stream}, "event": {"type": "string"}}
        content["text/event-stream"] = {"schema": {"type": "object", "properties": event}}
    return _response("Success", content, headers)


def _response(description: str, content: Schema, headers: tuple[str, ...]) -> Schema:
    named = {name: {"$ref": _HEADER_REF + name} for name in ("x-request-id", *headers)}
    return {"description": description, "headers": named, "content": content}


def _json_content(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF + name}}}


def _body_schemas(bodies: Mapping[str, type[BaseModel]]) -> Schema:
    schemas: Schema = {}
    for name, model in bodies.items():
        schema = model.model_json_schema(ref_template=_REF + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[name] = schema
    return schemas


def _answer_schemas() -> Schema:
    types = {answers.whole for answers in _ANSWERS.values()} | {ChatChunk, ErrorBody, AnthropicBody}
    in_order = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(in_order, ref_template=_REF + _PREFIX + "{name}")
    return {_PREFIX + name: schema for name, schema in components.items()}
