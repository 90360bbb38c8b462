"""resolve_references: rewrites each $ref of a JSON schema to a JSON pointer from its root, or refuses it. Pure.

A reference can be a pointer, an anchor or a URL, relative to the nearest $id around it (JSON Schema 2020-12, section 8;
`id`, and anchors in $id, of the older drafts that name themselves in $schema). Afterwards only pointers are left and
no identifiers, so that the checks of a schema and the grammar compiler follow the same ones. Nothing is fetched.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from engine.interface.errors import GrammarError
from server.text.parsers.json_pointer import member

OF_SCHEMAS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
OF_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
OF_ONE = {"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
OF_ONE |= {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
MAX_SHOWN_CHARS = 64

_DYNAMIC = {"$dynamicRef", "$recursiveRef"}
_ANCHORS = ("$anchor", "$dynamicAnchor")
_NAMES = ("$id", "id", *_ANCHORS)
_VALUES = {"enum", "const"}
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")  # $ref hides what is beside it; $id can be an anchor
_ID_DRAFTS = ("draft-03", "draft-04")  # the word is `id`
_MAX_POINTER_CHARS = 512 * 1024  # an anchor of a character can name a place of many

Tokens = tuple[str | int, ...]


class Subschema(NamedTuple):
    """A subschema that is an object, and its place for messages, e.g. ".properties.a.anyOf[0]"."""

    node: dict[str, Any]
    path: str


class References(NamedTuple):
    """The subschemas of a schema, the schema itself first, and what each $ref names, by the id of its subschema."""

    nodes: list[Subschema]
    targets: dict[int, Any]


def resolve_references(schema: dict[str, Any], param: str) -> References:
    """Rewrite the references of a schema, in place. Raises GrammarError, which names the place of a $ref."""
    resolver = _Resolver(schema, param)
    resolver.run()
    return References([Subschema(place.node, _shown_path(place.tokens)) for place in resolver.places], resolver.targets)


def pointer(tokens: Tokens) -> str:
    """Return the reference to a place, from the root of a schema."""
    names = (str(token).replace("~", "~0").replace("/", "~1") for token in tokens)
    return "#" + "".join("/" + quote(name, safe="~$") for name in names)


class _Resource:
    """A schema with an $id, or the whole: what pointers, anchors and relative URLs inside it are relative to."""

    def __init__(self, root: dict[str, Any], tokens: Tokens, *, url: str, draft: str) -> None:
        self.root = root
        self.tokens = tokens
        self.url = url
        self.draft = draft
        self.anchors: dict[str, list[_Place]] = {}


class _Place(NamedTuple):
    node: dict[str, Any]
    tokens: Tokens  # from the root of the whole
    resource: _Resource


class _Resolver:
    """The subschemas found so far, with the names that they have."""

    def __init__(self, schema: dict[str, Any], param: str) -> None:
        self._param = param
        self._schema = schema
        self._resources: dict[str, list[_Resource]] = {}
        self._by_id: dict[int, _Place] = {}
        self.places: list[_Place] = []
        self.targets: dict[int, Any] = {}

    def run(self) -> None:
        outside = _Resource(self._schema, (), url="", draft="")
        self._walk(_Place(self._schema, (), outside), is_named=True)
        pointers: list[tuple[_Place, Tokens]] = []
        for place in self.places:  # grows: a pointer can lead to where no keyword leads
            for word in _DYNAMIC & place.node.keys():
                raise self._refusal(place, word, "is not supported; use $ref")
            reference = place.node.get("$ref")
            if isinstance(reference, str):
                self.targets[id(place.node)], tokens = self._resolved(place, reference)
                pointers.append((place, tokens))
            elif "$ref" in place.node:
                raise self._refusal(place, "$ref", "is no string")
        self._check_values()
        self._rewrite(pointers)

    def _walk(self, start: _Place, *, is_named: bool) -> None:
        """Add the subschemas from one on. is_named: their names count; else they may have none."""
        waiting = [start]
        while waiting:
            node, tokens, resource = waiting.pop()
            if id(node) in self._by_id:
                continue
            place = self._named(_Place(node, tokens, resource), is_named=is_named)
            self._by_id[id(node)] = place
            self.places.append(place)
            children = [_Place(child, tokens + more, place.resource) for child, more in _children(node)]
            waiting += reversed(children)

    def _named(self, place: _Place, *, is_named: bool) -> _Place:
        """Enter the names of a subschema; return it in its own resource, if it is one."""
        node, tokens, resource = place
        draft = node.get("$schema")
        draft = draft if isinstance(draft, str) else resource.draft
        id_word = "id" if any(name in draft for name in _ID_DRAFTS) else "$id"
        for word in (id_word, *_ANCHORS):
            if word in node and not isinstance(node[word], str):
                raise self._refusal(place, word, "is no string")
            if word in node and not is_named:
                raise self._refusal(place, word, "is at a place where JSON Schema has no subschema")
        is_hidden = bool(tokens) and "$ref" in node and any(name in draft for name in _OLD_DRAFTS)
        if not tokens or (id_word in node and not is_hidden):
            url, anchor = self._split(place, id_word, node.get(id_word, ""))
            if not tokens or not anchor or url != resource.url:
                resource = _Resource(node, tokens, url=url, draft=draft)
                self._resources.setdefault(url, []).append(resource)
            place = _Place(node, tokens, resource)
            if anchor:
                resource.anchors.setdefault(anchor, []).append(place)
        for word in _ANCHORS:
            if word in node:
                resource.anchors.setdefault(node[word], []).append(place)
        return place

    def _resolved(self, place: _Place, reference: str) -> tuple[Any, Tokens]:
        """Return the subschema that a reference names, and the way to it from the root of the whole."""
        url, fragment = self._split(place, "$ref", reference)
        resources = [place.resource] if reference.startswith("#") or not reference else self._resources.get(url, [])
        if not resources:
            reason = f"is {_shown(reference)}, which is not in the schema (nothing is fetched)"
            raise self._refusal(place, "$ref", reason)
        if len(resources) > 1:
            reason = f"is {_shown(reference)}, but {len(resources)} subschemas have this $id"
            raise self._refusal(place, "$ref", reason)
        resource = resources[0]
        if fragment and not fragment.startswith("/"):
            named = resource.anchors.get(fragment, [])
            if len(named) != 1:
                reason = f"is {_shown(reference)}, but {len(named) or 'no'} subschemas there have this anchor"
                raise self._refusal(place, "$ref", reason)
            return named[0].node, named[0].tokens
        return self._pointed(place, reference, resource, fragment.split("/")[1:])

    def _pointed(self, place: _Place, reference: str, resource: _Resource, names: list[str]) -> tuple[Any, Tokens]:
        node: Any = resource.root
        tokens = resource.tokens
        for name in names:
            step = member(node, name)
            if step is None:
                raise self._refusal(place, "$ref", f"is {_shown(reference)}, where the schema has nothing")
            node, tokens = step[0], (*tokens, step[1])
            known = self._by_id.get(id(node))
            resource = known.resource if known is not None else resource
        if isinstance(node, dict):
            self._walk(_Place(node, tokens, resource), is_named=False)
        elif not isinstance(node, bool):
            raise self._refusal(place, "$ref", f"is {_shown(reference)}, which is no schema")
        return node, tokens

    def _split(self, place: _Place, word: str, text: str) -> tuple[str, str]:
        """Return the absolute URL that a text means, without its fragment, and the fragment, decoded."""
        try:
            url, fragment = urldefrag(text)
            return _joined(place.resource.url, url), unquote(fragment)
        except ValueError:
            raise self._refusal(place, word, f"is {_shown(text)}, which is no URL") from None

    def _rewrite(self, pointers: list[tuple[_Place, Tokens]]) -> None:
        left = _MAX_POINTER_CHARS
        for place, tokens in pointers:
            left -= sum(len(str(token)) for token in tokens)
            if left < 0:
                reason = f"and those before it lead to places with more than {_MAX_POINTER_CHARS} characters together"
                raise self._refusal(place, "$ref", reason)
            place.node["$ref"] = pointer(tokens)
        for place in self.places:
            for word in _NAMES:
                if isinstance(place.node.get(word), str):
                    del place.node[word]

    def _check_values(self) -> None:
        """Refuse a reference into a value: its text is the value's, not a schema's that may be rewritten."""
        waiting = [(place, word, place.node[word]) for place in self.places for word in _VALUES & place.node.keys()]
        while waiting:
            place, word, value = waiting.pop()
            if id(value) in self._by_id:
                raise self._refusal(place, word, "is referred to as a schema")
            if isinstance(value, dict | list):
                waiting += [(place, word, child) for child in (value.values() if isinstance(value, dict) else value)]

    def _refusal(self, place: _Place, word: str, reason: str) -> GrammarError:
        return GrammarError(f"{self._param}{_shown_path(place.tokens)}.{word} {reason}.", param=self._param)


def _children(node: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tokens]]:
    """Yield the subschemas directly in one that are objects, with the way to each."""
    for word, child in node.items():
        if isinstance(child, dict) and word in OF_NAMED:
            yield from ((each, (word, name)) for name, each in child.items() if isinstance(each, dict))
        elif isinstance(child, dict) and word in OF_ONE:
            yield child, (word,)
        elif isinstance(child, list) and word in OF_SCHEMAS:
            yield from ((each, (word, i)) for i, each in enumerate(child) if isinstance(each, dict))


def _joined(base: str, url: str) -> str:
    """Return a URL that is relative to another, of any scheme (RFC 3986, section 5)."""
    scheme = urlsplit(base).scheme
    if urlsplit(url).scheme or not scheme:  # the first one also checks
        return urljoin(base, url)
    return scheme + urljoin("http" + base[len(scheme) :], url)[len("http") :]


def _shown_path(tokens: Tokens) -> str:
    return "".join(f"[{token}]" if isinstance(token, int) else f".{token[:MAX_SHOWN_CHARS]}" for token in tokens)


def _shown(reference: str) -> str:
    return repr(reference[:MAX_SHOWN_CHARS])
