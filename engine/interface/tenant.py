"""Tenant: whose requests share a queue, a weight and limits. Imports msgspec only; never torch.

A tenant is a name in the key file (server/config/key_limits.py), which several keys may have; or a key without a name;
or all clients, if no keys are asked for. The engine enforces the limits, since it alone sees the requests of all HTTP
workers. Each request carries its tenant's limits, so that those of a new key file hold from its first request on.
"""

import msgspec

UNNAMED = "unnamed"  # the name under which keys without one are counted


class Tenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name, its weight and its limits; None: no limit. Only tenants with a name have limits."""

    name: str = ""
    weight: float = 1.0  # its share of the tokens while several tenants wait, relative to theirs
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts, and generated
    tokens_at_once: int | None = None  # prompts and max_tokens of its queued and running requests
    kv_share: float = 1.0  # of the KV pool, what its running requests may come to hold
    priority_ceiling: int | None = None  # the smallest `priority` of its requests, which is the earliest
    grammar_seconds: float | None = None  # processor time a minute to test-compile grammars

    @property
    def has_rates(self) -> bool:
        """True if it has limits that answers name in their headers."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """What one HTTP request, with all of its prompts and choices, asks of its tenant's limits."""

    num_prompt_tokens: int
    num_tokens: int  # prompts and max_tokens


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """A limit a minute, what is left of it, and after how many seconds all of it is left."""

    limit: int
    remaining: int
    reset_s: float


class Rates(msgspec.Struct, frozen=True, array_like=True):
    """The limits that answers name in their headers; None: there is no such limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
