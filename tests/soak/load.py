"""A steady load of every kind of request, from several clients that think between two of them."""

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import Any

from tests.chaos.client import Address, Answer, Conduct, ask, request_bytes

_WORDS = ("paper", "folds", "of", "a", "book", "and", "ink", "on", "the", "press", "sheet", "binder", "cuts", "four")
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
_PATIENT = Conduct()

Making = Callable[[Random], tuple[bytes, Conduct]]


def _text(rng: Random, most: int = 60) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(3, most)))


def _chat(rng: Random, **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": _text(rng)}]
    return {"messages": messages, "max_tokens": rng.randint(4, 48), "seed": rng.randrange(1000), **fields}


def _of_chat(rng: Random, **fields: object) -> tuple[bytes, Conduct]:
    return request_bytes("/v1/chat/completions", _chat(rng, **fields)), _PATIENT


def _complete(rng: Random, **fields: object) -> bytes:
    return request_bytes("/v1/completions", {"prompt": _text(rng), "max_tokens": rng.randint(4, 48), **fields})


def _leaver(rng: Random) -> tuple[bytes, Conduct]:
    # for longer than it stays
    return _complete(rng, stream=True, ignore_eos=True, max_tokens=600), Conduct(
        leave_after=rng.choice((1, 3, 8)), resets=rng.random() < 0.5
    )


KINDS: dict[str, Making] = {
    "chat": _of_chat,
    "chat, streamed": lambda rng: _of_chat(rng, stream=True),
    "completion": lambda rng: (_complete(rng, n=1, logprobs=rng.choice((None, 2))), _PATIENT),
    "completion, streamed": lambda rng: (_complete(rng, stream=True), _PATIENT),
    "client that leaves": _leaver,
    "tools": lambda rng: _of_chat(rng, tools=[_WEATHER], max_tokens=80),
    "JSON by schema": lambda rng: _of_chat(rng, structured_outputs={"json": _SCHEMA}, stream=True),
    "embedding": lambda rng: (request_bytes("/v1/embeddings", {"input": _text(rng)}), _PATIENT),
    "tokenise": lambda rng: (request_bytes("/tokenize", {"prompt": _text(rng, 400)}), _PATIENT),
    "wrong request": lambda rng: (_complete(rng, temperature=3), _PATIENT),
}


class Load:
    """The clients and what they saw: the answers of each kind."""

    def __init__(self, address: Address, *, seed: int, rate_per_s: float, num_clients: int = 6) -> None:
        self.answers: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
        self._address = address
        self._seed = seed
        self._rate_per_s = rate_per_s
        self._num_clients = num_clients

    async def run(self, seconds: float) -> None:
        """Keep the clients busy for so long; the last answers are waited for."""
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(self._client(number, end_s) for number in range(self._num_clients)))

    async def _client(self, number: int, end_s: float) -> None:
        rng = Random(f"{self._seed} {number}")
        due_s = time.monotonic()
        while True:
            due_s += rng.expovariate(self._rate_per_s / self._num_clients)
            if due_s > end_s:
                return
            await asyncio.sleep(due_s - time.monotonic())
            kind = rng.choice(list(KINDS))
            answer = await ask(self._address, *KINDS[kind](rng))
            answer.text = ""  # hours of them would be a leak of our own
            self.answers[kind].append(answer)
