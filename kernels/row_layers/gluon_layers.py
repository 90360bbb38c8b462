# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""All decoder layers of one row in one kernel, whose programs stay and hand values to each other.

A layer of one row is five phases, and each needs what all programs made in the one before: products of queries, keys
and values | attention over a split of the keys | output product, of a part of the heads | gates and ups | down product.
Weights depend on nothing. So a program begins to copy its rows of them to shared memory up to a layer ahead, those of
the output product to L2, before it waits for the values that they are multiplied with (kernels/row_layers/exchange.py).

No word is overwritten early: a program begins a layer when it has the down product of all programs, and each of them
posts that after it has read everything else of its layer; the down product itself is read before the next gates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.row_layers.arithmetic import NUM_WARPS, VECTOR
from kernels.row_layers.exchange import fresh_zero, prefetch_bytes, prefetch_lines
from kernels.row_layers.phases import (
    UP_ROWS,
    attend_split,
    cut_keys,
    first_tiles,
    multiply_down,
    multiply_output,
    multiply_qkv,
    multiply_up,
    next_stream,
    receive_inner,
    stage_down,
    stage_qkv,
    stage_up,
)

_NUM_ADDRESSES = gl.constexpr(10)  # of a layer, as row_layers has them


@dataclass(frozen=True)
class LayerShape:
    """Sizes of every layer.

    programs: how many share a layer, at most one of each multiprocessor. All have equally many outputs of a product,
    gates in whole tiles of UP_ROWS, and all KV heads equally many programs. intermediate is a multiple of hidden.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    programs: int = 128
    output_parts: int = 8  # of the heads, whose output products are summed by who reads them

    @property
    def num_qkv(self) -> int:
        """Return the outputs of the first product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def splits(self) -> int:
        """Return the splits of a KV head's keys."""
        return self.programs // self.num_kv_heads

    def num_words(self) -> tuple[int, ...]:
        """Return the words of each kind: qkv, attention's parts, their logarithms, output parts, gated, down."""
        heads = self.splits * self.num_heads
        return (
            self.num_qkv, heads * self.head_dim, heads, self.output_parts * self.hidden, self.intermediate, self.hidden
        )  # fmt: skip


_MEASURED = (LayerShape(hidden=1024, num_heads=16, num_kv_heads=8, head_dim=128, intermediate=3072),)  # Qwen3-0.6B


@dataclass(frozen=True)
class RowScratch:
    """The words that programs hand to each other, and the epochs that have passed. One per stream."""

    words: torch.Tensor  # [sum of LayerShape.num_words()] int64, zeros at first
    epochs: torch.Tensor  # [1] int32

    @classmethod
    def allocate(cls, shape: LayerShape, device: torch.device) -> RowScratch:
        """Make the words of a shape's layers."""
        words = torch.zeros(sum(shape.num_words()), dtype=torch.int64, device=device)
        return cls(words, torch.zeros(1, dtype=torch.int32, device=device))


def is_measured(shape: LayerShape, device: torch.device) -> bool:
    """Return True if layers of this shape were measured to be faster so, on a device that holds all programs."""
    return shape in _MEASURED and torch.cuda.get_device_properties(device).multi_processor_count >= shape.programs


def row_layers(
    hidden: torch.Tensor,
    addresses: torch.Tensor,
    shape: LayerShape,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    scratch: RowScratch,
    *,
    scale: float,
    eps: float,
    head_eps: float,
    has_head_norms: bool,
    phase: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the last layer adds, and the residual stream before it, [1, hidden] bf16 each; writes all caches.

    hidden: [1, hidden], embedded; addresses: [num_layers, 10] int64, of bf16 tensors: norm, qkv, norms of query and
    key heads, output, norm, gates and ups, down, keys, values; k_cache: any layer's keys, for the strides that all
    caches share; block_table: [>= 1, max_blocks]; seq_lens: [>= 1]; positions, slot_mapping: [1]; cos_sin_cache:
    [max_positions, head_dim] bf16. phase: that phase alone, 0 to 4, for one layer: its programs wait for nothing.
    """
    out, residual = torch.empty_like(hidden), torch.empty_like(hidden)
    sizes = shape.num_words()
    words = [scratch.words[sum(sizes[:index]) :] for index in range(len(sizes))]
    options = {"launch_cooperative_grid": True} if phase is None else {}
    _layers_kernel[(shape.programs,)](
        hidden, out, residual, addresses, addresses.shape[0], block_table, seq_lens, positions, slot_mapping,
        cos_sin_cache, *words, scratch.epochs, *k_cache.stride()[:3], cos_sin_cache.stride(0),
        scale * math.log2(math.e), eps, head_eps,
        HIDDEN=shape.hidden, NUM_HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim,
        INTERMEDIATE=shape.intermediate, INNER_PAD=triton.next_power_of_2(shape.intermediate), PROGRAMS=shape.programs,
        NUM_PARTS=shape.output_parts, SPLITS=shape.splits,
        HEAD_ROWS=triton.next_power_of_2(shape.num_heads // shape.num_kv_heads + 2),
        BLOCK_SIZE=k_cache.shape[1], HAS_NORM=has_head_norms, PHASE=-1 if phase is None else phase,
        num_warps=NUM_WARPS, **options,
    )  # fmt: skip
    return out, residual


@jit(do_not_specialize=["num_layers"])
def _layers_kernel(
    hidden_ptr, out_ptr, residual_ptr, addresses_ptr, num_layers, table_ptr, seq_lens_ptr, positions_ptr,
    slots_ptr, cos_sin_ptr, qkv_words, parts_words, lse_words, output_words, gated_words, down_words, epochs_ptr,
    stride_block, stride_slot, stride_head, stride_position, scale, eps, head_eps,
    HIDDEN: gl.constexpr, NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    INTERMEDIATE: gl.constexpr, INNER_PAD: gl.constexpr, PROGRAMS: gl.constexpr, NUM_PARTS: gl.constexpr,
    SPLITS: gl.constexpr, HEAD_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HAS_NORM: gl.constexpr,
    PHASE: gl.constexpr,
) -> None:  # fmt: skip
    """One program's share of every phase. PHASE: -1: all of them; they then wait for each other."""
    ALL: gl.constexpr = PHASE == -1
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_DIM
    QKV_ROWS: gl.constexpr = (WIDTH + 2 * KV_HEADS * HEAD_DIM) // PROGRAMS
    UP_TILES: gl.constexpr = INTERMEDIATE // PROGRAMS // UP_ROWS
    DOWN_ROWS: gl.constexpr = HIDDEN // PROGRAMS
    first_epoch = gl.load(epochs_ptr) + 1
    x = gl.load(hidden_ptr + gl.arange(0, HIDDEN, VECTOR)).to(gl.float32)
    rows_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    qkv_rows = gl.allocate_shared_memory(gl.bfloat16, [QKV_ROWS, HIDDEN], rows_layout)
    up_rows = gl.allocate_shared_memory(gl.bfloat16, [2 * UP_TILES, UP_ROWS, HIDDEN], rows_layout)
    down_rows = gl.allocate_shared_memory(gl.bfloat16, [INTERMEDIATE // HIDDEN, DOWN_ROWS, HIDDEN], rows_layout)
    inner_row = gl.allocate_shared_memory(gl.bfloat16, [INNER_PAD], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    heads_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    turned_heads = gl.allocate_shared_memory(gl.float32, [HEAD_ROWS, HEAD_DIM], heads_layout)

    cut = cut_keys(gl.load(seq_lens_ptr) - 1, gl.program_id(0) % SPLITS, SPLITS)
    firsts = first_tiles(cut, table_ptr, stride_block, stride_slot, HEAD_DIM, BLOCK_SIZE)
    angles_ptr = cos_sin_ptr + gl.load(positions_ptr) * stride_position
    slot = gl.load(slots_ptr)
    pool = (table_ptr, stride_block, stride_slot,
            (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot)  # fmt: skip
    # Copies to shared memory are groups in this order: qkv of this layer, gates of this layer, down, qkv, gates, ...
    if ALL or PHASE == 0:
        stage_qkv(qkv_rows, _address(addresses_ptr, 1), gl.program_id(0), 0, HIDDEN, QKV_ROWS)
    async_copy.commit_group()
    if ALL or PHASE == 3:
        stage_up(up_rows, _address(addresses_ptr, 6), gl.program_id(0), 0, HIDDEN, INTERMEDIATE, UP_TILES)
    async_copy.commit_group()
    norm_ptr = _address(addresses_ptr, 0)

    for layer in range(num_layers):
        epoch = first_epoch + layer
        zero = fresh_zero() if ALL else 0
        program = gl.program_id(0) + zero
        kv_head = program // SPLITS
        row_ptr = addresses_ptr + layer * _NUM_ADDRESSES
        next_ptr = addresses_ptr + gl.minimum(layer + 1, num_layers - 1) * _NUM_ADDRESSES
        has_next = ALL and layer + 1 < num_layers
        # All at once, and the first one a layer ahead: who waits for an address waits with all that comes after it
        q_norm_ptr, k_norm_ptr, output_ptr = _address(row_ptr, 2), _address(row_ptr, 3), _address(row_ptr, 4)
        mlp_norm_ptr, down_ptr = _address(row_ptr, 5), _address(row_ptr, 7)
        k_ptr, v_ptr = _address(row_ptr, 8) + kv_head * stride_head, _address(row_ptr, 9) + kv_head * stride_head
        next_norm_ptr, next_qkv_ptr = _address(next_ptr, 0), _address(next_ptr, 1)
        next_output_ptr, next_up_ptr = _address(next_ptr, 4), _address(next_ptr, 6)
        next_k_ptr, next_v_ptr = _address(next_ptr, 8), _address(next_ptr, 9)

        x, weight = next_stream(x, norm_ptr, down_words, layer, epoch, zero, HIDDEN, ALL)
        if ALL or PHASE == 4:
            stage_down(down_rows, down_ptr, program, zero, HIDDEN, INTERMEDIATE, DOWN_ROWS)
        async_copy.commit_group()
        if ALL or PHASE == 0:
            multiply_qkv(x, weight, qkv_rows, qkv_words, program, epoch, eps, QKV_ROWS)
        if ALL or PHASE == 1:
            staging = (qkv_rows, next_qkv_ptr, has_next)
            if cut[3]:
                weights = (q_norm_ptr, k_norm_ptr, angles_ptr, scale, head_eps)
                attend_split(
                    cut, firsts, (k_ptr, v_ptr), pool, weights, staging, turned_heads,
                    (qkv_words, parts_words, lse_words), program, epoch, zero,
                    NUM_HEADS, KV_HEADS, HEAD_DIM, HEAD_ROWS, SPLITS, HIDDEN, QKV_ROWS, BLOCK_SIZE, HAS_NORM, ALL,
                )  # fmt: skip
            elif has_next:
                stage_qkv(qkv_rows, next_qkv_ptr, program, zero, HIDDEN, QKV_ROWS)
        async_copy.commit_group()
        if ALL or PHASE == 2:
            multiply_output(
                output_ptr, (parts_words, lse_words, output_words), cut[4], program, epoch, zero,
                HIDDEN, NUM_HEADS, HEAD_DIM, NUM_PARTS, SPLITS, PROGRAMS, ALL,
            )  # fmt: skip
        if ALL:
            _prefetch_share(next_output_ptr, program, WIDTH * HIDDEN, PROGRAMS)
            in_head = firsts[4] + kv_head * stride_head
            prefetch_lines(next_k_ptr + in_head, next_v_ptr + in_head)
        if ALL or PHASE == 3:
            x = multiply_up(
                x, mlp_norm_ptr, up_rows, (output_words, gated_words), residual_ptr, program, epoch, zero, eps,
                HIDDEN, NUM_PARTS, UP_TILES, ALL,
            )  # fmt: skip
        values = receive_inner(gated_words, epoch, zero, INTERMEDIATE, INNER_PAD, ALL)
        if has_next:
            stage_up(up_rows, next_up_ptr, program, zero, HIDDEN, INTERMEDIATE, UP_TILES)
        async_copy.commit_group()
        if ALL or PHASE == 4:
            multiply_down(
                values, inner_row, down_rows, down_words, out_ptr, program, epoch, HIDDEN, INTERMEDIATE, DOWN_ROWS
            )
        norm_ptr = next_norm_ptr
    # Only now: every program has read the number, for this one has had its last values
    if (ALL or PHASE == 4) and gl.program_id(0) == PROGRAMS - 1:
        gl.store(epochs_ptr, first_epoch + num_layers - 1)


@jit
def _address(row_ptr, INDEX: gl.constexpr):
    """Return a tensor's address from a row of the table, as a pointer to bf16, 16-byte aligned."""
    return gl.multiple_of(gl.load(row_ptr + INDEX).to(gl.pointer_type(gl.bfloat16)), 16)


@jit
def _prefetch_share(w_ptr, program, NUM_VALUES: gl.constexpr, PROGRAMS: gl.constexpr) -> None:
    """Ask L2 for one program's part of a matrix of bf16."""
    SHARE: gl.constexpr = NUM_VALUES // PROGRAMS
    prefetch_bytes(w_ptr + program * SHARE, SHARE * 2)
