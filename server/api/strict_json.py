"""parse_json: a request body as a JSON object, with bounds on depth and text. parse_body: that object by a schema.

JSON leaves open which of two fields of one name in an object counts; parsers, and gateways before this server, take
the first or the last. So a body that has both is refused.

StrictModel is the base of all schemas of request bodies. Imports pydantic and server.
"""

import json
import math
import re
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.interface.errors import InvalidParameter
from server.api.known_fields import about_missing
from server.api.limits import LIMITS
from server.errors import MalformedBody
from server.structured_output.grammar_spec import is_deeper_than

MAX_JSON_DEPTH = 64
_HIGH, _LOW = (rb"\\u[dD][%s][0-9a-fA-F]{2}" % digits for digits in (rb"89abAB", rb"c-fC-F"))
_LONE_SURROGATE = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
_ESCAPE_BYTES = 6
_FAULT_PLACE = re.compile(r"surrogate pair \(byte (\d+)\)$")  # of msgspec: the byte after an escape
_UTF8_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_PLACE = re.compile(r"\(byte (\d+)\)$")  # of msgspec: the byte that it does not take
_NOT_JSON = (
    ((b"'",), "texts and names are in double quotes, \" and not '"),
    ((b"True", b"False", b"None"), "JSON writes true, false and null"),
    ((b"NaN", b"Infinity", b"-Infinity"), "JSON has finite numbers only"),
    ((b"\n", b"\r", b"\t"), "within a text a line break is written \\n, a tab \\t"),
)
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_TOO_LARGE = re.compile(r"(?:Number|Integer value) out of range")  # of msgspec, which names no place
_MAX_SHOWN_CHARS = 40
_MAX_SEARCHED_BYTES = 2**20  # more take longer than a refusal may
_OBJECT = re.compile(r"a valid dictionary(?: or instance of \w+)?")  # pydantic's name of a JSON object
_LIST_LIMIT = re.compile(r"list should have at (?P<bound>least|most) (?P<number>\d+) items? after validation")

Body = TypeVar("Body", bound=BaseModel)


class StrictModel(BaseModel):
    """A JSON object of a request: no conversions between types; unknown fields are kept in model_extra."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def any_of(*models: type[BaseModel], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the document's schema of an object that a type, looked at first, makes one of these models.

    Objects of types that no model has are taken as well, except those of `but`.
    """
    schemas = [_inlined(model.model_json_schema()) for model in models]
    types = [schema["properties"]["type"] for schema in schemas]
    served = [kind["const"] for field in types for kind in field.get("anyOf", [field]) if "const" in kind]
    other = {"type": "string", "maxLength": 512, "not": {"enum": [*served, *but]}}
    return {"anyOf": [*schemas, {"type": "object", "properties": {"type": other}, "required": ["type"]}]}


def parse_json(body: bytes, *, takes_last: bool = False) -> dict[str, Any]:
    """Parse strictly: no NaN, no Infinity, no lone surrogates, no deep nesting, no name twice in one object.

    takes_last: of fields of one name the last one counts, as in a text that a model wrote. Raises MalformedBody.
    """
    bare = _without_strings(body)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        surrogate = _lone_surrogate(body, str(error))
        if surrogate is not None:
            raise MalformedBody(
                f"The body contains a lone surrogate, {surrogate}, which is not valid Unicode text."
            ) from None
        raise MalformedBody(_not_json(body, bare, str(error)[:200])) from None
    if not isinstance(value, dict):
        raise MalformedBody("The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_JSON_DEPTH and is_deeper_than(value, MAX_JSON_DEPTH):
        raise _too_deep()
    if not takes_last and _has_repeated_name(value, bare.count(b":")):
        which = "a field" if len(body) > _MAX_SEARCHED_BYTES else f"the field {_repeated_name(body)!r}"
        raise MalformedBody(f"The body has {which} twice in one object; only one of them can count.")
    return value


def parse_body(model: type[Body], value: Any, *, at: str = "") -> Body:
    """Check a decoded JSON object against a schema. Raises InvalidParameter for its first fault.

    `at` is the path of the object in the request's body, if it is not the body itself.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _invalid(first["loc"], at=at, kind=first["type"], message=first["msg"], value=first["input"]) from None


def _without_strings(body: bytes) -> bytes:
    """Return what is outside of a JSON text's strings. Refuses a text whose values take much more memory than it."""
    text = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    is_small = len(body) <= LIMITS.small_body_bytes
    if not is_small:
        _check_count(text.count(b'"') // 2, LIMITS.json_strings, "strings")
    bare = b"".join(text.split(b'"')[::2])
    if not is_small:
        _check_count(bare.count(b"[") + bare.count(b"{"), LIMITS.json_containers, "objects and lists")
        _check_count(bare.count(b","), LIMITS.json_commas, "commas between values")
    return bare


def _check_count(count: int, limit: int, noun: str) -> None:
    if count > limit:
        raise MalformedBody(f"The body has {count} {noun}, the limit is {limit}.")


def _has_repeated_name(value: Any, num_names: int) -> bool:
    """Return whether a decoded value has fewer fields than its text has names. It looks at lists last, and seldom."""
    objects: list[dict[str, Any]] = [value]
    lists: list[list[Any]] = []
    num_fields = 0
    while objects or lists:
        if objects:
            children: Collection[Any] = objects.pop().values()
            num_fields += len(children)
            if num_fields == num_names:
                return False
        else:
            children = lists.pop()
        for child in children:
            if type(child) is dict:
                objects.append(child)
            elif type(child) is list and child:
                lists.append(child)
    return True


def _repeated_name(body: bytes) -> str:
    """Return a name that an object of the text has twice, which there is."""
    found: list[str] = []

    def look(fields: list[tuple[str, Any]]) -> None:
        names: set[str] = set()
        for name, _ in fields:
            if name in names and not found:
                found.append(name)
            names.add(name)

    json.loads(body, object_pairs_hook=look, parse_int=len)  # the numbers themselves take time
    return found[0][:_MAX_SHOWN_CHARS]


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inline(definitions[value["$ref"].rpartition("/")[2]])
        return {key: inline(item) for key, item in value.items()}

    inlined: dict[str, Any] = inline(schema)
    return inlined


def _lone_surrogate(body: bytes, reason: str) -> str | None:
    """Describe the first half of a UTF-16 pair without the other half, in a body that does not parse.

    `reason`: msgspec's; it names the place, except near the end. All escapes of 8 MiB would take long to look at.
    """
    place = _FAULT_PLACE.search(reason)
    end = len(body) if place is None else int(place[1])
    begin = max(end - (2 if place is not None else 4) * _ESCAPE_BYTES, 0)
    for match in _LONE_SURROGATE.finditer(body, begin, end):
        before = body[: match.start()]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:  # else its backslash is an escaped one
            return f"{match[0].decode()} at byte {match.start()}"
    if encoded := _UTF8_SURROGATE.search(body):
        return f"{encoded[0].hex(' ')} at byte {encoded.start()}"
    return None


def _not_json(body: bytes, bare: bytes, reason: str) -> str:
    """Return the sentence on a body that does not parse: msgspec's reason, and what the byte at its place tells.

    bare: the body without its strings.
    """
    if not body.strip():
        return "The body is empty; it must be a JSON object."
    if body.startswith(_BYTE_ORDER_MARKS):
        return "The body begins with a byte order mark; it must be UTF-8 without one."
    if "utf-8" in reason:
        try:
            body.decode()
        except UnicodeDecodeError as error:
            return f"The body is not UTF-8: {error.object[error.start : error.end].hex(' ')} at byte {error.start}."
    if _TOO_LARGE.match(reason):
        return f"The body has a number beyond those of 64-bit floats{_shown_number(bare)}."
    place = _PLACE.search(reason)
    rest = body[int(place[1]) :] if place is not None else b""
    told = next((f": {sentence}" for words, sentence in _NOT_JSON if rest.startswith(words)), "")
    reason = reason.removeprefix("JSON is malformed: ").replace("Input data was truncated", "it ends too early")
    return f"The body is not valid JSON: {reason}{told}."


def _shown_number(bare: bytes) -> str:
    """Return the first number of a text that is too large for a float, as the end of a clause."""
    for match in _NUMBER.finditer(bare):
        try:
            is_too_large = math.isinf(float(match[0]))
        except ValueError:  # no number: what follows one that is too large need not be JSON
            continue
        if is_too_large:
            shown = match[0][:_MAX_SHOWN_CHARS].decode()
            return f", {shown}" + ("…" if len(match[0]) > _MAX_SHOWN_CHARS else "")
    return ""


def _too_deep() -> MalformedBody:
    return MalformedBody(f"The body is nested too deeply, the limit is {MAX_JSON_DEPTH} levels.")


def _invalid(loc: tuple[int | str, ...], *, at: str, kind: str, message: str, value: Any) -> InvalidParameter:
    field = at
    for part in loc:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    field = field or "body"
    if kind == "missing":
        return InvalidParameter(f"{field} is required{about_missing(field, value)}.", param=field)
    message = _OBJECT.sub("an object", message.removeprefix("Value error, ").removeprefix("Input "))
    message = message.removeprefix("String ").replace("match pattern", "match the pattern")
    message = message[:1].lower() + message[1:]
    if kind in ("too_short", "too_long") and (limit := _LIST_LIMIT.match(message)) is not None:
        noun = ("id" if field.endswith("_ids") else "item") + ("" if limit["number"] == "1" else "s")
        message = f"must have at {limit['bound']} {limit['number']} {noun}"
    # The messages of our own checks of an object name the faulty entry
    shown = "" if kind == "value_error" and isinstance(value, dict) else _shown(value)
    return InvalidParameter(f"{field} {message}{shown}.", param=field)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f", got a string of {len(value)} characters" if len(value) > 40 else f", got {value!r}"
    if isinstance(value, bool) or value is None:
        return f", got {json.dumps(value)}"
    if isinstance(value, int | float):
        return f", got {str(value)[:40]}"
    if isinstance(value, list):
        return f", got a list of {len(value)}"
    return ", got an object"
