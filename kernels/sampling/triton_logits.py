# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of kernels/sampling/reference.py's penalize and allow_only: a row's logits in one pass, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # tokens of one program


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    req_index: torch.Tensor,
    *,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Equal kernels.sampling.reference.penalize, bit for bit."""
    vocab_size = logits.shape[1]
    _penalize_kernel[(rows.shape[0], triton.cdiv(vocab_size, _BLOCK))](
        logits, rows, req_index, output_counts, in_prompt.view(torch.int8), presence, frequency, repetition,
        vocab_size, logits.stride(0), BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def allow_only(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Equal kernels.sampling.reference.allow_only."""
    vocab_size = logits.shape[1]
    _allow_kernel[(rows.shape[0], triton.cdiv(vocab_size, _BLOCK))](
        logits, rows, bitmask, vocab_size, logits.stride(0), bitmask.stride(0), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _penalize_kernel(
    logits_ptr, rows_ptr, req_index_ptr, counts_ptr, in_prompt_ptr, presence_ptr, frequency_ptr, repetition_ptr,
    vocab_size, stride_logits, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One part of one row."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    req_index = tl.load(req_index_ptr + tl.program_id(0)).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits + tokens, mask=mask, other=0.0)
    counts = tl.load(counts_ptr + req_index * vocab_size + tokens, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + req_index * vocab_size + tokens, mask=mask, other=0)
    has_output = counts > 0
    scale = tl.where(has_output | (in_prompt != 0), tl.load(repetition_ptr + req_index), 1.0)
    logits = tl.where(logits > 0, tl.math.div_rn(logits, scale), logits * scale)
    logits -= tl.load(frequency_ptr + req_index) * counts.to(tl.float32)
    logits -= tl.load(presence_ptr + req_index) * has_output.to(tl.float32)
    tl.store(logits_ptr + row * stride_logits + tokens, logits, mask=mask)


@triton.jit
def _allow_kernel(
    logits_ptr, rows_ptr, bitmask_ptr, vocab_size, stride_logits, stride_bitmask, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    """One part of one row. Writes only forbidden tokens."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    words = tl.load(bitmask_ptr + tl.program_id(0).to(tl.int64) * stride_bitmask + tokens // 32, mask=mask, other=-1)
    is_forbidden = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits_ptr + row * stride_logits + tokens, float("-inf"), mask=mask & is_forbidden)
