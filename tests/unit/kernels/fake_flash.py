"""flash-attn's two modules in plain torch: the same functions and parameters, and their refusals of bad arguments."""

from __future__ import annotations

from types import ModuleType

import torch

from kernels.attention.base import AttentionMetadata
from tests.unit.kernels.triton_cases.ragged import reference


def make_fa2(version: str = "2.8.3") -> ModuleType:
    """The package flash_attn."""
    module = ModuleType("flash_attn")
    module.__version__ = version
    module.flash_attn_varlen_func = _fa2_varlen
    module.flash_attn_with_kvcache = _fa2_with_kvcache
    return module


def make_fa3() -> ModuleType:
    """FlashAttention-3's flash_attn_interface."""
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = _fa3_with_kvcache
    return module


def _fa2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                return_attn_probs=False, block_table=None):  # fmt: skip
    assert k.shape[1] % 256 == 0
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (block_table.shape[0] + 1,)
    assert cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_k[0]) == 0
    assert int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()) <= max_seqlen_q
    seq_lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    assert int(seq_lens.max()) <= max_seqlen_k
    assert causal
    found = _attend(q, k, v, cu_seqlens_q, seq_lens, block_table, softmax_scale, window_size, softcap)
    return (*found, None) if return_attn_probs else found[0]


def _fa2_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                      cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                      window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                      return_softmax_lse=False):  # fmt: skip
    assert k_cache.shape[1] % 256 == 0
    assert q.shape[0] == cache_seqlens.shape[0] == block_table.shape[0]
    assert k is v is None
    starts = torch.arange(q.shape[0] + 1) * q.shape[1]
    out, lse = _attend(
        q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale, window_size, softcap
    )
    out = out.view(q.shape)
    return (out, lse.unflatten(1, q.shape[:2]).transpose(0, 1)) if return_softmax_lse else out


def _fa3_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                      cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                      cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
                      v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
                      softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
                      sm_margin=0, return_softmax_lse=False):  # fmt: skip
    assert cu_seqlens_q.shape[0] == page_table.shape[0] + 1
    assert int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()) <= max_seqlen_q
    assert k is v is None
    assert causal
    found = _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap)
    return found if return_softmax_lse else found[0]


def _attend(q, k_cache, v_cache, starts, seq_lens, block_table, scale, window_size, softcap):
    """The output, and the logarithm of each softmax's denominator [H, T] fp32: infinite for a query without keys."""
    assert seq_lens.dtype == block_table.dtype == torch.int32
    assert window_size[1] == 0 or window_size == (-1, -1)
    metadata = AttentionMetadata(starts, seq_lens, block_table, starts, 0, 0, None)
    window = None if window_size[0] < 0 else window_size[0] + 1
    options = {"sliding_window": window, "softcap": softcap, "scale": scale}
    out = reference(q, k_cache, v_cache, metadata, **options).to(q.dtype)
    # With a sink of 0 and values of 1, the output is Z / (Z + 1), where Z is the denominator
    share = reference(q, k_cache, torch.ones_like(v_cache), metadata, sinks=torch.zeros(q.shape[1]), **options)
    lse = share[..., 0].T.logit()
    return out, lse.masked_fill(lse == -torch.inf, torch.inf).float()
