"""StepPlan, StepResult and Executor: the interface between the engine's loop and the device. Never imports torch.

A plan is the scheduler's input to the executor for one step: a plain value, which can be logged, replayed, compared
byte for byte and sent to other ranks.
Executor.forward(plan) launches a step and returns immediately; the caller samples and reads its tokens later through
its StepHandle. ModelRunner is the Executor of one device. RankedExecutor (tensor parallelism) sends the same plan bytes
to every rank. tests/support/fake_executor.py has an Executor that computes tokens by arithmetic.
"""

from array import array
from collections.abc import Iterator
from typing import Protocol

import msgspec

from engine.interface.protocol import SamplingParams, TokenLogprobs

NO_TOKEN = -1  # in a result's token_ids: the logits are not finite (kernels.sampling.reference)
NEWEST = -1  # in a row's token_ids: the request's last sampled token, which only the device knows


class RequestInit(msgspec.Struct, omit_defaults=True):
    """Assigns a row of device state to a request, in its first plan after each admission, before the plan's rows."""

    req_index: int
    params: SamplingParams
    num_prompt_tokens: int
    # All known tokens (prompt, then output before a preemption), only if the sampler counts them (penalties).
    token_ids: list[int] = []
    lora_index: int = 0  # the request's adapter; 0: none


class PromptLogprobsSpan(msgspec.Struct):
    """Requests the log-probability of token_ids[i] after position start + i, for each i."""

    start: int
    token_ids: list[int]


class PoolSpan(msgspec.Struct):
    """Requests the sum of the hidden states of positions [start, start + num_tokens)."""

    start: int
    num_tokens: int


RequestShare = tuple[int, int, int]  # req_index, number of the request's group, 0: none, and the group's tokens


class RowPlan(msgspec.Struct, omit_defaults=True):
    """One request's part of a step: computes its tokens [start, start + num_tokens).

    token_ids: these tokens, if the host knows them (prompt chunks; recomputation); empty: the only token, at `start`,
    is the device's last sampled one. samples: the row's last position is the request's newest token, so one is sampled.
    num_drafts: the last num_drafts of token_ids are draft tokens. The row then samples after the token before the
    drafts (the first token, possibly NEWEST) and after each draft; the host sends token_ids in the request's next row.
    """

    req_index: int
    start: int
    num_tokens: int
    token_ids: list[int] = []
    # (table, first column, page ids): new entries of the request's tables (CacheGroup.num_tables)
    new_blocks: list[tuple[int, int, list[int]]] = []
    samples: bool = True
    prompt_logprobs: PromptLogprobsSpan | None = None  # in prompt chunks of requests with prompt_logprobs
    pool_span: PoolSpan | None = None  # in prompt chunks of requests for an embedding, which never sample
    num_drafts: int = 0

    @property
    def needs_hidden(self) -> bool:
        """True if the row needs hidden states of positions that are not sampled."""
        return self.prompt_logprobs is not None or self.pool_span is not None

    @property
    def num_samples(self) -> int:
        """The number of sampled positions, which are the row's last."""
        return self.samples + self.num_drafts


class SteadyRowsPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decode rows of one token without token_ids, as columns: what RowPlan(req_index, start, 1) says of each."""

    # [R] int32, native byte order
    req_index: bytes = b""
    # [R] int32
    start: bytes = b""
    # (req_index, table, first column, page ids): RowPlan.new_blocks of those that have some
    new_blocks: list[tuple[int, int, int, list[int]]] = []

    @property
    def num_rows(self) -> int:
        """The number of these rows."""
        return len(self.req_index) // 4

    def rows(self) -> list[RowPlan]:
        """Return them one by one."""
        columns = zip(array("i", self.req_index), array("i", self.start), strict=True)
        rows = {req_index: RowPlan(req_index, start, 1) for req_index, start in columns}
        for req_index, table, first, page_ids in self.new_blocks:
            rows[req_index].new_blocks = [*rows[req_index].new_blocks, (table, first, page_ids)]
        return list(rows.values())


class StepPlan(msgspec.Struct, omit_defaults=True, tag=True):
    """One step, with at most one row per request. It may have no rows if it has copies to or from the host.

    Row order: steady decode rows, then single ones: decode rows (empty token_ids), decode rows with token_ids (with
    drafts, or following a row with drafts), prompt chunks.
    """

    step_id: int
    singles: list[RowPlan]  # the rows that are not steady
    inits: list[RequestInit] = []
    freed: list[int] = []  # req_index values that become free with this step, before inits are applied
    # In this order, after inits and new_blocks and before the rows are computed:
    zeroed: list[int] = []  # pages to fill with zeros
    copies_in: list[tuple[int, int]] = []  # (source page, target page): saved states, of rows that start after them
    copies_out: list[tuple[int, int]] = []  # the states before the rows that start here, to save them
    steady: SteadyRowsPlan = SteadyRowsPlan()
    # After inits: new groups of running requests that begin with the same blocks (engine/core/shared_prefixes.py)
    shares: list[RequestShare] = []
    # What the step is estimated to spare if attention reads these blocks once for all rows of a group; 0: not worth it
    spared_us: int = 0
    # Between zeroing and the end of the step, in any order and beside its rows, which touch none of these pages:
    copies_to_host: list[tuple[int, int]] = []  # (page, slot of host memory)
    copies_from_host: list[tuple[int, int]] = []  # (slot of host memory, page)

    @property
    def is_grouped(self) -> bool:
        """True if rows are to be grouped where a step can do so."""
        return self.spared_us > 0

    @property
    def rows(self) -> list[RowPlan]:
        """All rows, one by one, in order. A new list: a long one of the steady rows, which cost little as columns."""
        return [*self.steady.rows(), *self.singles]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.steady.num_rows + len(self.singles)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all rows."""
        return self.steady.num_rows + sum(row.num_tokens for row in self.singles)

    @property
    def num_samples(self) -> int:
        """The number of sampled positions."""
        return self.steady.num_rows + sum(row.num_samples for row in self.singles)

    @property
    def req_index(self) -> bytes:
        """The req_index of all rows, in order. [R] int32, native byte order."""
        return self.steady.req_index + array("i", [row.req_index for row in self.singles]).tobytes()

    @property
    def new_blocks(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """All rows' new blocks, as (req_index, table, first column, page ids)."""
        yield from self.steady.new_blocks
        for row in self.singles:
            for table, first, page_ids in row.new_blocks:
                yield row.req_index, table, first, page_ids


class StepResult(msgspec.Struct):
    """The tokens that a step sampled, or NO_TOKEN: num_samples of each row, in row order."""

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = {}  # index into token_ids → logprobs, for requests with logprobs
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # index into the plan's rows → one entry per prompt token
    pooled: dict[int, bytes] = {}  # index into the plan's rows → the sum over its PoolSpan, as float32s


class TokenMasks(msgspec.Struct):
    """The tokens that constrained rows may sample in one step; other rows are unconstrained.

    words: [len(req_indices), ceil(vocab / 32)] int32, row-major: bit b of word w is token 32 * w + b.
    """

    req_indices: list[int]
    words: bytes


class StepHandle(Protocol):
    """One step in flight. Call sample() exactly once, is_done() perhaps, then wait() exactly once."""

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Launch the sampling of the rows that sample, after the previous step was committed. Does not block.

        masks: the allowed tokens of constrained rows; None: every row may sample any token.
        """
        ...

    def is_done(self) -> bool:
        """Return whether wait() would not block, after sample(). False only while a device computes by itself."""
        ...

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host: the only place where the loop waits for the device."""
        ...


class Executor(Protocol):
    """Runs plans in the order given. A device fault raises out of any method and ends the process.

    If the device has too little memory for a step, any of its methods raises the Engine's memory_error. The step may be
    partly applied: the Engine drops its handle and those of later steps, lists its freed rows again, and initialises
    the rows of continuing requests again.
    """

    def forward(self, plan: StepPlan) -> StepHandle:
        """Zero pages, apply the plan's frees and inits and launch its forward pass. Does not wait for the device."""
        ...

    def close(self) -> None:
        """Release device memory and ranks."""
        ...
