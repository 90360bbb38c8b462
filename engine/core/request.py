"""Request: the state of one request from arrival to its end. Never torch.

Life: WAITING → RUNNING (holds blocks and a req_index) → RETIRING (left the running list; the last step that contains it
is not committed yet) → FINISHED, or WAITING again if it was preempted. The scheduler owns and changes it, KvCaches its
tables; the engine only reads it.

EmbeddingAccumulator sums the embedding of one prompt from its hidden states, as steps are committed. Each step returns
sums over spans of positions (engine/device/prompt_outputs.py), so the device keeps no state between steps: a prompt may
be split, preempted and recomputed, and each position counts once. The vector is not normalised, since the client may
truncate it first.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from engine.core.speculative import Drafter
from engine.core.step import NO_TOKEN, PoolSpan, PromptLogprobsSpan, RequestInit
from engine.core.thinking import ThinkingState
from engine.interface.protocol import CacheReport, HandOver, PoolingKind, SamplingParams, TokenLogprobs
from engine.interface.tenant import UNNAMED

if TYPE_CHECKING:
    from engine.core.steady_rows import SteadyRows
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
    """One request. Counts are in tokens, times in seconds of the engine's clock.

    While it is steady, three counts follow from the steps of its SteadyRows, and what is stored here is how they were
    when it joined: num_computed_tokens, num_pending_tokens, last_step. last_token_s is out of date until it leaves. The
    newest tokens of its output may be there, too, until somebody reads them.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    cache_salt: str = ""
    open_salt: str = ""  # that of the client's requests without a salt of their own
    priority: int = 0  # smaller runs earlier
    pin_s: float = 0.0  # how long its blocks are kept after its end (engine/core/pins.py); 0: as all others
    client_id: int = 0
    tenant_id: str = ""  # whose requests it queues with (engine/core/waiting_queue.py)
    weight: float = 1.0  # its tenant's share of the tokens, relative to others'
    kv_share: float = 1.0  # of the KV pool, what its tenant's running requests may come to hold
    tenant_name: str = UNNAMED  # under which its tenant is counted
    counts_prompt: bool = True  # false: its prompt is counted with another request
    num_expected_tokens: int = 0  # that it will generate, by a guess when it arrived
    expected_first_s: float | None = None  # when its first token was expected when it arrived; None: unknown
    latest_start_s: float = math.inf  # a later start cannot meet its deadline
    lora_index: int = 0  # its adapter; 0: none
    adapter_digest: bytes = b""  # of the adapter's files; b"": its number names it, for as long as the process lives
    num_replayed_tokens: int = 0  # the first of its output, which earlier engines made
    packed_prompt: bytes = b""  # its prompt until unpack_prompt(): a queue of long lists would cost memory and time
    num_prompt_tokens: int = field(default=0, init=False)

    stored_output_token_ids: list[int] = field(default_factory=list)  # see output_token_ids
    hand_over: HandOver | None = None  # its other engine, if two compute it
    stored_computed_tokens: int = 0  # see num_computed_tokens
    stored_pending_tokens: int = 0  # see num_pending_tokens
    num_prefill_tokens: int = 0  # tokens that the host sends after this admission; decoding starts after them
    max_num_tokens: int = 0  # limit of prompt and output together
    sort_key: tuple[int, float, int] = (0, 0.0, 0)  # priority, arrival, number: the scheduling order

    tables: list[BlockTable] = field(default_factory=list)  # by group of layers; empty: it holds nothing
    block_hashes: list[bytes] = field(default_factory=list)  # names of its prefixes in the prefix cache: a chain
    num_held_tokens: int = 0  # the first ones, for which all tables have blocks
    next_due_tokens: int = 0  # once so many are committed, its blocks have to be looked at
    copy_rank: float = 0.0  # see engine/core/leaving_blocks.py
    late_prefix: bytes | None = None  # its place in LateBlocks; None: it is not there
    left_tokens: int = 0  # those behind its newest committed row, when it ceased to be steady
    marks: list[int] = field(default_factory=list)  # where others may go on: windows before them are worth keeping
    next_save_tokens: int = 0  # where its answer's next state is due
    parting_point: int = 0  # the mark where the full groups know a longer prefix than its hit; 0: they do not
    follows_answer: bool = False  # its hit was a state of an answer, which its own answer may well become, too
    checkpoint: int = 0  # where its newest saved state is: found, or saved by itself
    has_hit_checkpoint: bool = False  # it was found
    saved_tokens: list[int] = field(default_factory=list)  # where it saved states, that others may have overwritten
    has_asked_disk: bool = False  # for blocks, since it was last admitted
    found_before_disk: int = 0  # then, if it waited: the tokens of its hit without the disk,
    found_with_disk: int = 0  # and with it
    has_asked_peer: bool = False  # for blocks of a prefill engine
    has_waited: bool = False  # for blocks from the host, since it was last admitted
    found_here: int = 0  # then: the tokens of its hit without them,
    found_in_all: int = 0  # and with them
    restored_tokens: int = 0  # where its state came from; 0: its own beginning
    restores: list[tuple[int, int]] = field(default_factory=list)  # group and block of states for its first row
    awaited_step: int = -1  # the newest step in flight when its next token first had no room; -1: it has room
    num_promised_pages: int = 0  # pages that become free when this retiring request is released

    req_index: int = -1
    stored_last_step: int = -1  # see last_step
    steady: SteadyRows | None = None  # the columns that its rows are in; None: it is planned by itself
    joined: int = 0  # SteadyRows.num_planned when it joined
    plan_visit: int = -1  # SteadyRows.num_planned when it is to be looked at before its row is planned
    commit_visit: int = -1  # the same after the row's commit
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

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids) + len(self.packed_prompt) // 4

    def unpack_prompt(self) -> None:
        """Make prompt_token_ids, which is empty while the request first waits."""
        if self.packed_prompt:
            self.prompt_token_ids, self.packed_prompt = array("i", self.packed_prompt).tolist(), b""

    @property
    def output_token_ids(self) -> list[int]:
        """The committed tokens of its output."""
        if self.steady is not None:
            self.steady.settle()
        return self.stored_output_token_ids

    @output_token_ids.setter
    def output_token_ids(self, value: list[int]) -> None:
        assert self.steady is None
        self.stored_output_token_ids = value

    @property
    def num_computed_tokens(self) -> int:
        """Tokens with launched keys and values."""
        rows = self.steady
        return self.stored_computed_tokens + (0 if rows is None else rows.num_planned - self.joined)

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self.stored_computed_tokens += value - self.num_computed_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens sampled on the device but not read yet; with drafts: their maximum number."""
        rows = self.steady
        return self.stored_pending_tokens + (0 if rows is None else rows.num_in_flight(self))

    @num_pending_tokens.setter
    def num_pending_tokens(self, value: int) -> None:
        self.stored_pending_tokens += value - self.num_pending_tokens

    @property
    def last_step(self) -> int:
        """The newest step that contains a row of it; -1: none."""
        rows = self.steady
        return self.stored_last_step if rows is None or rows.num_planned == self.joined else rows.last_step

    @last_step.setter
    def last_step(self, value: int) -> None:
        assert self.steady is None
        self.stored_last_step = value

    @property
    def is_plain(self) -> bool:
        """True if a decode row of it is the device's last token alone, and its output one token alone."""
        return not (self.drafter or self.matcher or self.thinking or self.params.has_filter) and (
            self.params.logprobs is None
        )

    @property
    def adapter(self) -> bytes:
        """What names the request's adapter in its chain of hashes; b"": none."""
        return self.adapter_digest or str(self.lora_index).encode() if self.lora_index else b""

    @property
    def num_tokens(self) -> int:
        """Prompt, output and in-flight tokens."""
        if self.steady is not None:
            return self.num_computed_tokens + 1  # each of its rows is of the newest token
        return self.num_prompt_tokens + len(self.stored_output_token_ids) + self.stored_pending_tokens

    @property
    def num_work_tokens(self) -> int:
        """The tokens that are computed once it is admitted, if the prefix cache has none: 0 if a prefill engine did."""
        is_given = self.hand_over is not None and not self.hand_over.is_prefill and not self.num_preemptions
        return 0 if is_given else self.num_tokens

    @property
    def cost(self) -> int:
        """The tokens that its tenant is charged for when it is served; 0 after a preemption."""
        return 0 if self.num_preemptions else self.num_tokens + self.num_expected_tokens

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
    def is_handed_over(self) -> bool:
        """True if it has ended here and goes on in another engine."""
        return self.hand_over is not None and self.hand_over.is_prefill and self.finish_reason == "length"

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
        if self.params.prompt_logprobs is None or self.num_prompt_logprobs >= self.num_prompt_tokens - 1:
            return self.num_tokens - 1
        return self.num_prompt_logprobs

    def prompt_logprobs_span(self, start: int, end: int) -> PromptLogprobsSpan | None:
        """Return the log-probabilities to compute in a chunk [start, end), or None. Earlier chunks may be in flight."""
        if self.params.prompt_logprobs is None:
            return None
        first, last = max(start, self.num_prompt_logprobs), min(end, self.num_prompt_tokens - 1)
        if first >= last:
            return None
        return PromptLogprobsSpan(first, self.prompt_token_ids[first + 1 : last + 1])

    def init(self) -> RequestInit:
        """Return what the device must know of it before its first row."""
        token_ids = self.token_ids(0, self.num_tokens) if self.params.has_penalties else []
        return RequestInit(self.req_index, self.params, self.num_prompt_tokens, token_ids, self.lora_index)

    def pool_span(self, start: int, end: int) -> PoolSpan | None:
        """Return the positions of a chunk [start, end) to sum for the embedding, or None."""
        return None if self.embedding is None else self.embedding.span(start, end)

    def add_prompt_logprobs(self, prompt_logprobs: list[TokenLogprobs]) -> None:
        """Add the next committed log-probabilities of the prompt."""
        self.num_prompt_logprobs += len(prompt_logprobs)
        self.unsent_prompt_logprobs += prompt_logprobs

    def append(self, token_id: int, now: float) -> str | None:
        """Add a committed token; return the finish reason if it is the last token, else None. NO_TOKEN: "error"."""
        output = self.output_token_ids
        self.stored_pending_tokens -= 1
        if token_id == NO_TOKEN:
            return "error"
        output.append(token_id)
        self.last_token_s = now
        if self.first_token_s is None:
            self.first_token_s = now
        if self.is_stop(token_id, len(output)):
            self.stop_token_id = token_id
            return "stop"
        return "length" if self.num_prompt_tokens + len(output) >= self.max_num_tokens else None

    def is_stop(self, token_id: int, num_output: int) -> bool:
        """Return whether a token, as the num_output-th of the output, ends the request."""
        return token_id in self.params.stop_token_ids and num_output >= self.params.min_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the committed tokens [start, end) as a new list."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]

    def extend_hashes(self, num_tokens: int, *, unit: int) -> None:
        """Extend the chain over its first num_tokens, a link per unit. Equal hashes: equal prefix, salt and adapter."""
        hashes = self.block_hashes
        first, last = len(hashes), num_tokens // unit
        if first >= last:
            return
        parent = hashes[-1] if hashes else self.root_hash()
        tokens, size = _pack(self.token_ids(first * unit, last * unit)), 4 * unit
        for start in range(0, len(tokens), size):
            parent = sha256(parent + tokens[start : start + size]).digest()
            hashes.append(parent)

    def root_hash(self) -> bytes:
        """Return the parent of the first hash."""
        return root_hash(self.cache_salt, self.adapter)


@lru_cache(maxsize=1024)
def root_hash(cache_salt: str, adapter: bytes) -> bytes:
    """Return the parent of a chain's first hash: of the salt, and of the adapter, on which keys and values depend.

    adapter: Request.adapter. Equal in every process, as all hashes of the chain, if that is a digest.
    """
    salt = sha256(cache_salt.encode()).digest()
    return sha256(b"adapter " + adapter + b": " + salt).digest() if adapter else salt


def link_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Return a chain's next hash."""
    return sha256(parent + _pack(token_ids)).digest()


def _pack(token_ids: list[int]) -> bytes:
    return array("I", token_ids).tobytes()
