"""The ops that models call. Each selects its Triton twin on a CUDA device with Triton installed, otherwise torch.

kernels/elementwise/reference.py and the other reference.py files are the specifications; tests/gpu compares the twins
with them. With Hopper's programmatic dependent launch (pdl) a kernel starts while the previous one finishes.
"""

from __future__ import annotations

import torch

from kernels.causal_conv import reference as causal_conv_reference
from kernels.delta_rule import gates as delta_gates_reference
from kernels.delta_rule import reference as delta_rule_reference
from kernels.dispatch import HAS_TRITON, has_pdl, op
from kernels.elementwise import reference as elementwise
from kernels.elementwise.reference import UNSCALED, KVScales, write_kv
from kernels.inputs import reference as inputs
from kernels.lora.reference import LoraWeights, add_lora, gather_loras
from kernels.mamba2 import reference as mamba2_reference
from kernels.moe import reference as moe
from kernels.sampling import reference as sampling
from kernels.sampling.reference import SamplingState

if HAS_TRITON:
    from kernels.elementwise import triton as elementwise_triton
    from kernels.inputs import triton as inputs_triton
    from kernels.lora import triton as lora_triton
    from kernels.lora.triton import LoraTiles
    from kernels.moe import triton as moe_triton
    from kernels.sampling import triton_draw
    from kernels.sampling.triton_draw import SamplingScratch

rms_norm = op(elementwise.rms_norm, lambda: elementwise_triton.rms_norm)
add_rms_norm = op(elementwise.add_rms_norm, lambda: elementwise_triton.add_rms_norm)
layer_norm = op(elementwise.layer_norm, lambda: elementwise_triton.layer_norm)
add_layer_norm = op(elementwise.add_layer_norm, lambda: elementwise_triton.add_layer_norm)
relu_squared = op(elementwise.relu_squared, lambda: elementwise_triton.relu_squared)
xielu = op(elementwise.xielu, lambda: elementwise_triton.xielu)
silu_and_mul = op(elementwise.silu_and_mul, lambda: elementwise_triton.silu_and_mul)
gelu_tanh_and_mul = op(elementwise.gelu_tanh_and_mul, lambda: elementwise_triton.gelu_tanh_and_mul)
mamba2 = mamba2_reference.mamba2
mamba2_dt = mamba2_reference.mamba2_dt
grouped_gated_norm = mamba2_reference.grouped_gated_norm
fused_moe = op(moe.fused_moe, lambda: moe_triton.fused_moe)
gather_decode_inputs = op(inputs.gather_decode_inputs, lambda: inputs_triton.gather_decode_inputs, takes_pdl=False)
gather_mixed_inputs = op(inputs.gather_mixed_inputs, lambda: inputs_triton.gather_mixed_inputs, takes_pdl=False)
gather_draft_inputs = op(inputs.gather_draft_inputs, lambda: inputs_triton.gather_draft_inputs, takes_pdl=False)
penalize = op(sampling.penalize, lambda: triton_draw.penalize, takes_pdl=False)
allow_only = op(sampling.allow_only, lambda: triton_draw.allow_only, takes_pdl=False)
causal_conv = causal_conv_reference.causal_conv
gated_delta_rule = delta_rule_reference.gated_delta_rule
delta_gates = delta_gates_reference.delta_gates
gated_rms_norm = delta_gates_reference.gated_rms_norm


def _norm_rope_write_kv(
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
    kv_scales: KVScales = UNSCALED,
    is_interleaved: bool = False,
    norms_rotated: bool = False,
) -> torch.Tensor:
    """Split qkv, normalise each head of q and k (unless the weights are None), rotate them, store k and v.

    is_interleaved: see apply_rope. norms_rotated: the heads are normalised after the rotation instead of before it.

    qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; weights: [head_dim], both of one dtype (see
    kernels.elementwise.reference.rms_norm); positions, slot_mapping: [T] int64;
    cos_sin_cache: [max_positions, rotary_dim]; caches, kv_scales: as write_kv, which writes them. Returns q [T, H, D].
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None and not norms_rotated:
        q, k = elementwise.rms_norm(q, q_weight, eps), elementwise.rms_norm(k, k_weight, eps)
    q, k = elementwise.apply_rope(q, k, positions, cos_sin_cache, is_interleaved=is_interleaved)
    if q_weight is not None and k_weight is not None and norms_rotated:
        q, k = elementwise.rms_norm(q, q_weight, eps), elementwise.rms_norm(k, k_weight, eps)
    write_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    return q


norm_rope_write_kv = op(_norm_rope_write_kv, lambda: elementwise_triton.norm_rope_write_kv)


class TokenSampler:
    """The Triton sampler over one device state; see kernels.sampling.triton_draw.sample. Owns one stream's scratch."""

    def __init__(self, state: SamplingState, *, vocab_size: int, max_rows: int) -> None:
        """Allocate the scratch. max_rows: most rows of logits in one call."""
        self._state = state
        device = state.last_token.device
        self._scratch = SamplingScratch.allocate(max_rows=max_rows, vocab_size=vocab_size, device=device)

    def __call__(
        self, logits: torch.Tensor, *, req_index: torch.Tensor, positions: torch.Tensor, has_truncation: bool
    ) -> torch.Tensor:
        """Return [S] int64 token ids, also written to last_token[req_index]; logits: [S, V]."""
        out = torch.empty_like(req_index)
        triton_draw.sample(
            logits,
            req_index=req_index,
            positions=positions,
            state=self._state,
            scratch=self._scratch,
            has_truncation=has_truncation,
            out=out,
            pdl=has_pdl(logits.device),
        )
        return out


class LoraTokens:
    """Each token's adapter in a step, at fixed addresses, and the adapters' products. One stream."""

    def __init__(self, *, num_adapters: int, max_tokens: int, device: torch.device) -> None:
        self._tiles: LoraTiles | None = None
        # [max_tokens] int32: used without tiles
        self._loras = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        if HAS_TRITON and device.type == "cuda":
            self._tiles = LoraTiles.allocate(num_adapters=num_adapters, max_tokens=max_tokens, device=device)

    def gather(
        self, lora_indices: torch.Tensor, req_index: torch.Tensor, token_rows: torch.Tensor | None = None
    ) -> None:
        """Set the adapters of the next step's tokens; see kernels.lora.reference.gather_loras."""
        if self._tiles is not None:
            lora_triton.group_tokens(lora_indices, req_index, token_rows, self._tiles)
        else:
            gather_loras(lora_indices, req_index, token_rows, self._loras)

    def add(self, out: torch.Tensor, x: torch.Tensor, weights: LoraWeights) -> None:
        """Add the adapters' products of x, all tokens gathered last, to out; see kernels.lora.reference.add_lora."""
        if self._tiles is not None:
            lora_triton.add_lora(out, x, weights, self._tiles, pdl=has_pdl(x.device))
        else:
            add_lora(out, x, weights, self._loras[: x.shape[0]])
