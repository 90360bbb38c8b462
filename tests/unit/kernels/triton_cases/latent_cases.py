"""Latent attention's kernels against their torch specifications, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_prefill import prefill_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise.reference import FP8, norm_rope_write_latent
from kernels.elementwise.triton_latent import norm_rope_write_latent as twin
from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # see elementwise_cases.py


def _run(norm_rope_write, inputs, cache, **options):
    latent, q, weight, positions, cos_sin_cache, slots = inputs
    rope_dim = latent.shape[1] - weight.shape[0]
    # views, as the projections' outputs are
    return norm_rope_write(
        latent, q[..., -rope_dim:], weight, 1e-6, positions, cos_sin_cache, cache, slots, **options
    )  # fmt: skip


def _inputs(num_tokens, num_heads, rank, rope_dim, dtype, *, table=None):
    latent = torch.randn(num_tokens, 5 + rank + rope_dim).to(dtype)[:, 5:]
    q = torch.randn(num_tokens, num_heads, 7 + rope_dim).to(dtype)
    weight, positions = torch.randn(rank).to(dtype), torch.randint(0, 50, (num_tokens,))
    cos_sin_cache = torch.randn(50, rope_dim).to(table or dtype)
    return latent, q, weight, positions, cos_sin_cache, torch.randperm(8 * 16)[:num_tokens]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("table", [None, torch.float32])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "rank", "rope_dim"), [(3, 16, 64, 16), (5, 3, 12, 6), (1, 9, 5, 2)]
)
def test_norm_rope_write_latent_equals_its_specification(
    num_tokens, num_heads, rank, rope_dim, is_interleaved, table, dtype
):
    inputs = _inputs(num_tokens, num_heads, rank, rope_dim, dtype, table=table)
    # Units with a rest between them
    mine = torch.full((8, 16 * (rank + rope_dim) + 3), 7.0, dtype=dtype)
    theirs = mine.clone()
    caches = [pool[:, :-3].unflatten(1, (16, 1, -1)) for pool in (mine, theirs)]
    q = _run(twin, inputs, caches[0], is_interleaved=is_interleaved)
    expected = _run(norm_rope_write_latent, inputs, caches[1], is_interleaved=is_interleaved)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(q, expected, **tolerance)
    torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_without_positions_queries_and_keys_are_kept_as_they_are(dtype):
    """The table of a layer without positions is one row for all."""
    latent, q, weight, positions, _, slots = _inputs(6, 9, 16, 8, dtype)
    no_turn = torch.cat((torch.ones(1, 4), torch.zeros(1, 4)), -1).to(dtype).expand(50, -1)
    cache = torch.zeros(8, 16, 1, 24, dtype=dtype)
    kept = _run(twin, (latent, q, weight, positions, no_turn, slots), cache)
    assert torch.equal(kept, q[..., -8:])
    assert torch.equal(cache.flatten(0, 2)[slots, 16:], latent[:, 16:])


def test_an_fp8_cache_holds_the_numbers_divided_by_its_scale():
    """Exact where the numbers are fp8's: of the latents the interpreter rounds some to half (fp8_cases.py)."""
    latent, q, weight, positions, _, slots = _inputs(6, 4, 16, 8, torch.float32)
    latent[:, 16:] = 0.25 * latent[:, 16:].to(FP8).float()
    no_turn = torch.cat((torch.ones(50, 4), torch.zeros(50, 4)), -1)
    caches = [torch.zeros(8, 16, 1, 24, dtype=FP8) for _ in range(2)]
    for norm_rope_write, cache in zip((twin, norm_rope_write_latent), caches, strict=True):
        inputs = (latent, q, weight, positions, no_turn, slots)
        _run(norm_rope_write, inputs, cache, scale=0.25, is_interleaved=True)
    mine, theirs = (cache.float() for cache in caches)
    assert theirs.abs().max() > 4
    assert torch.equal(mine[..., 16:], theirs[..., 16:])
    torch.testing.assert_close(mine[..., :16], theirs[..., :16], rtol=0.55, atol=0.02)


@pytest.mark.parametrize("num_heads", [16, 20])
@pytest.mark.parametrize("is_decode", [True, False])
def test_attention_reads_values_in_the_keys(num_heads, is_decode):
    query_lens, context_lens = ([1, 1], [40, 3]) if is_decode else ([9, 20], [5, 0])
    q, keys, _, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=1, head_dim=72,
        block_size=16, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    values = keys[..., :64]
    out = torch.full((*q.shape[:2], 64), torch.nan)
    if is_decode:
        scratch = DecodeScratch.allocate(num_heads=num_heads, num_kv_heads=1, head_dim=64, device=torch.device("cpu"))
        decode_attention(q, keys, values, metadata.block_table, metadata.seq_lens, out, scratch, scale=0.1)
    else:
        prefill_attention(
            q, keys, values, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, out, scale=0.1,
            max_query_len=max(query_lens),
        )  # fmt: skip
    assert relative_error(out, reference(q, keys, values, metadata, scale=0.1)) < 1e-5
