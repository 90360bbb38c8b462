"""Request: the state of one request from arrival to its end; PlannedStep: the requests of a step. Never torch.

Life: WAITING → RUNNING (holds blocks and a req_index) → RETIRING (left the running list; the last step that contains it
is not committed yet) → FINISHED, or WAITING again if it was preempted. The scheduler owns and changes it, KvCaches its
tables; the engine only reads it.

EmbeddingAccumulator sums the embedding of one prompt from its hidden states, as steps are committed. Each step returns
sums over spans of positions (engine/device/prompt_outputs.py), so the device keeps no state between steps: a prompt may
be split, preempted and recomputed, and each position counts once. The vector is not normalised, since the client may
truncate it first.

PlannedStep is a step between its plan and its commit, with its requests; RowOutput is its result per request.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.core.speculative import Drafter
from engine.core.step import NO_TOKEN, PoolSpan, PromptLogprobsSpan, RowPlan, StepResult
from engine.core.thinking import ThinkingState
from engine.interface.protocol import CacheReport, PoolingKind, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.core.checkpoints import StepKv
    from engine.grammar.compiler import Matcher


@dataclass(slots=True, eq=False)
class EmbeddingAccumulator:
    """The committed part of one prompt's embedding."""

    kind: PoolingKind
    num_prompt: int  # tokens
    num_pooled_tokens: int = 0  # the first ones, whose hidden states are no longer needed
    total: np.ndarray | None = None  # [hidden_size] float32

    def __post_init__(self) -> None:
        if self.kind == "last":
            self.num_pooled_tokens = self.num_prompt - 1

    @property
    def is_whole(self) -> bool:
        """True once the vector is complete."""
        return self.num_pooled_tokens == self.num_prompt

    def span(self, start: int, end: int) -> PoolSpan | None:
        """Return the positions of a chunk [start, end) to sum, or None. Earlier chunks may still be in flight."""
        first = max(start, self.num_pooled_tokens)
        return PoolSpan(first, end - first) if first < end else None

    def add(self, span: PoolSpan, total: bytes) -> None:
        """Add the committed sum of a span; total: float32s."""
        part = np.frombuffer(total, dtype=np.float32)
        self.total = part if self.total is None else self.total + part
        self.num_pooled_tokens += span.num_tokens

    @property
    def is_finite(self) -> bool:
        """True if the committed part has neither NaN nor infinities."""
        return self.total is None or bool(np.isfinite(self.total).all())

    def vector(self) -> bytes:
        """Return the vector, as float32s."""
        assert self.total is not None
        assert self.is_whole
        count = self.num_prompt if self.kind == "mean" else 1
        return (self.total / np.float32(count)).tobytes()


class Status(Enum):
    """The life stages of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    RETIRING = "retiring"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class BlockTable:
    """A request's blocks of one group of layers, in order. KvCaches owns and changes it."""

    blocks: list[int]  # the first page of each
    first: int = 0  # the column of the first: those before have left the window
    num_published: int = 0  # the first columns: full, computed, in the prefix cache
    num_sent: int = 0  # the first columns: listed in a plan

    @property
    def end(self) -> int:
        """The column after the last."""
        return self.first + len(self.blocks)


@dataclass(slots=True, eq=False)
class Request:
    """One request. Counts are in tokens, times in seconds of the engine's clock."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    cache_salt: str = ""
    open_salt: str = ""  # that of the client's requests without a salt of their own
    priority: int = 0  # smaller runs earlier
    client_id: int = 0
    lora_index: int = 0  # its adapter; 0: none
    adapter_digest: bytes = b""  # of the adapter's files; b"": its number names it, for as long as the process lives

    output_token_ids: list[int] = field(default_factory=list)  # committed only
    num_computed_tokens: int = 0  # tokens with launched keys and values
    num_pending_tokens: int = 0  # sampled on the device but not read yet; with drafts: their maximum number
    num_prefill_tokens: int = 0  # tokens that the host sends after this admission; decoding starts after them
    max_num_tokens: int = 0  # limit of prompt and output together
    sort_key: tuple[int, float, int] = (0, 0.0, 0)  # priority, arrival, number: the scheduling order

    tables: list[BlockTable] = field(default_factory=list)  # by group of layers; empty: it holds nothing
    block_hashes: list[bytes] = field(default_factory=list)  # names of its prefixes in the prefix cache: a chain
    num_held_tokens: int = 0  # the first ones, for which all tables have blocks
    next_due_tokens: int = 0  # once so many are committed, its blocks have to be looked at
    marks: list[int] = field(default_factory=list)  # where others may go on: windows before them are worth keeping
    next_save_tokens: int = 0  # where its answer's next state is due
    parting_point: int = 0  # the mark where the full groups know a longer prefix than its hit; 0: they do not
    checkpoint: int = 0  # where its newest saved state is: found, or saved by itself
    has_hit_checkpoint: bool = False  # it was found
    saved_tokens: list[int] = field(default_factory=list)  # where it saved states, that others may have overwritten
    has_asked_disk: bool = False  # for blocks, since it was last admitted
    has_waited: bool = False  # for blocks from the host, since it was last admitted
    found_here: int = 0  # then: the tokens of its hit without them,
    found_in_all: int = 0  # and with them
    restored_tokens: int = 0  # where its state came from; 0: its own beginning
    restores: list[tuple[int, int]] = field(default_factory=list)  # group and block of states for its first row
    awaited_step: int = -1  # the newest step in flight when its next token first had no room; -1: it has room
    num_promised_pages: int = 0  # pages that become free when this retiring request is released

    req_index: int = -1
    last_step: int = -1  # the newest step that contains a row of it
    drafted_step: int | None = None  # the newest step that contains a row of it with drafts
    status: Status = Status.WAITING
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_token_id: int | None = None

    matcher: Matcher | None = None  # its grammar's state after the committed tokens; None: any text
    thinking: ThinkingState | None = None  # its reasoning, if that has a limit
    drafter: Drafter | None = None  # proposes draft tokens; None: no speculation
    num_prompt_logprobs: int = 0  # prompt tokens after the first whose log-probabilities are committed
    unsent_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: EmbeddingAccumulator | None = None  # of a request for an embedding; None: the request generates text

    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    cache_report: CacheReport | None = None  # why there were no more
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def adapter(self) -> bytes:
        """What names the request's adapter in its chain of hashes; b"": none."""
        return self.adapter_digest or str(self.lora_index).encode() if self.lora_index else b""

    @property
    def num_tokens(self) -> int:
        """Prompt, output and in-flight tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def max_output_tokens(self) -> int:
        """The maximum number of output tokens before the context limit applies; 0 for an embedding."""
        return self.params.max_tokens if self.embedding is None else 0

    @property
    def is_decoding(self) -> bool:
        """True once all prefill tokens are launched, so that the next row starts with the device's last token."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def is_drafted(self) -> bool:
        """True if its newest row has drafts, so that the device does not know the start of its next row."""
        return self.last_step == self.drafted_step

    @property
    def has_extras(self) -> bool:
        """True if sampling needs more device memory per token than a draw from the logits."""
        return self.params.has_extras or self.matcher is not None or self.thinking is not None

    @property
    def num_cacheable_tokens(self) -> int:
        """The number of its first tokens that may come from the prefix cache.

        Log-probabilities and embeddings need hidden states, which are not cached. The last token is always computed,
        to sample the next one.
        """
        if self.embedding is not None:
            return self.embedding.num_pooled_tokens
        if self.params.prompt_logprobs is None or self.num_prompt_logprobs >= len(self.prompt_token_ids) - 1:
            return self.num_tokens - 1
        return self.num_prompt_logprobs

    def prompt_logprobs_span(self, start: int, end: int) -> PromptLogprobsSpan | None:
        """Return the log-probabilities to compute in a chunk [start, end), or None. Earlier chunks may be in flight."""
        if self.params.prompt_logprobs is None:
            return None
        first, last = max(start, self.num_prompt_logprobs), min(end, len(self.prompt_token_ids) - 1)
        if first >= last:
            return None
        return PromptLogprobsSpan(first, self.prompt_token_ids[first + 1 : last + 1])

    def pool_span(self, start: int, end: int) -> PoolSpan | None:
        """Return the positions of a chunk [start, end) to sum for the embedding, or None."""
        return None if self.embedding is None else self.embedding.span(start, end)

    def add_prompt_logprobs(self, prompt_logprobs: list[TokenLogprobs]) -> None:
        """Add the next committed log-probabilities of the prompt."""
        self.num_prompt_logprobs += len(prompt_logprobs)
        self.unsent_prompt_logprobs += prompt_logprobs

    def append(self, token_id: int, now: float) -> str | None:
        """Add a committed token; return the finish reason if it is the last token, else None. NO_TOKEN: "error"."""
        output, params = self.output_token_ids, self.params
        self.num_pending_tokens -= 1
        if token_id == NO_TOKEN:
            return "error"
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

    def extend_hashes(self, num_tokens: int, *, unit: int) -> None:
        """Extend the chain over its first num_tokens, a link per unit. Equal hashes: equal prefix, salt and adapter."""
        hashes = self.block_hashes
        parent = hashes[-1] if hashes else self._root_hash()
        for start in range(len(hashes) * unit, num_tokens - unit + 1, unit):
            parent = link_hash(parent, self.token_ids(start, start + unit))
            hashes.append(parent)

    def _root_hash(self) -> bytes:
        """Return the parent of the first hash."""
        return root_hash(self.cache_salt, self.adapter)


def root_hash(cache_salt: str, adapter: bytes) -> bytes:
    """Return the parent of a chain's first hash: of the salt, and of the adapter, on which keys and values depend.

    adapter: Request.adapter. Equal in every process, as all hashes of the chain, if that is a digest.
    """
    salt = sha256(cache_salt.encode()).digest()
    return sha256(b"adapter " + adapter + b": " + salt).digest() if adapter else salt


def link_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Return a chain's next hash."""
    return sha256(parent + array("I", token_ids).tobytes()).digest()


class RowOutput(NamedTuple):
    """The tokens of one request from a committed step: one, or several with drafts.

    request.finish_reason is set if the request ended with them.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one per token, if requested


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafted rows, draft tokens and accepted draft tokens."""

    num_rows: int = 0
    num_tokens: int = 0
    num_accepted: int = 0


class PlannedStep(NamedTuple):
    """A planned step that is not committed yet, with its requests."""

    step_id: int
    rows: list[tuple[Request, RowPlan]]
    freed: list[int]  # req_indices named in its plan
    kv: StepKv

    def apply_prompt_outputs(
        self, result: StepResult, now: float
    ) -> tuple[list[Request], list[Request], list[Request]]:
        """Add prompt log-probabilities and sums to their requests.

        Returns the requests with new log-probabilities, those with a complete embedding, and those whose outputs are
        not finite, which have the finish reason "error".
        """
        with_prompt_logprobs: list[Request] = []
        embedded: list[Request] = []
        invalid: list[Request] = []
        for place, prompt_logprobs in result.prompt_logprobs.items():
            request, _ = self.rows[place]
            if request.finish_reason is None and any(math.isnan(entry.logprob) for entry in prompt_logprobs):
                request.finish_reason = "error"
                invalid.append(request)
                continue
            request.add_prompt_logprobs(prompt_logprobs)
            with_prompt_logprobs.append(request)
        for place, total in result.pooled.items():
            request, row = self.rows[place]
            assert request.embedding is not None
            assert row.pool_span is not None
            request.embedding.add(row.pool_span, total)
            if not request.embedding.is_whole or request.finish_reason is not None:
                continue
            if request.embedding.is_finite:
                request.first_token_s = now
                embedded.append(request)
            else:
                request.finish_reason = "error"
                invalid.append(request)
        return with_prompt_logprobs, embedded, invalid

    def oom_victims(self) -> list[Request]:
        """Return the requests to fail after the step ran out of memory; disable speculation for drafted requests.

        They are the prompt chunks with has_extras, else all prompt chunks. Without prompt chunks: none if rows have
        drafts, since the step is smaller without them; else decode rows with has_extras; else all.
        """
        drafted = [request for request, row in self.rows if row.num_drafts]
        for request in drafted:
            request.drafter = None
        live = [(request, row) for request, row in self.rows if request.finish_reason is None]
        with_chunks = [request for request, row in live if row.start < request.num_prefill_tokens]
        with_extras = [request for request, _ in live if request.has_extras]
        joining = [request for request in with_chunks if request.has_extras]
        if drafted and not with_chunks:
            return []
        return joining or with_chunks or with_extras or [request for request, _ in live]


def apply_samples(
    request: Request, row: RowPlan, result: StepResult, *, first: int, now: float, counts: DraftCounts
) -> tuple[RowOutput, str | None]:
    """Add a row's sampled tokens, with drafts the verified ones, to its request; return them, and its finish reason.

    first: index of the row's first sample in result.token_ids. The reason is None if the request goes on, "error" if
    its logits are not finite.
    """
    if row.num_drafts:
        output, reason = _apply_verified(request, row, result, first=first, now=now, counts=counts)
    else:
        token_id, logprobs = result.token_ids[first], result.logprobs
        output = RowOutput(request, [token_id], [logprobs[first]] if first in logprobs else None)
        reason = request.append(token_id, now)
    if reason == "error":
        request.finish_reason = reason
    return output, reason


def _apply_verified(
    request: Request, row: RowPlan, result: StepResult, *, first: int, now: float, counts: DraftCounts
) -> tuple[RowOutput, str | None]:
    assert request.drafter is not None
    token_ids, logprobs, reason = [], result.logprobs, None
    sampled = result.token_ids[first : first + row.num_samples]
    verified = request.drafter.verify(row.token_ids[1:], sampled, num_output=len(request.output_token_ids))
    num_rejected = len(sampled) - len(verified)  # tokens planned after a wrong draft are no longer counted
    request.num_computed_tokens -= num_rejected
    request.num_pending_tokens -= num_rejected
    for token_id in verified:
        token_ids.append(token_id)
        reason = request.append(token_id, now)
        if reason is not None:
            break
    counts.num_rows += 1
    counts.num_tokens += row.num_drafts
    counts.num_accepted += len(token_ids) - 1
    row_logprobs = [logprobs[i] for i in range(first, first + len(token_ids))] if first in logprobs else None
    return RowOutput(request, token_ids, row_logprobs), reason
