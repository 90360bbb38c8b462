"""The functions in C on tensors. Each is called only with what its takes_… accepts, and while loaded() is there.

Specifications: kernels/elementwise/cpu.py, kernels/attention/torch_ref.py, kernels/linear/onednn.py and int4_cpu.py;
of run_layers the layers' own forward. Who fills a structure keeps the tensors whose addresses are in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.native.library import Library, loaded, products_level

_MAX_HEAD = 256  # rows.c: MAX_HEAD
_MAX_GROUP = 16  # rows.c: MAX_GROUP
BY_AMX = 2  # of products_level()
ANY_ROWS = 1 << 62  # as a bound of rows
_TILE_WORDS = 16  # products.c: TILE
_WORD_BYTES = 4
# of the product's x: it is read for each block of outputs, so it must stay in a core's second cache. Beyond, oneDNN's
# order is better
_MOST_TILED_BYTES = 2 << 20


_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
BF16, BYTES, INT4 = range(3)  # layers.c: kinds of matrices


class Matrix(ctypes.Structure):
    """A matrix as products.c reads it."""

    _fields_ = (
        ("kind", _N), ("w", _P), ("bias", _P), ("scales", _P), ("sums", _P), ("n", _N), ("k", _N), ("width", _N),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """A decoder layer with its part of the pool."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _P) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "turns", "k_cache", "v_cache")),
        *(
            (name, _N)
            for name in (
                "heads", "kv_heads", "dim", "block_size", "k_block", "k_slot", "v_block", "v_slot", "wide_turns",
                "window", "chunk", "table",
            )
        ),
        *((name, _F) for name in ("attention_eps", "mlp_eps", "head_eps", "scale")),
    )  # fmt: skip


class Table(ctypes.Structure):
    """Rows of a block table: slots [R] int64, lengths [R] int32, blocks [R, width] int32."""

    _fields_ = (("slots", _P), ("lengths", _P), ("blocks", _P), ("width", _N))


class _Step(ctypes.Structure):
    _fields_ = (("rows", _N), ("hidden", _N), ("layers", _N), ("longest", _N), ("least", _F))


def takes_rows(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return True if the library is loaded and these are dense bf16 tensors on the CPU, not empty."""
    is_served = loaded() is not None and x.is_cpu and _is_dense(x) and x.numel() > 0
    return is_served and all(map(_is_dense, others))


def takes_rope(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> bool:
    """Return True if norm_rope_write_kv computes these: whole heads turn, and keys are as long as values."""
    head_dim = k_cache.shape[3]
    given = [weight for weight in weights if weight is not None]
    is_whole = cos_sin_cache.shape[1] == head_dim <= _MAX_HEAD and head_dim % 2 == 0 and k_cache.shape == v_cache.shape
    is_dense = cos_sin_cache.is_contiguous() and cos_sin_cache.dtype in (torch.bfloat16, torch.float32)
    return is_whole and is_dense and _has_dense_tokens(k_cache, v_cache) and takes_rows(qkv, *given)


def takes_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return True if attend computes queries [N, H, D] over this pool."""
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    is_small = max(k_cache.shape[3], v_cache.shape[3]) <= _MAX_HEAD and heads <= kv_heads * _MAX_GROUP
    return is_small and _has_dense_tokens(k_cache, v_cache) and takes_rows(q)


def takes_prompts(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return True if attend_prompts computes queries [N, H, D] over this pool, and is the fastest: without AMX."""
    is_level = 0 < products_level() < BY_AMX
    return is_level and q.shape[2] % 2 == 0 and takes_attention(q, k_cache, v_cache)


def takes_products(x: torch.Tensor, bias: torch.Tensor | None, *, few_rows: int, word_inputs: int) -> bool:
    """Return True if the products of products.c take x, [T, K], and are the fastest.

    few_rows: most rows without AMX. word_inputs: inputs in 32 bits of the product.
    """
    num_rows, k = x.shape
    if not 0 < num_rows <= few_rows:
        is_tiled = products_level() == BY_AMX and k % (_TILE_WORDS * word_inputs) == 0
        if not is_tiled or num_rows * k * _WORD_BYTES > _MOST_TILED_BYTES * word_inputs:
            return False
    return products_level() > 0 and takes_rows(x, *(() if bias is None else (bias,)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.elementwise.reference.rms_norm."""
    out, dim = torch.empty_like(x), x.shape[-1]
    _library().rms_norm(
        x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None, x.numel() // dim, dim, eps,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.elementwise.reference.add_rms_norm."""
    out, total, dim = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    _library().rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
        x.numel() // dim, dim, eps,
    )  # fmt: skip
    return out, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See kernels.elementwise.reference.silu_and_mul."""
    num_rows, dim = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_rows, dim)
    _library().silu_and_mul(x.data_ptr(), out.data_ptr(), num_rows, dim)
    return out


def norm_rope_write_kv(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
) -> torch.Tensor:
    """See kernels.elementwise.reference.norm_rope_write_kv."""
    num_rows, (block_size, num_kv_heads, head_dim) = qkv.shape[0], k_cache.shape[1:]
    positions, slot_mapping = positions.long().contiguous(), slot_mapping.long().contiguous()
    q = qkv.new_empty(num_rows, num_heads, head_dim)
    _library().norm_rope_write_kv(
        qkv.data_ptr(), _pointer(q_weight), _pointer(k_weight), positions.data_ptr(), slot_mapping.data_ptr(),
        cos_sin_cache.data_ptr(), q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), num_rows, num_heads,
        num_kv_heads, head_dim, block_size, k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        cos_sin_cache.dtype == torch.float32, eps,
    )  # fmt: skip
    return q


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    chunk: int | None,
    max_seq_len: int,
) -> None:
    """Write the attention of rows of one token, the first N of q and out, [T, H, D]; seq_lens: [N].

    out is dense; block_table: [N, max_blocks].
    """
    (num_heads, head_dim), (block_size, num_kv_heads), num_rows = q.shape[1:], k_cache.shape[1:3], seq_lens.shape[0]
    seq_lens, block_table = seq_lens.int().contiguous(), block_table.int().contiguous()
    _library().attend(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), seq_lens.data_ptr(),
        block_table.data_ptr(), num_rows, num_heads, num_kv_heads, head_dim, v_cache.shape[3], block_table.shape[1],
        block_size, k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), sliding_window or 0,
        chunk or 0, max_seq_len, scale,
    )  # fmt: skip


def attend_prompts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    sliding_window: int | None,
    chunk: int | None,
    softcap: float,
    max_seq_len: int,
) -> None:
    """Write the attention of N rows of any number of tokens, each its row's last, to their places in out, [T, H, D].

    out is dense; query_start_loc: [N + 1], of tokens in q; seq_lens: [N], 0 gives zeros; block_table: [N, max_blocks];
    sinks: [H] or None. See AttentionBackend.forward.
    """
    (num_heads, head_dim), (block_size, num_kv_heads), num_rows = q.shape[1:], k_cache.shape[1:3], seq_lens.shape[0]
    starts, seq_lens = query_start_loc.int().contiguous(), seq_lens.int().contiguous()
    block_table = block_table.int().contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    _library().attend_prompts(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), starts.data_ptr(), seq_lens.data_ptr(),
        block_table.data_ptr(), _pointer(sinks), num_rows, num_heads, num_kv_heads, head_dim, v_cache.shape[3],
        block_table.shape[1], block_size, k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        sliding_window or 0, chunk or 0, max_seq_len, scale, softcap,
    )  # fmt: skip


def quantize_rows(x: torch.Tensor, *, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, [T, K], rounded by row to integers + 128, uint8, and the rows' scales, [T, 1] fp32, `least` or more."""
    values, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0], 1)
    _library().quantize_rows(x.data_ptr(), values.data_ptr(), scales.data_ptr(), x.shape[0], x.shape[1], least)
    return values, scales


def scale_sums(sums: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return sums * scales + bias in bf16. sums: [T, N] fp32, dense; scales: [T, 1] fp32; bias: [N] bf16 or None."""
    out = torch.empty(sums.shape, dtype=torch.bfloat16)
    _library().scale_sums(
        sums.data_ptr(), scales.data_ptr(), _pointer(bias), out.data_ptr(), sums.shape[0], sums.shape[1]
    )
    return out


def bf16_linear(x: torch.Tensor, w: int, bias: torch.Tensor | None, n: int, width: int) -> torch.Tensor:
    """Return x @ w.T + bias, [T, n]. x: [T, K]; w: address of [n / width, K / 2, width, 2]; bias: [n] or None."""
    num_rows, k = x.shape
    out = x.new_empty(num_rows, n)
    _library().bf16_linear(x.data_ptr(), w, _pointer(bias), out.data_ptr(), num_rows, n, k, width)
    return out


def int8_linear(
    values: torch.Tensor,
    row_scales: torch.Tensor,
    w: int,
    scales: torch.Tensor,
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """Return the product of integers, scaled, [T, N] bf16.

    values: [T, K] uint8, + 128; row_scales: [T, 1] fp32; w: address of [N / width, K / 4, width, 4] int8; scales: [N]
    fp32; sums: [N] int32, of each output's weights; bias: [N] bf16 or None.
    """
    (num_rows, k), n = values.shape, scales.shape[0]
    out = torch.empty(num_rows, n, dtype=torch.bfloat16)
    _library().int8_linear(
        values.data_ptr(), w, _pointer(bias), out.data_ptr(), row_scales.data_ptr(),
        scales.data_ptr(), sums.data_ptr(), num_rows, n, k, width,
    )  # fmt: skip
    return out


def rounded_int8_linear(
    x: torch.Tensor,
    w: int,
    scales: torch.Tensor,
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    width: int,
    *,
    least: float,
) -> torch.Tensor:
    """Return int8_linear of quantize_rows(x), x being [T, K] bf16."""
    (num_rows, k), n = x.shape, scales.shape[0]
    out = x.new_empty(num_rows, n)
    scratch = torch.empty(num_rows * (k + 4), dtype=torch.uint8)  # scales, fp32, and values
    _library().rounded_int8_linear(
        x.data_ptr(), w, _pointer(bias), out.data_ptr(), scratch.data_ptr() + 4 * num_rows, scratch.data_ptr(),
        scales.data_ptr(), sums.data_ptr(), num_rows, n, k, width, least,
    )  # fmt: skip
    return out


def int4_linear(
    x: torch.Tensor, packed: torch.Tensor, scales_zeros: torch.Tensor, bias: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """Return x @ w.T + bias, [T, N] bf16. packed, scales_zeros: of an Int4Matrix in blocks of 64 outputs."""
    (num_rows, k), n = x.shape, packed.shape[0]
    out = x.new_empty(num_rows, n)
    _library().int4_linear(
        x.data_ptr(), packed.data_ptr(), scales_zeros.data_ptr(), _pointer(bias), out.data_ptr(), num_rows, n, k,
        group_size,
    )  # fmt: skip
    return out


def run_layers(
    layers: ctypes.Array[Layer],
    tables: Sequence[Table],
    positions: torch.Tensor,
    hidden: torch.Tensor,
    *,
    longest: int,
    least: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the last layer adds, and the residual stream it is added to, [R, hidden_size] each.

    tables: by Layer.table. positions: [R] int64. hidden: [R, hidden_size] bf16, dense, the embedded tokens. longest: a
    bound of the tables' lengths. least: of the scales of rounded rows.
    """
    library = _library()
    num_rows, size = hidden.shape
    hidden, residual = hidden.clone(), torch.empty_like(hidden)
    step = _Step(num_rows, size, len(layers), longest, least)
    scratch = torch.empty(library.layers_scratch(layers, len(layers), num_rows, size), dtype=torch.uint8)
    library.run_layers(
        ctypes.addressof(layers), (Table * len(tables))(*tables), ctypes.addressof(step), positions.data_ptr(),
        hidden.data_ptr(), residual.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    return hidden, residual


def unpack_int4(packed: torch.Tensor, scales_zeros: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [K, N] bf16 of an Int4Matrix in blocks of 64 outputs (kernels/linear/int4_cpu.py)."""
    num_outputs, num_inputs = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty(num_inputs, num_outputs, dtype=torch.bfloat16)
    _library().unpack_int4(
        packed.data_ptr(), scales_zeros.data_ptr(), out.data_ptr(), num_outputs, num_inputs, group_size
    )  # fmt: skip
    return out


def _is_dense(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_contiguous()


def _library() -> Library:
    library = loaded()
    assert library is not None
    return library


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _has_dense_tokens(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return True if the heads of a token lie side by side in both caches, in bf16."""
    return all(
        cache.dtype == torch.bfloat16 and cache.stride(3) == 1 and cache.stride(2) == cache.shape[3]
        for cache in (k_cache, v_cache)
    )
