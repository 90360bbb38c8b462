"""What the scheduler asks of the executor for one step, and what comes back. msgspec only; never torch.

A plan is a pure value: it can be logged, replayed, compared byte for byte and sent to other ranks.
"""

import msgspec

from engine.interface.protocol import SamplingParams, TokenLogprobs

NEWEST = -1  # in a row's token_ids: the last token sampled for the request, which only the device knows


class RequestInit(msgspec.Struct, omit_defaults=True):
    """A request takes a row of device state. Sent in the first plan after (re-)admission, before that plan's rows."""

    req_index: int
    params: SamplingParams
    num_prompt_tokens: int
    # All tokens known so far (prompt, then output of earlier runs), only if the sampler counts them (penalties).
    token_ids: list[int] = []
    lora_index: int = 0  # its adapter; 0: none


class PromptLogprobsSpan(msgspec.Struct):
    """Wanted: the log-probability of token_ids[i] after position start + i of a row's tokens."""

    start: int
    token_ids: list[int]


class PoolSpan(msgspec.Struct):
    """Wanted: the sum of the hidden states of a row's positions [start, start + num_tokens)."""

    start: int
    num_tokens: int


class RowPlan(msgspec.Struct, omit_defaults=True):
    """One request's share of a step: compute tokens [start, start + num_tokens) of it.

    token_ids: those tokens, when the host knows them (prompt chunks; recomputation); empty: the one token at `start`
    is the device's last sampled one. samples: this row's last position is the request's newest token, so sample.
    num_drafts: the last so many of token_ids are guesses; the row samples after its token before them (the first, which
    may be NEWEST) and after each of them, and the request's next row has its token_ids, whatever the device thinks.
    """

    req_index: int
    start: int
    num_tokens: int
    token_ids: list[int] = []
    new_block_ids: list[int] = []  # appended to the request's block table before this step
    samples: bool = True
    prompt_logprobs: PromptLogprobsSpan | None = None  # of a prompt chunk whose request asked for prompt_logprobs
    pool_span: PoolSpan | None = None  # of a prompt chunk whose request asked for an embedding, and never samples
    num_drafts: int = 0

    @property
    def needs_hidden(self) -> bool:
        """True if hidden states other than those of tokens that sample are wanted."""
        return self.prompt_logprobs is not None or self.pool_span is not None

    @property
    def num_samples(self) -> int:
        """Positions that are sampled, the last ones."""
        return self.samples + self.num_drafts


class StepPlan(msgspec.Struct, omit_defaults=True):
    """One step. Rows are ordered: decode rows (empty token_ids) first, then those whose token the host sends (with
    drafts, or after such), then prompt chunks; one row per request.
    """

    step_id: int
    rows: list[RowPlan]
    inits: list[RequestInit] = []
    freed: list[int] = []  # req_index values that are free from this step on (before inits are applied)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all rows."""
        return sum(row.num_tokens for row in self.rows)


class StepResult(msgspec.Struct):
    """The tokens that a step sampled: num_samples of each row, in row order."""

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = {}  # index into token_ids → logprobs, for rows that asked
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # index into the plan's rows → one entry per prompt token
    pooled: dict[int, bytes] = {}  # index into the plan's rows → the sum over its PoolSpan, as float32s


class TokenMasks(msgspec.Struct):
    """The tokens that constrained rows may sample in one step; all its other rows are free.

    words: [len(req_indices), ceil(vocab / 32)] int32, row after row: bit b of word w stands for token 32 * w + b.
    """

    req_indices: list[int]
    words: bytes
