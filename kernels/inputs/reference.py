"""The inputs of a step, gathered by req_index from the device state: the torch specification. Any device.

Nothing here syncs. All outputs are fixed buffers, so one CUDA graph can contain the gather and its readers. A request
has several block tables if the layers of its model have unequal caches; all are gathered at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeInputs:
    """The tensors of decode rows, one token each; a step of R rows fills the first R entries."""

    # [max_rows] int64: each row's newest token, and its position in the request
    input_ids: torch.Tensor
    positions: torch.Tensor
    # [max_rows] int32: tokens attended to, positions + 1
    seq_lens: torch.Tensor
    # [tables, max_rows rounded up] int64: slot of the token's key and value, by each block table
    slot_mappings: torch.Tensor
    # [tables, max_rows, max_blocks] int32: defined up to the row's length (seq_lens)
    block_tables: torch.Tensor
    # [max_rows] int32: seq_lens, but 0 for padding rows, for layers with states; None: there are none
    state_lens: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, *, num_tables: int, max_rows: int, max_blocks: int, device: torch.device, has_states: bool = False
    ) -> DecodeInputs:
        """Allocate zeros: valid ids everywhere, also before the first step."""
        return cls(
            input_ids=torch.zeros(max_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            slot_mappings=_zero_slots(num_tables, max_rows, device),
            block_tables=torch.zeros(num_tables, max_rows, max_blocks, dtype=torch.int32, device=device),
            state_lens=torch.zeros(max_rows, dtype=torch.int32, device=device) if has_states else None,
        )


def gather_decode_inputs(
    req_index: torch.Tensor,
    *,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    padding_row: int,
    out: DecodeInputs,
) -> None:
    """Fill the first R rows of out, and advance num_computed of the rows by one; the padding row stays at 0.

    req_index: [R] int64, distinct but for the padding row; last_token, num_computed: [rows] int64; block_tables:
    [tables, rows, max_blocks] int32. Nothing else in the step may read num_computed: it already counts this step's
    token.
    """
    num_rows = req_index.shape[0]
    positions = num_computed[req_index]
    blocks = block_tables[:, req_index, positions // block_size].to(torch.int64)
    out.input_ids[:num_rows] = last_token[req_index]
    out.positions[:num_rows] = positions
    out.seq_lens[:num_rows] = positions + 1
    if out.state_lens is not None:
        out.state_lens[:num_rows] = torch.where(req_index == padding_row, 0, positions + 1)
    out.slot_mappings[:, :num_rows] = blocks * block_size + positions % block_size
    out.block_tables[:, :num_rows] = block_tables[:, req_index]
    num_computed[req_index] = torch.where(req_index == padding_row, 0, positions + 1)


@dataclass(frozen=True)
class PackedInputs:
    """The host's data about a step of T tokens in R rows: views of one int32 buffer, filled by one copy."""

    # [T] token ids; -1: the newest token of the row's request, which only the device knows
    token_ids: torch.Tensor
    # [T] row of each token
    token_rows: torch.Tensor
    # [R] request of each row; the padding row's for unused rows
    req_index: torch.Tensor
    # [R] tokens of each request including this step's; 0: the row's tokens are padding
    seq_lens: torch.Tensor
    # [R] row of each sampled position, in the order of the results, and its token; unused entries are 0
    sample_rows: torch.Tensor
    sample_tokens: torch.Tensor
    # [R + 1] first token of each row
    query_start_loc: torch.Tensor
    # [R] drafts of each row, its last tokens, for layers with states; None: there are none, or no drafts
    num_drafts: torch.Tensor | None = None

    @staticmethod
    def num_values(num_tokens: int, num_rows: int, *, has_drafts: bool = False) -> int:
        """Return the buffer's length for T tokens in R rows."""
        return sum(_mixed_sections(num_tokens, num_rows, has_drafts=has_drafts))

    @classmethod
    def view(cls, buffer: torch.Tensor, num_tokens: int, num_rows: int, *, has_drafts: bool = False) -> PackedInputs:
        """Return the sections of buffer, at least [num_values(T, R)] int32."""
        return cls(*(buffer[place] for place in cls.places(num_tokens, num_rows, has_drafts=has_drafts)))

    @staticmethod
    def places(num_tokens: int, num_rows: int, *, has_drafts: bool = False) -> list[slice]:
        """Return where the fields are in the buffer, in their order."""
        sizes = _mixed_sections(num_tokens, num_rows, has_drafts=has_drafts)
        lengths = [num_tokens] * 2 + [num_rows] * 4 + [num_rows + 1] + [num_rows] * has_drafts
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _mixed_sections(num_tokens: int, num_rows: int, *, has_drafts: bool) -> list[int]:
    """Return the sections' lengths, multiples of 4: kernels load 16 bytes if aligned, and compile for either."""
    return [(num_tokens + 3) // 4 * 4] * 2 + [(num_rows + 4) // 4 * 4] * (5 + has_drafts)


@dataclass(frozen=True)
class MixedInputs:
    """The tensors of a step of any rows that PackedInputs does not contain."""

    # [max_tokens] int64
    input_ids: torch.Tensor
    positions: torch.Tensor
    # [tables, max_tokens rounded up] int64
    slot_mappings: torch.Tensor
    # [tables, max_rows, max_blocks] int32: defined up to the row's length (seq_lens)
    block_tables: torch.Tensor
    # [max_rows] int64, for sampled positions: request, position of the token to be chosen, token
    sample_req_index: torch.Tensor
    sample_positions: torch.Tensor
    sample_tokens: torch.Tensor

    @classmethod
    def allocate(
        cls, *, num_tables: int, max_tokens: int, max_rows: int, max_blocks: int, device: torch.device
    ) -> MixedInputs:
        """Allocate zeros: valid ids everywhere, also before the first step."""
        tokens = torch.zeros(2, max_tokens, dtype=torch.int64, device=device)
        rows = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        return cls(
            input_ids=tokens[0],
            positions=tokens[1],
            slot_mappings=_zero_slots(num_tables, max_tokens, device),
            block_tables=torch.zeros(num_tables, max_rows, max_blocks, dtype=torch.int32, device=device),
            sample_req_index=rows[0],
            sample_positions=rows[1],
            sample_tokens=rows[2],
        )


def gather_mixed_inputs(
    last_token: torch.Tensor,
    packed: PackedInputs,
    *,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    out: MixedInputs,
) -> None:
    """Fill the first T tokens and R rows of out, and set num_computed of the requests in packed to their seq_lens.

    State tensors as in gather_decode_inputs. Padding tokens have position 0 and slot 0.
    """
    num_tokens, num_rows = packed.token_ids.shape[0], packed.req_index.shape[0]
    token_rows, req_index, seq_lens = packed.token_rows.long(), packed.req_index.long(), packed.seq_lens.long()
    token_requests = req_index[token_rows]
    before_end = packed.query_start_loc[1:][token_rows] - torch.arange(num_tokens, device=token_rows.device)
    token_lens = seq_lens[token_rows]
    positions = torch.where(token_lens > 0, token_lens - before_end, 0)
    blocks = block_tables[:, token_requests, positions // block_size].long()
    is_known = packed.token_ids >= 0
    out.input_ids[:num_tokens] = torch.where(is_known, packed.token_ids.long(), last_token[token_requests])
    out.positions[:num_tokens] = positions
    out.slot_mappings[:, :num_tokens] = blocks * block_size + positions % block_size
    out.block_tables[:, :num_rows] = block_tables[:, req_index]
    sample_rows = packed.sample_rows.long()
    out.sample_req_index[:num_rows] = req_index[sample_rows]
    num_after = packed.query_start_loc[1:][sample_rows] - 1 - packed.sample_tokens
    out.sample_positions[:num_rows] = seq_lens[sample_rows] - num_after
    out.sample_tokens[:num_rows] = packed.sample_tokens
    num_computed[req_index] = seq_lens


@dataclass(frozen=True)
class DraftInputs:
    """The tensors about drafts that layers with states read (models.context.DraftRing): R rows, S sampled positions."""

    # [max_rows] int32: 0 for rows with drafts
    writes: torch.Tensor
    # [max_rows + 1] int32: first token to settle of each row; and [max_rows] int32: the request's tokens once they are
    # settled, 0: none of them
    settle_start_loc: torch.Tensor
    settle_lens: torch.Tensor
    # [max_rows * ring_size] int64: where the tokens to settle were kept; those after the last row's are any places
    source: torch.Tensor
    # [max_rows] int64: where the inputs of each sampled token are kept
    target: torch.Tensor

    @classmethod
    def allocate(cls, *, max_rows: int, ring_size: int, device: torch.device) -> DraftInputs:
        """Allocate zeros: valid places everywhere, also before the first step."""
        return cls(
            writes=torch.zeros(max_rows, dtype=torch.int32, device=device),
            settle_start_loc=torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            settle_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            source=torch.zeros(max_rows * ring_size, dtype=torch.int64, device=device),
            target=torch.zeros(max_rows, dtype=torch.int64, device=device),
        )


def gather_draft_inputs(
    ring_start: torch.Tensor, packed: PackedInputs, *, ring_size: int, padding_row: int, out: DraftInputs
) -> None:
    """Fill out for the R rows of packed, and set ring_start of their requests.

    ring_start: [rows] int32, the position of the first token that is kept of each request, -1: none. A row that starts
    behind it settles the tokens in between. A row with drafts keeps its tokens, at most ring_size, which are all
    sampled; after other rows nothing is kept.
    """
    assert packed.num_drafts is not None
    num_rows = packed.req_index.shape[0]
    req_index, is_drafted = packed.req_index.long(), packed.num_drafts > 0
    starts, kept = packed.seq_lens - packed.query_start_loc.diff(), ring_start[req_index]
    is_due = (packed.seq_lens > 0) & (kept >= 0)
    counts = torch.where(is_due, starts - kept, 0).clamp(0, ring_size)
    ends = counts.cumsum(0)
    out.writes[:num_rows] = ~is_drafted
    out.settle_start_loc[1 : num_rows + 1] = ends
    out.settle_lens[:num_rows] = torch.where(counts > 0, starts, 0)
    places = torch.arange(num_rows * ring_size, device=ends.device)
    rows = torch.searchsorted(ends, places, right=True).clamp(max=num_rows - 1)
    source = req_index[rows] * ring_size + places - (ends - counts)[rows]
    out.source[: len(places)] = torch.where(places < ends[-1], source, 0)
    sample_rows = packed.sample_rows.long()
    target = req_index[sample_rows] * ring_size + packed.sample_tokens - packed.query_start_loc[sample_rows]
    out.target[:num_rows] = torch.where(is_drafted[sample_rows], target, padding_row * ring_size)
    ring_start[req_index] = torch.where(is_drafted, starts, -1)


def _zero_slots(num_tables: int, count: int, device: torch.device) -> torch.Tensor:
    """Return zeros [num_tables, count rounded up] int64: each table's slots are aligned, see _mixed_sections."""
    return torch.zeros(num_tables, (count + 15) // 16 * 16, dtype=torch.int64, device=device)
