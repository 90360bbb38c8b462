# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twin of kernels/all_reduce/reference.py: a one-shot all-reduce over one host's GPUs for decode steps.

The norm after the sum is fused into the same kernel.

Each GPU writes its part into an inbox in every GPU's memory (16-byte stores over NVLink), polls its own inbox until all
parts have arrived, and adds them in rank order, so that every rank gets the same bits. Flags would cost two more
transfers. Instead, an empty inbox is full of negative zeros; a part contains none (they are sent as zeros, which does
not change a sum), and the reader restores the negative zeros. A value that is not a negative zero has therefore
arrived. Each 16-bit value is checked by itself, so the hardware may tear or reorder stores. The method follows the
low-latency protocols of NCCL ("LL") and TensorRT-LLM ("Lamport"), with two inboxes instead of the latter's three.

**Two inboxes are enough.** Program p of every launch owns the rows r with r % num_programs == p, on all ranks, and is
an independent channel: it keeps the index of its next inbox in device memory, so that replays of a graph count too. A
launch too small to have a program p is no turn for p. Let rank A's p begin turn t + 2, which writes at B where turn t
wrote. Its turn t + 1 is complete, so it has seen B's part of turn t + 1. B sent that after its own turn t was
complete, because a launch touches nothing before the previous launch in the stream has ended with all its writes. So B
has read turn t and restored the negative zeros. One inbox is not enough: A ends turn t when B's part has arrived, which
does not show that B has read A's part.

**Memory order.** No value announces another, so there is nothing to release or acquire: each value is its own signal,
and only the order of accesses to one location counts (PTX's axiom of coherence; a vector access is several of 32 bits,
in any order). That needs accesses that are strong at system scope on both sides. Loads are ld.volatile, which is
ld.relaxed.sys. Stores are st.global.wt: weak by PTX's letter, but Triton 3.6 has no stronger store, and its inline
assembly no say in how values share a vector. ptxas makes the same instruction of it as of st.relaxed.sys,
STG.E.128.STRONG.SYS; tests/unit/kernels/test_one_shot_all_reduce_compiled.py compares them. The negative zeros that B
restores in turn t are plain stores to B's own memory. They are there when B's launch ends, so before B sends in turn
t + 1, which A sees before it writes to the same places in turn t + 2.

**No deadlock.** A program sends all its rows before it waits. A launch has at most num_programs programs, no more than
any of the GPUs has multiprocessors. Each program fits an empty multiprocessor, so all become resident. Kernels that
run beside them do not wait for them while occupying their space: a kernel launched early under this one (pdl) starts
after all programs have begun. Every rank must make the same calls in the same order, on one stream. A program whose
parts do not arrive within minutes stops its GPU with an assertion, which ends the process: a rank that waits for
another that is lost would occupy its GPU without end and without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MAX_ROWS = 256
# Bytes that a rank sends to all others together in one sum: for more, NCCL's rings move less data
MAX_PUSHED_BYTES = 2 << 20
# A poll takes at least half a microsecond, so this is a minute at least: another rank may compile kernels meanwhile
_MAX_POLLS = tl.constexpr(1 << 27)
_EMPTY = tl.constexpr(-(1 << 15))  # the bits of a negative zero, in bf16 as in fp16
_VALUE_BYTES = 2
_ALIGNED = 8  # values in 16 bytes
_DTYPES = (torch.bfloat16, torch.float16)


def inbox_shape(*, num_ranks: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of a rank's inbox, int16: [2 turns, sending rank, row, column of at most `width`]."""
    return 2, num_ranks, MAX_ROWS, width


def clear_inbox(inbox: torch.Tensor) -> None:
    """Fill an inbox with negative zeros, once, before any rank sends."""
    inbox.fill_(_EMPTY.value)


class TritonOneShotAllReduce:
    """All-reduce over this rank and its peers. Owns the counts of turns.

    inboxes: every rank's, mapped into this process, in rank order; see inbox_shape, clear_inbox. memory: an object
    that keeps them allocated. num_programs: at most the multiprocessors of any rank's GPU; it and max_pushed_bytes are
    the same on every rank.
    """

    def __init__(
        self,
        inboxes: Sequence[torch.Tensor],
        *,
        memory: object,
        rank: int,
        width: int,
        num_programs: int,
        device: torch.device,
        max_pushed_bytes: int = MAX_PUSHED_BYTES,
        pdl: bool = False,
    ) -> None:
        assert width % _ALIGNED == 0
        self._inboxes = list(inboxes)
        self._memory = memory
        self._rank = rank
        self._width = width
        self._num_programs = num_programs
        self._max_bytes = max_pushed_bytes // max(1, len(inboxes) - 1)
        self._pdl = pdl
        # [ranks] int64: offset of each inbox from this rank's own, in values; the kernel knows the alignment of its own
        steps = [(inbox.data_ptr() - inboxes[rank].data_ptr()) // _VALUE_BYTES for inbox in inboxes]
        self._steps = torch.tensor(steps, dtype=torch.int64, device=device)
        # [num_programs] int32: the inbox of each program's next turn, 0 or 1
        self._turns = torch.zeros(num_programs, dtype=torch.int32, device=device)

    def takes(self, x: torch.Tensor) -> bool:
        """Return True if this object can reduce x. Uses host-side facts only, which are the same on every rank."""
        return (
            x.dtype in _DTYPES
            and x.dim() == 2
            and 0 < x.shape[0] <= MAX_ROWS
            and 0 < x.shape[1] <= self._width
            and x.shape[1] % _ALIGNED == 0
            and x.nbytes <= self._max_bytes
            and x.is_contiguous()
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Apply reference.sum_parts to every rank's x in place; return x. Needs takes(x). Does not sync; graph-safe."""
        self._launch(x, None, None, 0.0, x, None)
        return x

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply reference.sum_add_rms_norm to every rank's x: (normed, new_residual), both new. Requires takes(x).

        residual: [T, D] of x's dtype, last dimension dense. Does not sync; graph-safe.
        """
        normed, new_residual = torch.empty_like(x), torch.empty_like(x)
        self._launch(x, residual, weight, eps, normed, new_residual)
        return normed, new_residual

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        new_residual: torch.Tensor | None,
    ) -> None:
        num_rows, size = x.shape
        block = triton.next_power_of_2(size)
        _one_shot_kernel[(min(num_rows, self._num_programs),)](
            x.view(torch.int16), residual, weight, out, new_residual,
            self._inboxes[self._rank], self._steps, self._turns, self._rank,
            num_rows, 0 if residual is None else residual.stride(0), eps,
            SIZE=size, BLOCK=block, WIDTH=self._width, MAX_ROWS=MAX_ROWS, NUM_RANKS=len(self._inboxes),
            HAS_NORM=residual is not None, PDL=self._pdl,
            # One 16-byte vector per thread, if there are enough threads
            num_warps=min(32, max(1, block // 256)), launch_pdl=self._pdl,
            debug=True, sanitize_overflow=False,  # keep the assertion in _receive, and add no other
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "num_rows"])  # one kernel for all ranks and row counts
def _one_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, inbox_ptr, steps_ptr, turns_ptr,
    rank, num_rows, stride_residual, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MAX_ROWS: tl.constexpr, NUM_RANKS: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Rows p, p + num_programs, ... of program p: send all, then sum and normalise one after another."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0) if HAS_NORM else columns
    steps = ()  # type: tuple[tl.tensor, ...]
    for offset in tl.static_range(1, NUM_RANKS + 1):  # itself last; every rank starts with another peer
        steps += (tl.load(steps_ptr + (rank + offset) % NUM_RANKS),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn = tl.load(turns_ptr + program)
    for row in range(program, num_rows, num_programs):
        part = tl.load(x_ptr + row * SIZE + columns, mask=mask, other=0)
        part = tl.where(part == _EMPTY, 0, part).to(tl.int16)
        place = ((turn * NUM_RANKS + rank) * MAX_ROWS + row) * WIDTH
        for peer in tl.static_range(NUM_RANKS):
            there = tl.multiple_of(steps[peer], 8)
            tl.store(inbox_ptr + there + place + columns, part, mask=mask, cache_modifier=".wt")
    for row in range(program, num_rows, num_programs):
        residual = (
            tl.load(residual_ptr + row * stride_residual + columns, mask=mask, other=0.0) if HAS_NORM else columns
        )
        parts = inbox_ptr + (turn * NUM_RANKS * MAX_ROWS + row) * WIDTH + columns
        total = _receive(parts, mask, out_ptr.dtype.element_ty, BLOCK, MAX_ROWS * WIDTH, NUM_RANKS)
        tl.debug_barrier()  # every thread has read what any thread is about to clear
        for source in tl.static_range(NUM_RANKS):
            tl.store(parts + source * MAX_ROWS * WIDTH, tl.full([BLOCK], _EMPTY, tl.int16), mask=mask)
        x = total.to(out_ptr.dtype.element_ty)
        if HAS_NORM:  # as kernels.elementwise.triton.add_rms_norm
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + row * SIZE + columns, x, mask=mask)
            x_fp32 = x.to(tl.float32)
            inverse_rms = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 0) / SIZE + eps)
            normed = (x_fp32 * inverse_rms).to(weight.dtype)
            x = (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype)
        tl.store(out_ptr + row * SIZE + columns, x, mask=mask)
    tl.store(turns_ptr + program, 1 - turn)


@triton.jit
def _receive(
    parts, mask, dtype: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, NUM_RANKS: tl.constexpr
):  # fmt: skip
    """Read one row of every rank at once, repeatedly until no value is missing; return the fp32 sum in rank order."""
    total = tl.zeros([BLOCK], tl.float32)
    num_holes, num_polls = 1, 0
    while num_polls < _MAX_POLLS:
        total = tl.zeros([BLOCK], tl.float32)
        is_hole = tl.zeros([BLOCK], tl.int32)
        for source in tl.static_range(NUM_RANKS):
            part = tl.load(parts + source * STRIDE, mask=mask, other=0, volatile=True)
            is_hole |= (part == _EMPTY).to(tl.int32)
            total += part.to(dtype, bitcast=True).to(tl.float32)
        num_holes = tl.max(is_hole, 0)
        num_polls = tl.where(num_holes > 0, num_polls + 1, _MAX_POLLS)
    tl.device_assert(num_holes == 0, "a rank's part of a sum did not arrive")
    return total
