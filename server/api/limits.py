"""LIMITS: the most that one request, and all requests of an HTTP worker together, may cost the worker. Imports nothing.

The tables of docs/reference/limits.md are made from here. Bounds of single fields are in the schemas.
"""

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits, each checked before the work that it bounds."""

    bodies_bytes: int = 64 * MIB  # of all bodies of a worker that are read, decoded or encoded
    small_body_bytes: int = 64 * KIB  # of a body that is read in any case, and decoded on the event loop
    json_containers: int = 2**17  # objects and lists of a body
    json_strings: int = 2**18  # of a body, with the names of fields
    json_commas: int = 2**20 + 2**17  # of a body, outside of its strings
    prompt_tokens: int = 2**20  # of all prompts or inputs of a request, or one full context if that is more
    counted_tokens: int = 2**16  # that are counted or shown without generation, or two full contexts if those are more
    answer_entries: int = 2**19  # log-probabilities of an answer, over its choices and prompts
    heavy_threads: int = 2  # for large bodies, long texts and long answers; the others have threads of their own

    def counted_tokens_of(self, max_model_len: int) -> int:
        """Return the most tokens that a model of this context counts or shows."""
        return max(self.counted_tokens, 2 * max_model_len)

    def prompt_tokens_of(self, max_model_len: int) -> int:
        """Return the most tokens of all prompts of a request to a model of this context."""
        return max(self.prompt_tokens, max_model_len)


LIMITS = RequestLimits()
