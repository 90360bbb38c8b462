"""LIMITS: the most that one request, and all requests of an HTTP worker together, may cost the worker. Imports nothing.

docs/reference/limits.md has its tables from here. Bounds of single fields are in the schemas.
"""

from dataclasses import dataclass, field
from typing import Any

KIB, MIB = 2**10, 2**20


def _limit(value: int, meaning: str) -> Any:
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits, each checked before the work that it bounds."""

    bodies_bytes: int = _limit(64 * MIB, "bytes of all large bodies that a worker reads, decodes or encodes at once")
    small_body_bytes: int = _limit(64 * KIB, "bytes of a body that is always read, and decoded on the event loop")
    brief_bytes: int = _limit(4 * KIB, "bytes of a body whose texts are rendered and encoded on the event loop")
    json_containers: int = _limit(2**17, "objects and lists of a body")
    json_strings: int = _limit(2**18, "strings of a body, with the names of its fields")
    json_commas: int = _limit(2**20 + 2**17, "commas of a body outside of its strings")
    prompt_tokens: int = _limit(2**20, "tokens of all prompts or inputs of a request, or one context if that is more")
    counted_tokens: int = _limit(2**16, "tokens that are counted or shown, or two contexts if those are more")
    answer_entries: int = _limit(2**19, "log-probabilities of an answer, of all its choices, tokens and prompts")
    heavy_threads: int = _limit(2, "threads of a worker for long texts and long answers, beside one for large bodies")

    def counted_tokens_of(self, max_model_len: int) -> int:
        """Return the most tokens that a model of this context counts or shows."""
        return max(self.counted_tokens, 2 * max_model_len)

    def prompt_tokens_of(self, max_model_len: int) -> int:
        """Return the most tokens of all prompts of a request to a model of this context."""
        return max(self.prompt_tokens, max_model_len)


LIMITS = RequestLimits()


@dataclass(frozen=True, kw_only=True)
class RouteCost:
    """The bound of one route that reads a body, beside those of every body."""

    tokens: str  # "context", or the name of a limit
    has_entries: bool = False
    renders: bool = False  # a chat template
    compiles: bool = False  # a grammar


LOOP_MS = 100  # the longest silence of the event loop
WORKER_MIB = 1024  # memory of a worker above that of an idle one, with eight costliest requests of one route at once
ROUTE_COSTS = {
    "/v1/chat/completions": RouteCost(tokens="context", has_entries=True, renders=True, compiles=True),
    "/v1/completions": RouteCost(tokens="prompt_tokens", has_entries=True, compiles=True),
    "/v1/responses": RouteCost(tokens="context", has_entries=True, renders=True, compiles=True),
    "/v1/responses/input_tokens": RouteCost(tokens="counted_tokens", renders=True),
    "/v1/messages": RouteCost(tokens="context", renders=True, compiles=True),
    "/v1/messages/count_tokens": RouteCost(tokens="counted_tokens", renders=True),
    "/v1/embeddings": RouteCost(tokens="prompt_tokens"),
    "/tokenize": RouteCost(tokens="counted_tokens", renders=True),
    "/detokenize": RouteCost(tokens="prompt_tokens"),
    "/v1/chat/completions/render": RouteCost(tokens="context", has_entries=True, renders=True, compiles=True),
    "/v1/completions/render": RouteCost(tokens="prompt_tokens", has_entries=True, compiles=True),
}
