"""Requests that are small to send and would be large to serve: nesting, length, compression, headers, grammars.

bombs() returns them, each with the statuses that it may get; explode() throws them, several at a time, and the bodies
of the fuzzer's corpus after them.
"""

import asyncio
import gzip
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

from tests.chaos.client import Answer, ask, request_bytes
from tests.chaos.target import Target
from tests.fuzz.conftest import seeds

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_AT_ONCE = 8
_MIB = 1 << 20
_LARGEST = 8 * _MIB - 100  # of a body that is read
_REFUSED = frozenset({400, 413, 415})
_MESSAGES = [{"role": "user", "content": "Go on"}]


class Bomb(NamedTuple):
    """One hostile request. is_counted: it becomes a request, so the server counts it on /metrics."""

    name: str
    request: bytes
    statuses: frozenset[int] = _REFUSED
    is_counted: bool = True


async def explode(target: Target) -> list[Answer]:
    """Throw every bomb, a few at a time; none gets a 5xx, and each gets what it may get."""
    thrown = [*bombs(target.rng), *_corpus()]
    if target.scale < 1:
        thrown = target.rng.sample(thrown, target.num(len(thrown)))
    target.rng.shuffle(thrown)
    free = asyncio.Semaphore(_AT_ONCE)

    async def throw(bomb: Bomb) -> Answer:
        async with free:
            answer = await ask(target.address, bomb.request, is_counted=bomb.is_counted)
        if answer.end != "answered" or answer.status not in bomb.statuses:
            expected = ", ".join(map(str, sorted(bomb.statuses))) if len(bomb.statuses) < 9 else "below 500"
            target.faults.append(f"the bomb {bomb.name!r} got {answer.outcome}, not {expected}: {answer.error}")
        target.slowest.append((answer.seconds, bomb.name))
        return answer

    return await asyncio.gather(*(throw(bomb) for bomb in thrown))


async def heavy_bodies(target: Target) -> list[Answer]:
    """Send many bodies just below the limit at once: each is refused, and they are not all in memory together."""
    texts = (
        {"prompt": "word " * (_LARGEST // 5)},
        {"prompt": ["word"] * (_LARGEST // 8)},
        {"prompt": [555] * (_LARGEST // 5)},
    )
    requests = [request_bytes(COMPLETIONS, body) for body in texts]
    thrown = [target.rng.choice(requests) for _ in range(target.num(60))]
    answers = await asyncio.gather(*(ask(target.address, request) for request in thrown))
    if unexpected := {answer.outcome for answer in answers} - {"400", "413", "429", "503"}:
        target.faults.append(f"bodies of 8 MiB got {sorted(unexpected)}")
    return answers


def bombs(rng: Random) -> list[Bomb]:
    """Return all bombs; sizes vary with the seed."""
    return [*_json_bombs(rng), *_length_bombs(rng), *_transport_bombs(rng), *_template_bombs(), *_grammar_bombs()]


def _corpus() -> Iterator[Bomb]:
    """Yield the bodies that the fuzzer found, for both paths."""
    below_500 = frozenset(range(200, 500))
    for path in seeds("bodies"):
        for route in (CHAT, COMPLETIONS):
            yield Bomb(path.name, request_bytes(route, path.read_bytes()), below_500)


def _json_bombs(rng: Random) -> Iterator[Bomb]:
    depth = rng.randint(50_000, 500_000)
    open_lists = b"[" * depth
    yield Bomb("deep lists", request_bytes(COMPLETIONS, b'{"prompt":' + open_lists + b"]" * depth + b"}"))
    yield Bomb("deep lists, never closed", request_bytes(COMPLETIONS, b'{"prompt":' + open_lists))
    yield Bomb("deep objects", request_bytes(CHAT, b'{"messages":' * depth))
    yield Bomb("digits", request_bytes(COMPLETIONS, b'{"prompt":"a","seed":' + b"9" * _MIB + b"}"))
    yield Bomb("exponent", request_bytes(COMPLETIONS, b'{"prompt":"a","temperature":1e' + b"9" * 1000 + b"}"))
    keys = b",".join(b'"k%d":0' % number for number in range(200_000))
    # unknown fields are reported, so a body of them is served
    yield Bomb(
        "keys", request_bytes(COMPLETIONS, b'{"prompt":"a","max_tokens":1,' + keys + b"}"), frozenset({200, 400})
    )
    yield Bomb("escapes", request_bytes(COMPLETIONS, b'{"prompt":"' + b"\\u0000" * _MIB + b'"}'))


def _length_bombs(rng: Random) -> Iterator[Bomb]:
    many = rng.randint(100_000, 1_000_000)
    for name, fields in {
        "prompt ids": {"prompt": [5] * many},
        "prompts": {"prompt": ["a"] * many},
        "prompt text": {"prompt": "word " * many},
        "one word": {"prompt": "a" * many},
        "choices": {"prompt": "a", "n": 10**9},
        "tokens": {"prompt": "a", "max_tokens": 10**18},
        "stops": {"prompt": "a", "stop": ["x"] * many},
        "bias": {"prompt": "a", "logit_bias": {str(number): 1 for number in range(100_000)}},
        "allowed ids": {"prompt": "a", "allowed_token_ids": list(range(500_000))},
        "log-probabilities": {"prompt": "a", "logprobs": 10**6},
        "bad words": {"prompt": "a", "bad_words": ["x" * 60] * 100_000},
    }.items():
        yield Bomb(name, request_bytes(COMPLETIONS, fields))
    yield Bomb("messages", request_bytes(CHAT, {"messages": _MESSAGES * 150_000}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    yield Bomb("tools", request_bytes(CHAT, {"messages": _MESSAGES, "tools": [tool] * 50_000}))
    yield Bomb("tokenise", request_bytes("/tokenize", {"prompt": "a" * 7 * _MIB}), frozenset({200, 400}))
    yield Bomb("detokenise", request_bytes("/detokenize", {"tokens": [5] * 2_000_000}))


def _transport_bombs(rng: Random) -> Iterator[Bomb]:
    body = {"prompt": "a", "max_tokens": 1}
    zipped = gzip.compress(b'{"prompt":"' + b"a" * 100 * _MIB + b'"}')
    yield Bomb("gzip", request_bytes(COMPLETIONS, zipped, headers={"Content-Encoding": "gzip"}))
    yield Bomb("body", request_bytes(COMPLETIONS, b'"' + b"a" * rng.randint(9, 20) * _MIB))
    chunks = b"".join(b"10000\r\n" + b"a" * 0x10000 + b"\r\n" for _ in range(200))
    chunked = {"Content-Length": "", "Transfer-Encoding": "chunked"}
    yield Bomb("chunks without end", request_bytes(COMPLETIONS, chunks, headers=chunked))
    refused = frozenset({431})
    long = {"X-Long": "a" * rng.randint(70_000, 1_000_000)}
    yield Bomb("long header", request_bytes(COMPLETIONS, body, headers=long), refused, is_counted=False)
    many = {f"X-{number}": "a" for number in range(5000)}
    yield Bomb("many headers", request_bytes(COMPLETIONS, body, headers=many), refused, is_counted=False)
    yield Bomb("long path", request_bytes("/" + "a" * 500_000, body), refused, is_counted=False)
    framed = {"Transfer-Encoding": "chunked"}
    yield Bomb("two framings", request_bytes(COMPLETIONS, body, headers=framed), frozenset({400}), is_counted=False)


def _template_bombs() -> Iterator[Bomb]:
    served = frozenset({200, 400})
    deep: Any = "x"
    for _ in range(60):
        deep = {"a": [deep]}
    for name, kwargs in {
        "kwargs in place of the messages": {"messages": "x", "tools": 5, "bos_token": [1], "raise_exception": "x"},
        "kwargs with code": {"x": "{% for a in range(10**9) %}{{ a }}{% endfor %}", "enable_thinking": "{{ 7*7 }}"},
        "deep kwargs": {"deep": deep},
        "long kwargs": {"x": ["y"] * 500_000},
        "dunder kwargs": {"__class__": "x", "self": 1, "caller": 1, "loop": 1, "range": 1},
    }.items():
        body = {"messages": _MESSAGES, "max_tokens": 1, "chat_template_kwargs": kwargs}
        yield Bomb(name, request_bytes(CHAT, body), served)
    content = "{% for i in range(10**9) %}x{% endfor %}<|im_end|>{{ ''.__class__.__mro__ }}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    yield Bomb("template in a message", request_bytes(CHAT, body), served)


def _grammar_bombs() -> Iterator[Bomb]:
    served = frozenset({200, 400})
    for name, outputs in _grammars().items():
        body = {"messages": _MESSAGES, "max_tokens": 4, "structured_outputs": outputs, "stream": True}
        yield Bomb(name, request_bytes(CHAT, body), served)


def _grammars() -> Mapping[str, Mapping[str, Any]]:
    opening, depth = '{"type":"object","properties":{"a":', 2000
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    doubling["d60"] = {"type": "null"}
    return {
        "regex of nested repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        "regex that backtracks": {"regex": "(a|a|aa)+(a+)+$"},
        "regex of classes": {"regex": "[\\w\\W]{1,5000}" * 20},
        "long regex": {"regex": "a|" * 100_000},
        "many choices": {"choice": [f"choice {number}" for number in range(100_000)]},
        "grammar that is left-recursive": {"grammar": "start: start start | start | "},
        "long grammar": {"grammar": "start: " + "a | " * 50_000 + '"a"\na: "a"'},
        "schema of references to itself": {"json": {"$ref": "#"}},
        "schema of references that double": {"json": {"$defs": doubling, "$ref": "#/$defs/d0"}},
        "schema with a huge array": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
        "schema with a huge string": {"json": {"type": "string", "minLength": 10**9, "maxLength": 10**9}},
        "schema with a long enum": {"json": {"enum": [f"value {number}" for number in range(50_000)]}},
        "schema of many properties": {"json": {"properties": {f"p{n}": {"type": "string"} for n in range(3000)}}},
        "deep schema": {"json": opening * depth + "{}" + "}}" * depth},
        "schema of combinations": {
            "json": {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(500)]}
        },
        "schema from elsewhere": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    }
