"""Request: one sequence of tokens from arrival to its end. Plain Python; never torch.

Life: WAITING → RUNNING (holds blocks and a req_index) → RETIRING (left the running list; the last step that contains it
is not committed yet) → FINISHED, or WAITING again if it was preempted. Owned and written by the scheduler, its block
fields by the block manager; the engine only reads it.

EmbeddingAccumulator: one vector for a whole prompt, made of its hidden states as steps are committed. Never torch.

A step gives sums over spans of positions (engine/device/prompt_outputs.py), and they are added up here, so the device
keeps nothing between steps: a prompt may be cut, preempted and computed again, and each position counts once. The
vector is not normalised: the client may cut it first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from engine.core.speculative import Drafter
from engine.core.step import PoolSpan, PromptLogprobsSpan
from engine.interface.protocol import PoolingKind, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.grammar.compiler import Matcher


@dataclass(slots=True, eq=False)
class EmbeddingAccumulator:
    """The committed part of one prompt's embedding."""

    kind: PoolingKind
    num_prompt: int  # tokens
    num_pooled_tokens: int = 0  # the first ones, which need no more hidden states
    total: np.ndarray | None = None  # [hidden_size] float32

    def __post_init__(self) -> None:
        if self.kind == "last":
            self.num_pooled_tokens = self.num_prompt - 1

    @property
    def is_whole(self) -> bool:
        """True once the vector is known."""
        return self.num_pooled_tokens == self.num_prompt

    def span(self, start: int, end: int) -> PoolSpan | None:
        """Return what is to be summed in a chunk [start, end), if anything. Later chunks may be planned by then."""
        first = max(start, self.num_pooled_tokens)
        return PoolSpan(first, end - first) if first < end else None

    def add(self, span: PoolSpan, total: bytes) -> None:
        """Take in a committed sum, of float32s."""
        part = np.frombuffer(total, dtype=np.float32)
        self.total = part if self.total is None else self.total + part
        self.num_pooled_tokens += span.num_tokens

    def vector(self) -> bytes:
        """Return the vector, as float32s."""
        assert self.total is not None
        assert self.is_whole
        count = self.num_prompt if self.kind == "mean" else 1
        return (self.total / np.float32(count)).tobytes()


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    RETIRING = "retiring"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One request. Counts are in tokens, times in seconds of the engine's clock."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    cache_salt: str = ""
    priority: int = 0  # smaller runs earlier
    client_id: int = 0
    lora_index: int = 0  # its adapter; 0: none

    output_token_ids: list[int] = field(default_factory=list)  # committed only
    num_computed_tokens: int = 0  # keys and values launched
    num_pending_tokens: int = 0  # sampled on the device, not read back yet, after drafts the most that may come of them
    num_prefill_tokens: int = 0  # of this admission: what the host sends; past it, decoding
    max_num_tokens: int = 0  # prompt and output together, never exceeded
    sort_key: tuple[int, float, int] = (0, 0.0, 0)  # priority, arrival, number: the order of service

    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the first full blocks, as far as asked for
    num_published_blocks: int = 0  # the first ones of block_ids: full, computed, in the prefix cache
    num_promised_blocks: int = 0  # what the pool gains when this retiring request is released

    req_index: int = -1
    last_step: int = -1  # the newest step that contains a row of it
    drafted_step: int | None = None  # the newest step that contains a row of it with drafts
    status: Status = Status.WAITING
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_token_id: int | None = None

    matcher: Matcher | None = None  # what its committed tokens have left of its grammar; None: any text
    drafter: Drafter | None = None  # guesses its next tokens; None: nobody does
    num_prompt_logprobs: int = 0  # prompt tokens after the first whose log-probabilities are committed
    unsent_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: EmbeddingAccumulator | None = None  # all that it is for; None: it generates

    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt, output and in-flight tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def max_output_tokens(self) -> int:
        """Tokens that it may generate, if they fit."""
        return self.params.max_tokens if self.embedding is None else 0

    @property
    def is_decoding(self) -> bool:
        """True once all that the host sends is computed, so that the next row starts at the device's last token."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def is_drafted(self) -> bool:
        """True if its newest row has drafts, so that the device does not know where its next row starts."""
        return self.last_step == self.drafted_step

    @property
    def has_extras(self) -> bool:
        """True if each of its tokens takes memory beyond a draw from the logits."""
        return self.params.has_extras or self.matcher is not None

    @property
    def num_cacheable_tokens(self) -> int:
        """How many of its first tokens may come from the prefix cache.

        Log-probabilities and embeddings need hidden states, which no cache has. The last token is always computed: it
        samples the next one.
        """
        if self.embedding is not None:
            return self.embedding.num_pooled_tokens
        if self.params.prompt_logprobs is None or self.num_prompt_logprobs >= len(self.prompt_token_ids) - 1:
            return self.num_tokens - 1
        return self.num_prompt_logprobs

    def prompt_logprobs_span(self, start: int, end: int) -> PromptLogprobsSpan | None:
        """Return which log-probabilities a chunk [start, end) gives, if any. Later chunks may be planned by then."""
        if self.params.prompt_logprobs is None:
            return None
        first, last = max(start, self.num_prompt_logprobs), min(end, len(self.prompt_token_ids) - 1)
        if first >= last:
            return None
        return PromptLogprobsSpan(first, self.prompt_token_ids[first + 1 : last + 1])

    def pool_span(self, start: int, end: int) -> PoolSpan | None:
        """The same for its embedding."""
        return None if self.embedding is None else self.embedding.span(start, end)

    def add_prompt_logprobs(self, prompt_logprobs: list[TokenLogprobs]) -> None:
        """Take in the next committed log-probabilities of the prompt."""
        self.num_prompt_logprobs += len(prompt_logprobs)
        self.unsent_prompt_logprobs += prompt_logprobs

    def append(self, token_id: int, now: float) -> str | None:
        """Add a committed token; return the reason why it is the last one, if it is."""
        output, params = self.output_token_ids, self.params
        self.num_pending_tokens -= 1
        output.append(token_id)
        self.last_token_s = now
        if self.first_token_s is None:
            self.first_token_s = now
        if token_id in params.stop_token_ids and len(output) >= params.min_tokens:
            self.stop_token_id = token_id
            return "stop"
        return "length" if len(self.prompt_token_ids) + len(output) >= self.max_num_tokens else None

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the committed tokens [start, end) as a new list."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
