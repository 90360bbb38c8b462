"""LoadConfig and the bytes of its requests: prompts of random tokens or of a workload, as token ids, words or messages.

make_bodies() returns independent requests. The workload `agent` has conversations instead, whose next request holds the
answer to the one before: make_conversations(). A client process sends part `part` of `num_parts`.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

import msgspec

from benchmarks.agents import LONGEST, MOST_ANSWERED, NUM_REQUESTS, Agent, Turn, agents
from benchmarks.load_connection import Answer
from benchmarks.workloads import AGENT, workload

# Common enough to be one token each, with the space before, in most vocabularies
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
_WORDS = _TEXT.split()


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A load: `concurrency` requests at once (closed loop), or Poisson arrivals at `rate_per_s` if > 0."""

    host: str
    port: int
    is_tls: bool = False
    path: str = "/v1/completions"  # or a path that ends with /chat/completions
    model: str
    api_key: str = ""
    workload: str = ""  # of benchmarks/workloads.py; empty: random prompts of one length
    num_requests: int = 100  # of a workload: its first ones
    concurrency: int = 1
    rate_per_s: float = 0.0
    input_len: int = 512  # tokens, or words if prompts are text; of a workload the longest prompt's
    output_len: int = 128  # tokens; a workload's requests ask for no more
    prompt_format: str = "ids"  # ids | text
    ignores_eos: bool = True  # send ignore_eos, so that every answer has the tokens asked for
    wants_token_ids: bool = False  # ask for the answers' token ids, if prompts are ids
    vocab_size: int = 10_000  # prompt ids are drawn below it
    seed: int = 0
    part: int = 0
    num_parts: int = 1
    timeout_s: float = 600.0  # of one request

    @property
    def is_chat(self) -> bool:
        """True if requests hold messages."""
        return self.path.endswith("/chat/completions")


class Body(msgspec.Struct, frozen=True):
    """A request as its client sends it."""

    data: bytes  # HTTP head included
    num_asked: int  # tokens of the answer


class Conversation:
    """The context of one conversation, as ids, text or messages. ask() and hear() take turns; fork() copies it."""

    def __init__(self, config: LoadConfig, instructions: list[int]) -> None:
        self._config = config
        self._said: list[tuple[str, list[int], str]] = [("system", instructions, _to_words(instructions))]

    def ask(self, turn: Turn) -> Body:
        """Add what the turn adds; return its request."""
        self._said.append(("user", turn.added, _to_words(turn.added)))
        config = self._config
        prompt: dict[str, Any]
        if config.is_chat:
            prompt = {"messages": [{"role": role, "content": text} for role, _, text in self._said]}
        elif config.prompt_format == "ids":
            prompt = {"prompt": [token for _, ids, _ in self._said for token in ids]}
        else:
            prompt = {"prompt": " ".join(text for _, _, text in self._said)}
        return _encode(config, prompt, min(turn.num_answered, config.output_len))

    def hear(self, answer: Answer) -> None:
        """Add the model's answer."""
        self._said.append(("assistant", answer.token_ids, "".join(answer.texts)))

    def fork(self) -> "Conversation":
        """Return a conversation that goes on from here by itself."""
        other = Conversation(self._config, [])
        other._said = list(self._said)
        return other


def with_workload(config: LoadConfig, name: str) -> LoadConfig:
    """Return the load with a whole workload's requests, all sent at once. Raises KeyError for an unknown name."""
    if name == AGENT:
        num_requests, input_len, output_len = NUM_REQUESTS, LONGEST - MOST_ANSWERED, MOST_ANSWERED
    else:
        requests = workload(name)
        num_requests = len(requests)
        input_len = max(len(prompt) for prompt, _ in requests)
        output_len = max(num_tokens for _, num_tokens in requests)
    return msgspec.structs.replace(
        config,
        workload=name,
        num_requests=num_requests,
        concurrency=num_requests,
        input_len=input_len,
        output_len=output_len,
        wants_token_ids=name == AGENT,
    )


def make_bodies(config: LoadConfig) -> Iterator[Body]:
    """Return every request of this part, made before the clock starts."""
    requests: Iterator[tuple[list[int], int]]
    if config.workload:
        requests = islice(workload(config.workload, config.seed), config.part, None, config.num_parts)
    else:
        requests = _random_requests(config)
    bodies = []
    for prompt, num_tokens in islice(requests, config.num_requests):
        content: dict[str, Any]
        if config.is_chat:
            content = {"messages": [{"role": "user", "content": _to_words(prompt)}]}
        elif config.prompt_format == "ids":
            content = {"prompt": [token % config.vocab_size for token in prompt]}
        else:
            content = {"prompt": _to_words(prompt)}
        bodies.append(_encode(config, content, min(num_tokens, config.output_len)))
    return iter(bodies)


def make_conversations(config: LoadConfig) -> list[tuple[Conversation, Agent]]:
    """Return this part's conversations of the workload `agent`, each with the turns it is to take."""
    mine = agents(config.seed, config.vocab_size)[config.part :: config.num_parts]
    return [(Conversation(config, agent.instructions), agent) for agent in mine]


def _random_requests(config: LoadConfig) -> Iterator[tuple[list[int], int]]:
    rng = Random(config.seed)
    below = config.vocab_size if config.prompt_format == "ids" and not config.is_chat else len(_WORDS)
    while True:
        yield [rng.randrange(below) for _ in range(config.input_len)], config.output_len


def _to_words(token_ids: Sequence[int]) -> str:
    """Return a word for each token, the same for equal tokens."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in token_ids)


def _encode(config: LoadConfig, prompt: dict[str, Any], num_tokens: int) -> Body:
    payload: dict[str, Any] = {"model": config.model, "temperature": 0.0, "stream": True}
    payload["stream_options"] = {"include_usage": True}
    if config.ignores_eos:
        payload["ignore_eos"] = True
    if config.wants_token_ids and config.prompt_format == "ids":
        payload["return_token_ids"] = True
    payload |= prompt
    payload["max_completion_tokens" if config.is_chat else "max_tokens"] = num_tokens
    data = json.dumps(payload).encode()
    host = f"[{config.host}]" if ":" in config.host else config.host
    head = f"POST {config.path} HTTP/1.1\r\nHost: {host}:{config.port}\r\nContent-Type: application/json\r\n"
    if config.api_key:
        head += f"Authorization: Bearer {config.api_key}\r\n"
    return Body(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, num_tokens)
