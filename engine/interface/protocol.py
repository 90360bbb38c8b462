"""Messages between an HTTP worker and the engine. Imports msgspec only; never torch.

Each worker has one connection; frames are length-prefixed msgpack (engine/interface/transport.py).
    worker → engine   AddRequest … [AbortRequest]; AskKv at any time, with one KvSnapshot as its reply; GrammarUse;
                      RefuseDigest; QueueCosts of an earlier engine
    engine → worker   EngineReady once; QueueState, QueueCosts and GrammarLimit on change; [Accepted];
                      [SetAside]; [Alone]; Begun before the engine works on a request; StepEvents (columnar, at most one
                      per step and worker) until the request's row appears in `finished`; or RequestFailed, which also
                      ends the request.
A request ends in one of these two ways, or with its connection: EngineClient then submits it to the next engine, with
the tokens that it has (engine/interface/replays.py), or raises EngineDead.
The engine handles token ids only: text, stop strings and templates stay in the worker. The source of a grammar passes
through the engine unread, to engine/grammar/compiler.py, which makes token masks from it.
"""

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from engine.interface.kv_snapshot import CacheReason, KvSnapshot, LayerKind
from engine.interface.tenant import Charge, Rates, Tenant

# The hidden states that form an embedding: that of the prompt's last token, or the mean over all tokens
PoolingKind = Literal["last", "mean"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters and end conditions of one request. The server validates them.

    The engine checks bounds and token ids again (engine/core/request_factory.py).

    Penalties follow OpenAI (presence, frequency: over generated tokens, subtracted from logits) and
    Keskar et al. 2019, CTRL, §4.1 (repetition: over prompt and generated tokens, positive logits divided).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # 0 ≤ seed < 2**63; the server draws one when the client gives none
    stop_token_ids: list[int] = []  # includes the end-of-sequence ids, unless the request ignores them
    bad_words: list[list[int]] = []  # token ids; a word's last token is never sampled after its other tokens
    allowed_token_ids: list[int] = []  # only these are sampled; []: no restriction
    logprobs: int | None = None  # None: none; n: of the sampled token and the n most likely tokens (0 ≤ n ≤ 20)
    prompt_logprobs: int | None = None  # the same for every prompt token except the first

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always sampled."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if counts of earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_filter(self) -> bool:
        """True if bad_words or allowed_token_ids restrict the sampled tokens."""
        return bool(self.bad_words or self.allowed_token_ids)

    @property
    def has_extras(self) -> bool:
        """True if sampling needs more device memory per token than a draw from the logits."""
        has_logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return self.has_penalties or self.has_filter or bool(self.logit_bias) or has_logprobs


class GrammarSpec(msgspec.Struct, frozen=True):
    """The grammar that the output text must match. Built and test-compiled by the server; opaque to the engine.

    source: llguidance's Lark dialect, which may embed `%json {schema}` and name special tokens (<|name|>, <tag>,
    <[id]>); or its JSON form, {"grammars": [{"lark_grammar": …}, {"name": …, "lark_grammar": …}]}.
    is_costly: it took long to test-compile; the engine compiles it apart from the others.
    """

    source: str
    is_costly: bool = False


class ThinkingBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limit of a request's reasoning: after max_tokens of it the forced tokens are sampled, which end it.

    start_ids, end_id: the tokens that open and close reasoning; they do not count. is_open: the prompt opened it.
    opening_ids: the rest of what opens it, forced after start_ids, since a model may cut that text into other tokens.
    is_repeated: an answer may reason again, within the same limit; else only its beginning is reasoning.
    not_after_ids: tokens that must not follow the forced ones.
    """

    max_tokens: int
    start_ids: list[int]
    end_id: int
    forced_ids: list[int]
    is_open: bool = False
    is_repeated: bool = False
    not_after_ids: list[int] = []
    opening_ids: list[int] = []


class GrammarCheck(msgspec.Struct, omit_defaults=True):
    """A grammar for engine/grammar_check_process.py to test-compile. No spec: give up the check of this id."""

    id: int
    spec: GrammarSpec | None = None
    limit_s: float = 0.0  # of its run time


class GrammarVerdict(msgspec.Struct, omit_defaults=True):
    """The reply of engine/grammar_check_process.py to a GrammarCheck: an error's code and sentence, or no code."""

    code: str | None = None
    message: str = ""
    id: int = 0  # 0: on the tokenizer
    cpu_s: float = 0.0  # to compile it
    is_final: bool = True  # false: another attempt can have another result


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Return token ids as native 32-bit integers. Raises OverflowError for one that is none."""
    return array("i", token_ids).tobytes()


class HandOver(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of one engine in a request that two engines compute (docs/explanation/disaggregation.md).

    peer: the number of the other engine. is_prefill: this engine gives blocks of the prompt to the other; else it waits
    for them. max_tokens: for a prefill engine, of the whole answer, which its tenant's share must hold. `request_id`
    names the request on both.
    """

    peer: int
    is_prefill: bool = False
    max_tokens: int = 1


class AddRequest(msgspec.Struct, tag=True, omit_defaults=True):
    """A validated request. `arrival_s` is time.monotonic() at the HTTP worker, by the engine's clock."""

    request_id: str
    prompt: bytes  # pack_token_ids(): the prompt takes 4 bytes a token on its way and in the queue
    params: SamplingParams
    arrival_s: float
    cache_salt: str = ""
    priority: int = 0  # smaller runs earlier
    grammar: GrammarSpec | None = None  # None: any text
    pooling: PoolingKind | None = None  # compute the prompt's embedding instead of tokens; `params` is unused
    lora_index: int = 0  # its adapter, counted from 1 in EngineConfig.loras; 0: the base model
    thinking: ThinkingBudget | None = None  # None: any number of tokens
    open_salt: str = ""  # what cache_salt would be if the client had given none
    pin_s: float = 0.0  # how long its blocks are kept in the prefix cache after its end; 0: as all others
    tenant: Tenant = Tenant()
    charge: Charge | None = None  # in the first engine request of an HTTP request; None: charged already
    counts_prompt: bool = True  # false: an earlier engine request has the same prompt, for which its tenant is charged
    deadline_s: float | None = None  # time.monotonic() after which nobody waits for it; None: none
    has_waited: bool = False  # for the engine to serve: a queue that is full, or too long, no longer refuses it
    # Of a request that goes on after the end of an earlier engine:
    output: bytes = b""  # pack_token_ids(): the tokens that its client has; the next one is wanted
    num_prompt_logprobs: int = 0  # tokens of the prompt after the first whose log-probabilities its client has
    num_replays: int = 0  # earlier submissions
    is_suspect: bool = False  # it may have ended an engine: no other suspect runs until it has a further token
    is_isolated: bool = False  # it may have ended two: it is let in alone, and no other until it has a further token
    is_charged: bool = False  # an earlier engine has accepted it, and counted it in the ledger
    hand_over: HandOver | None = None  # None: one engine computes all of it

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids, as a new list. Raises ValueError if it is no whole number of integers."""
        return array("i", self.prompt).tolist()

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prompt) // 4


class AbortRequest(msgspec.Struct, tag=True):
    """Ends a request. The only reply is its `finished` row; an unknown id (a request that has ended) has none.

    reason: "abort", or "stop" if the server found a stop string, which counts as a normal end.
    """

    request_id: str
    reason: str = "abort"


class RefuseDigest(msgspec.Struct, tag=True):
    """Requests with this digest (engine/interface/replays.py) are refused until time.monotonic() is `until_s`."""

    digest: bytes
    until_s: float


class ClientGone(msgspec.Struct, tag=True):
    """Reports a closed worker connection from the transport to the engine, which aborts its requests. Never sent."""


class EngineReady(msgspec.Struct, tag=True):
    """The engine's limits: the first message on every connection, after the engine's self-test passed."""

    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int  # tokens
    vocab_size: int
    max_queued_requests: int  # requests
    hidden_size: int  # length of an embedding
    max_queued_tokens: int  # limit of all waiting prompts together; an empty queue accepts any prompt
    can_generate: bool = True  # False: the model has no language-model head and only computes embeddings
    cache_identity: str = ""  # digest of the facts on which its blocks depend; equal ones can exchange blocks
    now_s: float = 0.0  # its time.monotonic() when this was sent: the clock of another host is another one


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The log-probability of one token, and the n most likely tokens at its position, most likely first.

    Natural logarithms of the model's distribution before temperature, penalties, bias and truncation.
    """

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0  # of the token; 1: the most likely; 0: unknown, since only prompt tokens have ranks


class CacheReport(msgspec.Struct, array_like=True, frozen=True):
    """What the prefix cache had of a prompt at its first admission, and why it had no more."""

    reason: CacheReason
    num_cached_tokens: int  # that were taken
    num_matched_tokens: int  # that layers with full attention had; a whole number of blocks
    kind: LayerKind | None = None  # of the layers that had no more; None: the reason is not theirs
    num_host_tokens: int = 0  # of num_cached_tokens: those for which blocks came from host memory
    num_disk_tokens: int = 0  # of num_host_tokens: those for which blocks were read from disk before


class Started(msgspec.Struct, array_like=True):
    """Facts sent with a request's first token. `row` indexes StepEvents.request_ids."""

    row: int
    num_cached_tokens: int
    queue_s: float  # arrival → first scheduled
    prefill_s: float  # first scheduled → first token
    cache: CacheReport | None = None


class Finished(msgspec.Struct, array_like=True):
    """A request's end. reason: "stop" | "length" | "abort"; stop_token_id: the stop token, also in token_ids."""

    row: int
    reason: str
    stop_token_id: int | None


class StepEvents(msgspec.Struct, tag=True, omit_defaults=True):
    """The output of one step for one worker, in columns: the next num_tokens[i] of token_ids are request_ids[i]'s."""

    step_id: int
    request_ids: list[str]
    num_tokens: list[int]
    token_ids: list[int]
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: dict[int, list[TokenLogprobs]] = {}  # row → one entry per token; only requested rows
    # row → the next entries of its prompt, from the second token on; all are sent by the first sampled token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, bytes] = {}  # row → float32s, not normalised; with its request's Started and Finished


class Begun(msgspec.Struct, tag=True):
    """Sent before the engine first works on requests: if it ends without a further token, that may be their fault.

    caches: what the prefix cache had of each, in the same order; None: its grammar is compiled first.
    """

    request_ids: list[str]
    caches: list[CacheReport | None]


class QueueState(msgspec.Struct, tag=True):
    """Sent to every worker when the queue becomes full or has room again. Workers refuse requests while it is full."""

    is_full: bool
    retry_after_s: int = 1  # after which there may be room


class GrammarUse(msgspec.Struct, tag=True):
    """Processor time that an HTTP worker spent on a tenant's grammar. Sent for tenants with grammar_seconds."""

    tenant: Tenant
    seconds: float


class TenantUse(msgspec.Struct, tag=True):
    """What a tenant with limits has used in other engines, as far as the HTTP worker knows that sends it."""

    tenant: Tenant
    num_requests: int  # accepted since the last such message
    num_tokens: int  # of prompts, and generated, since then
    num_open_tokens: int  # of the worker's open requests, now


class GrammarLimit(msgspec.Struct, tag=True):
    """Sent to every worker when a tenant has spent its grammar_seconds: it compiles none until then."""

    name: str
    limit_s: float
    until_s: float  # time.monotonic()


class QueueCosts(msgspec.Struct, tag=True):
    """What the queue's forecast has measured: to every worker now and then, and from them to the next engine.

    seconds: of the device, of steps that computed so many tokens of prompts, and of answers. Means with their weights.
    """

    prompt_s: float
    num_prompt_tokens: float
    answer_s: float
    num_answer_tokens: float
    computed: tuple[float, float]  # the share of a prompt that the prefix cache did not have
    answers: dict[str, tuple[float, float]]  # tokens of an answer, by tenant; those that ended last


class Accepted(msgspec.Struct, tag=True):
    """Tells that a request with a charge is accepted. Sent with `rates`, or if Begun, which tells it too, is not due.

    rates: if its tenant has limits a minute; then it is the first message about the request.
    """

    request_id: str
    rates: Rates | None = None


class Alone(msgspec.Struct, tag=True):
    """Before Begun, of a suspect: no other request is in a step, nor will be until it has a further token."""

    request_id: str


class SetAside(msgspec.Struct, tag=True):
    """Before Alone, of requests that had begun: they are in no step until Begun tells of them again."""

    request_ids: list[str]


class RequestFailed(msgspec.Struct, tag=True, omit_defaults=True):
    """The end of a request by an error: a `code` of engine/interface/errors.py, one sentence, the field at fault."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None  # of Overloaded
    rates: Rates | None = None


class AskKv(msgspec.Struct, tag=True):
    """Requests one KvSnapshot, which is sent after the next iteration of the loop."""


ToEngine = AddRequest | AbortRequest | AskKv | GrammarUse | TenantUse | RefuseDigest | QueueCosts
FromEngine = (
    EngineReady
    | Begun
    | StepEvents
    | QueueState
    | RequestFailed
    | KvSnapshot
    | Accepted
    | Alone
    | SetAside
    | GrammarLimit
    | QueueCosts
)
