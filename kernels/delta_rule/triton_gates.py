# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of kernels/delta_rule/gates.py. Both are limited by memory; `pdl`: see kernels/elementwise/triton.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.delta_rule.gates import GateActivation

_NUM_VALUES = 1024  # of a program


def delta_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    max_beta: float = 1.0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal delta_gates of gates.py. a, b: each token's numbers dense; a_log, dt_bias: contiguous."""
    num_tokens, num_heads = b.shape
    per_head = a.shape[2] if a.dim() == 3 else 1
    assert a.stride()[1:] == ((per_head, 1) if a.dim() == 3 else (1,))
    assert b.stride(1) == 1
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(b.shape, dtype=torch.float32, device=b.device)
    block = min(_NUM_VALUES, triton.next_power_of_2(num_heads * per_head))
    tile = max(1, min(_NUM_VALUES // block, triton.next_power_of_2(num_tokens)))
    _gates_kernel[(triton.cdiv(num_tokens, tile), triton.cdiv(num_heads * per_head, block))](
        a, b, a_log, dt_bias, g, beta, a.stride(0), b.stride(0), num_tokens, max_beta,
        NUM_HEADS=num_heads, HEADS_PAD=triton.next_power_of_2(num_heads), PER_HEAD=per_head, TILE=tile, BLOCK=block,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return g, beta


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    activation: GateActivation = "silu",
    pdl: bool = False,
) -> torch.Tensor:
    """Equal gated_rms_norm of gates.py. x, gate: each head dense, heads at any stride; weight: contiguous."""
    num_tokens, num_heads, size = x.shape
    assert x.stride(2) == 1
    assert gate.stride(2) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pad = triton.next_power_of_2(size)
    block = max(1, min(2 * _NUM_VALUES // pad, triton.next_power_of_2(num_heads)))
    _gated_rms_norm_kernel[(num_tokens, triton.cdiv(num_heads, block))](
        x, gate, weight, out, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1), eps,
        NUM_HEADS=num_heads, SIZE=size, PAD=pad, BLOCK=block, IS_SILU=activation == "silu", PDL=pdl,
        num_warps=max(1, min(4, block * pad // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def log_decay(value, rate):
    """Return -rate * softplus(value), float32."""
    # log(1 + power) exactly: what the sum loses of a small power, the quotient puts back (W. Kahan)
    power = tl.exp(tl.minimum(value, 20.0))
    one_more = 1.0 + power
    kept = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    softplus = tl.where(one_more == 1.0, power, tl.log(one_more) * (power / kept))
    return -rate * tl.where(value > 20.0, value, softplus)


@triton.jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, stride_a, stride_b, num_tokens, max_beta,
    NUM_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, PER_HEAD: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """TILE tokens, BLOCK of their gates; the first block's programs compute beta, too."""
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE).to(tl.int64)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_block = columns < NUM_HEADS * PER_HEAD
    mask = (tokens < num_tokens) & in_block
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rate = tl.exp(tl.load(a_log_ptr + columns // PER_HEAD, mask=in_block, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + columns, mask=in_block, other=0.0).to(tl.float32)
    value = tl.load(a_ptr + tokens * stride_a + columns, mask=mask, other=0.0).to(tl.float32) + bias
    g = log_decay(value, rate)
    tl.store(g_ptr + tokens * NUM_HEADS * PER_HEAD + columns, g, mask=mask)
    if tl.program_id(1) == 0:
        heads = tl.arange(0, HEADS_PAD)[None, :]
        in_heads = (tokens < num_tokens) & (heads < NUM_HEADS)
        b = tl.load(b_ptr + tokens * stride_b + heads, mask=in_heads, other=0.0).to(tl.float32)
        tl.store(beta_ptr + tokens * NUM_HEADS + heads, max_beta * tl.sigmoid(b), mask=in_heads)


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, stride_x, stride_x_head, stride_gate, stride_gate_head, eps,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, IS_SILU: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, PAD)[None, :]
    mask = (heads < NUM_HEADS) & (dims < SIZE)
    weight = tl.load(weight_ptr + dims, mask=dims < SIZE, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + token * stride_x + heads * stride_x_head + dims, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate + heads * stride_gate_head + dims, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None] * weight
    activated = tl.sigmoid(gate)
    if IS_SILU:
        activated *= gate
    out_ptrs = out_ptr + (token * NUM_HEADS + heads) * SIZE + dims
    tl.store(out_ptrs, (normed * activated).to(out_ptr.dtype.element_ty), mask=mask)
