"""What crosses the socket between an HTTP worker and the engine. Imports msgspec only; never torch.

One connection per worker; frames are length-prefixed msgpack (engine/interface/transport.py). A request's life on the
wire:
    worker → engine   AddRequest … [AbortRequest]; AskKv at any time, answered by one KvSnapshot
    engine → worker   EngineReady once, QueueState now and then, StepEvents (columnar, at most one per step and worker)
                      until the request's row appears in `finished`; or RequestFailed, which is also an end. Nothing
                      else ends a request, but the connection's own end, which the client side turns into EngineDead
                      for every open request.
Text, stop strings and templates never reach the engine: it knows token ids. A grammar's source does, unread, for the
one file that makes token masks of it (engine/core/grammars.py).
"""

from typing import Literal

import msgspec

# Which of a prompt's hidden states its embedding is made of: those of its last token, or the mean of all
PoolingKind = Literal["last", "mean"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it ends. Validated by the server; the engine trusts it.

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
    stop_token_ids: list[int] = []  # end-of-sequence ids included, unless the request ignores them
    bad_words: list[list[int]] = []  # token ids; the last of a word is not sampled after the others of it
    allowed_token_ids: list[int] = []  # no others are sampled; []: all are
    logprobs: int | None = None  # None: none; n: the sampled token's and the n most likely ones' (0 ≤ n ≤ 20)
    prompt_logprobs: int | None = None  # the same for every prompt token but the first

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if counts of earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_filter(self) -> bool:
        """True if it names tokens that must not be sampled, or all that may be."""
        return bool(self.bad_words or self.allowed_token_ids)

    @property
    def has_extras(self) -> bool:
        """True if each of its tokens takes memory beyond a draw from the logits."""
        has_logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return self.has_penalties or self.has_filter or bool(self.logit_bias) or has_logprobs


class GrammarSpec(msgspec.Struct, frozen=True):
    """What the answer's text must match. Built by the server, which has proved that it compiles; opaque to the engine.

    source: llguidance's Lark dialect, which may embed `%json {schema}` and name special tokens (<|name|>, <tag>,
    <[id]>); or its JSON form, {"grammars": [{"lark_grammar": …}, {"name": …, "lark_grammar": …}]}.
    """

    source: str


class GrammarVerdict(msgspec.Struct, omit_defaults=True):
    """What the process that tries grammars (engine/grammar_check_process.py) says: an error's code and sentence, or
    none."""

    code: str | None = None
    message: str = ""


class AddRequest(msgspec.Struct, tag=True, omit_defaults=True):
    """A validated request. `arrival_s` is time.monotonic() at the HTTP worker (one host, one clock)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    cache_salt: str = ""
    priority: int = 0  # smaller runs earlier
    grammar: GrammarSpec | None = None  # None: any text
    pooling: PoolingKind | None = None  # the prompt's embedding instead of tokens; `params` has no part in it
    lora_index: int = 0  # its adapter, counted from 1 as in EngineConfig.loras; 0: the model itself


class AbortRequest(msgspec.Struct, tag=True):
    """End a request; unknown ids are ignored (it may have ended on its own). No reply but `finished` or silence.

    reason: "abort", or "stop" when the server found a stop string: an ordinary end, and counted as one.
    """

    request_id: str
    reason: str = "abort"


class ClientGone(msgspec.Struct, tag=True):
    """Never on the wire: the transport's word for a connection's end; every request of that worker is aborted."""


class EngineReady(msgspec.Struct, tag=True):
    """Sent first on every connection once the engine's self-test token came out."""

    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int  # tokens
    vocab_size: int
    max_waiting: int  # requests
    hidden_size: int  # numbers in an embedding
    max_queued_tokens: int  # of prompts that wait; an empty queue takes any
    can_generate: bool = True  # False: the model has no language-model head, so that it only embeds


class TokenLogprobs(msgspec.Struct, array_like=True):
    """One token's log-probability and the n most likely tokens at its place, most likely first.

    Natural logarithms of the model's distribution before temperature, penalties, bias and truncation.
    """

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0  # of the token, the most likely has 1; only known for a prompt's tokens


class Started(msgspec.Struct, array_like=True):
    """What is known once a request's first token is out. `row` indexes StepEvents.request_ids."""

    row: int
    num_cached_tokens: int
    queue_s: float  # arrival → first scheduled
    prefill_s: float  # first scheduled → first token


class Finished(msgspec.Struct, array_like=True):
    """A request's end. reason: "stop" | "length" | "abort"; stop_token_id: what stopped it, also in token_ids."""

    row: int
    reason: str
    stop_token_id: int | None


class StepEvents(msgspec.Struct, tag=True, omit_defaults=True):
    """All that one step means for one worker, in columns: num_tokens[i] of the flat token_ids are request_ids[i]'s."""

    step_id: int
    request_ids: list[str]
    num_tokens: list[int]
    token_ids: list[int]
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: dict[int, list[TokenLogprobs]] = {}  # row → one entry per token; only rows that asked
    # row → the next entries of its prompt, from the second token on; all are out with the first sampled token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, bytes] = {}  # row → float32s, not normalised; comes with its request's start and end


class QueueState(msgspec.Struct, tag=True):
    """Sent to every worker when the queue has become full, and when it no longer is: what is full refuses at once."""

    is_full: bool


class RequestFailed(msgspec.Struct, tag=True, omit_defaults=True):
    """A request ended by an error: `code` of engine/interface/errors.py, one sentence, and the field at fault."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class AskKv(msgspec.Struct, tag=True):
    """Send this worker one KvSnapshot after the next turn. The engine makes none unless asked."""


class KvRequest(msgspec.Struct, array_like=True):
    """One row of a KvSnapshot. state: "gate" (its grammar compiles) | "waiting" | "running" | "retiring"."""

    request_id: str
    state: str
    num_runs: int  # of KvSnapshot.runs, the next ones
    num_blocks: int
    num_shared_blocks: int  # those that other requests hold as well
    num_computed_tokens: int  # keys and values launched
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int  # prompt tokens found in the prefix cache at first admission
    age_s: float
    num_preemptions: int


class KvSnapshot(msgspec.Struct, tag=True):
    """The KV pool and who holds it, between two turns. Token ids and text are not in it.

    runs, cached_runs: blocks as pairs of 32-bit integers of this machine: a first block and a count; a negative count
    goes downwards. runs are the tables of `requests`, one after the other; cached_runs the free blocks whose content
    can still be found. Blocks are numbered from 1 to num_blocks.
    """

    step_id: int  # of the last committed step
    now_s: float  # time.monotonic()
    cost_s: float  # what making this took
    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int
    num_used: int
    num_shared: int  # used ones with two holders or more
    num_cached: int  # free ones that can still be found
    requests: list[KvRequest]  # all that hold blocks; those at the gate and in the queue up to a limit
    num_unlisted: int  # further ones in the queue
    runs: bytes
    cached_runs: bytes
    num_queried_tokens: int  # these four since the engine's start
    num_hit_tokens: int
    num_evictions: int
    num_preemptions: int


ToEngine = AddRequest | AbortRequest | AskKv
FromEngine = EngineReady | StepEvents | QueueState | RequestFailed | KvSnapshot
