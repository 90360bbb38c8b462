"""LIMITS: the most that one request, and all requests of an HTTP worker together, may cost the worker. Imports nothing.

The tables of docs/reference/limits.md are made from here. Bounds of single fields are in the schemas.
"""

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits, each checked before the work that it bounds."""

    small_body_bytes: int = 64 * KIB  # of a body that is always read, and decoded on the event loop
    prompt_tokens: int = 2**20  # of all prompts or inputs of a request, or one full context if that is more
    counted_tokens: int = 2**16  # that are counted or shown without generation, or two full contexts if those are more
    heavy_threads: int = 2  # for large bodies, long texts and long answers; the others have threads of their own

    def counted_tokens_of(self, max_model_len: int) -> int:
        """Return the most tokens that a model of this context counts or shows."""
        return max(self.counted_tokens, 2 * max_model_len)

    def prompt_tokens_of(self, max_model_len: int) -> int:
        """Return the most tokens of all prompts of a request to a model of this context."""
        return max(self.prompt_tokens, max_model_len)


LIMITS = RequestLimits()
