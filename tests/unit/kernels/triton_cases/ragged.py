"""Random ragged attention problems, shared by the interpreter's cases and the GPU tests."""

from __future__ import annotations

import math

import torch

from kernels.attention.base import AttentionMetadata
from kernels.elementwise.reference import INT8, to_fp8, to_int8


def make_problem(
    *,
    query_lens: list[int],
    context_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    masked: float = float("nan"),
    sliding_window: int | None = None,
    chunk: int | None = None,
    least_blocks: int = 0,
    value_dim: int | None = None,
    padding: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]:
    """q, k_cache, v_cache and metadata of rows with those lengths, blocks shuffled over the pool.

    Every slot that no query sees holds `masked`: those that no row owns, and those behind a window or chunk. A kernel
    that counts one shows it. The table's columns behind all windows are stale: they name a block that no row owns.
    Decode rows must come first. least_blocks: of the pool; rows use its last blocks. padding: numbers, all `masked`,
    between two blocks of a cache.
    """
    generator = torch.Generator(device).manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    blocks_per_row = [-(-n // block_size) for n in seq_lens]
    num_used = sum(blocks_per_row) + 3
    num_blocks = max(num_used, least_blocks)
    order = torch.randperm(num_used, generator=torch.Generator().manual_seed(seed)) + num_blocks - num_used
    order = order.tolist()
    like = {"dtype": dtype, "device": device}
    k_cache = _masked_cache((num_blocks, block_size, num_kv_heads, head_dim), masked, padding, **like)
    v_cache = _masked_cache((num_blocks, block_size, num_kv_heads, value_dim or head_dim), masked, padding, **like)
    table = torch.full((len(seq_lens), max(blocks_per_row) + 1), order[-1], dtype=torch.int32)
    for row, (seq_len, count) in enumerate(zip(seq_lens, blocks_per_row, strict=True)):
        owned, order = order[:count], order[count:]
        table[row, :count] = torch.tensor(owned, dtype=torch.int32)
        first_seen = _first_seen(context_lens[row], sliding_window, chunk)
        table[row, : first_seen // block_size] = order[-1]
        for index, block in enumerate(owned):
            used = min(block_size, seq_len - index * block_size)
            num_hidden = max(0, first_seen - index * block_size)
            for cache in (k_cache, v_cache):
                numbers = torch.randn(used, *cache.shape[2:], generator=generator, device=device)
                cache[block, :used] = numbers.to(dtype)
                cache[block, :num_hidden] = masked
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator, device=device).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    num_decodes = next((row for row, n in enumerate(query_lens) if n != 1), len(query_lens))
    metadata = AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=num_decodes,
    )
    return q, k_cache, v_cache, metadata


def _masked_cache(shape, masked, padding, **like):
    """A cache whose blocks have `padding` numbers between them."""
    size = math.prod(shape[1:])
    return torch.full((shape[0], size + padding), masked, **like)[:, :size].unflatten(1, shape[1:])


def _first_seen(position: int, sliding_window: int | None, chunk: int | None) -> int:
    """The first key that a query at that position sees."""
    if chunk is not None:
        return position // chunk * chunk
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float,
) -> torch.Tensor:
    """Attention row by row in float64 on the inputs' device. Returns [T, H, Dv] float64."""
    out = torch.zeros(*q.shape[:2], v_cache.shape[3], dtype=torch.float64, device=q.device)
    starts = metadata.query_start_loc.tolist()
    group = q.shape[1] // k_cache.shape[2]
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if seq_len == 0 or start == end:
            continue
        blocks = metadata.block_table[row, : -(-seq_len // k_cache.shape[1])].long()
        k, v = (c[blocks].flatten(0, 1)[:seq_len].double() for c in (k_cache, v_cache))
        queries = q[start:end].double().unflatten(1, (-1, group))
        logits = torch.einsum("qngd,knd->ngqk", queries, k).flatten(0, 1) * scale
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        first_seen = _first_seen(seq_len - (end - start), sliding_window, chunk)
        logits[..., :first_seen], v[:first_seen] = 0, 0  # what no query sees may be NaN
        positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        keys = torch.arange(seq_len, device=q.device)[None, :]
        visible = keys <= positions
        if sliding_window is not None:
            visible &= keys > positions - sliding_window
        if chunk is not None:
            visible &= keys // chunk == positions // chunk
        logits = logits.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            logits = torch.cat((sinks.double()[:, None, None].expand(-1, end - start, 1), logits), -1)
        weights = logits.softmax(-1)[..., -seq_len:].unflatten(0, (-1, group))
        out[start:end] = torch.einsum("ngqk,knd->qngd", weights, v).flatten(1, 2)
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; NaN if any element is NaN."""
    return float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def as_fp8(cache: torch.Tensor, scale: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache in fp8, and what that stands for in float64; slots that no row owns stay NaN. scale: or [heads]."""
    pool = to_fp8(cache, scale)
    return pool, pool.float().double() * (scale[:, None] if isinstance(scale, torch.Tensor) else scale)


def empty_int8(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, device: str = "cpu", widest: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 cache of zeros and the view of its scales, which lie behind the numbers of each block, by head.

    widest: head size for which blocks have room, if that is larger.
    """
    num_heads, num_numbers = block_size * num_kv_heads, block_size * num_kv_heads * head_dim
    blocks = torch.zeros(num_blocks, num_heads * (max(head_dim, widest) + 4), dtype=INT8, device=device)
    numbers = blocks[:, :num_numbers].unflatten(1, (block_size, num_kv_heads, head_dim))
    scales = blocks[:, num_numbers : num_numbers + 4 * num_heads].view(torch.float32)
    return numbers, scales.unflatten(1, (num_kv_heads, block_size)).transpose(1, 2)


def as_int8(cache: torch.Tensor, *, widest: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache in int8, its scales, and what these stand for in float64; slots that no row owns stay NaN."""
    numbers, scales = empty_int8(*cache.shape, device=str(cache.device), widest=widest)
    rounded, its_scales = to_int8(cache)
    numbers.copy_(rounded)
    scales.copy_(its_scales)
    return numbers, scales, rounded.double() * its_scales.double()[..., None]
