"""The ops that models call. Each selects its Triton twin on a CUDA device with Triton installed, otherwise torch.

kernels/elementwise/reference.py and the other reference.py files are the specifications; tests/gpu compares the twins
with them. With Hopper's programmatic dependent launch (pdl) a kernel starts while the previous one finishes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.causal_conv import reference as causal_conv_reference
from kernels.delta_rule import chunks, gates
from kernels.dispatch import HAS_TRITON, has_pdl, on_triton, op, when_used
from kernels.elementwise import cpu as elementwise_cpu
from kernels.elementwise import reference as elementwise
from kernels.inputs import reference as inputs
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.lora.reference import LoraWeights, add_lora, gather_loras
from kernels.mamba2 import chunked as mamba2_chunked
from kernels.mamba2 import reference as mamba2_reference
from kernels.moe import reference as moe
from kernels.moe.reference import ExpertSum
from kernels.sampling import reference as sampling
from kernels.sampling.reference import SamplingState

if TYPE_CHECKING:
    from kernels.lora.triton import LoraTiles
    from kernels.sampling.triton_draw import SamplingScratch
if HAS_TRITON:
    lora_triton = when_used("kernels.lora.triton")
    triton_draw = when_used("kernels.sampling.triton_draw")
    triton_sums = when_used("kernels.moe.triton_sums")

_MAX_LATE_SUMS = 16  # rows: a layer is 1 to 2 % faster (benchmarks/notes.md); more were not measured

rms_norm = op(elementwise.rms_norm, "kernels.elementwise.triton", cpu=elementwise_cpu.rms_norm)
add_rms_norm = op(elementwise.add_rms_norm, "kernels.elementwise.triton", cpu=elementwise_cpu.add_rms_norm)
layer_norm = op(elementwise.layer_norm, "kernels.elementwise.triton")
add_layer_norm = op(elementwise.add_layer_norm, "kernels.elementwise.triton")
relu_squared = op(elementwise.relu_squared, "kernels.elementwise.triton")
xielu = op(elementwise.xielu, "kernels.elementwise.triton")
silu_and_mul = op(elementwise.silu_and_mul, "kernels.elementwise.triton", cpu=elementwise_cpu.silu_and_mul)
gelu_tanh_and_mul = op(elementwise.gelu_tanh_and_mul, "kernels.elementwise.triton")
norm_rope_write_kv = op(
    elementwise.norm_rope_write_kv,
    "kernels.elementwise.triton_write_kv",
    cpu=elementwise_cpu.norm_rope_write_kv,
)
norm_rope_write_latent = op(elementwise.norm_rope_write_latent, "kernels.elementwise.triton_latent")
mamba2 = op(mamba2_chunked.mamba2, "kernels.mamba2.triton")
mamba2_dt = op(mamba2_reference.mamba2_dt, "kernels.mamba2.triton_elementwise")
grouped_gated_norm = op(mamba2_reference.grouped_gated_norm, "kernels.mamba2.triton_elementwise")
fused_moe = op(moe.fused_moe, "kernels.moe.triton")
gather_decode_inputs = op(inputs.gather_decode_inputs, "kernels.inputs.triton", takes_pdl=False)
gather_mixed_inputs = op(inputs.gather_mixed_inputs, "kernels.inputs.triton", takes_pdl=False)
gather_draft_inputs = op(inputs.gather_draft_inputs, "kernels.inputs.triton", takes_pdl=False)
penalize = op(sampling.penalize, "kernels.sampling.triton_draw", takes_pdl=False)
allow_only = op(sampling.allow_only, "kernels.sampling.triton_draw", takes_pdl=False)
causal_conv = op(causal_conv_reference.causal_conv, "kernels.causal_conv.triton")
gated_delta_rule = op(chunks.gated_delta_rule, "kernels.delta_rule.triton")
gated_delta_step = op(chunks.gated_delta_step, "kernels.delta_rule.triton")
delta_gates = op(gates.delta_gates, "kernels.delta_rule.triton_gates")
gated_rms_norm = op(gates.gated_rms_norm, "kernels.delta_rule.triton_gates")


def sums_late(x: torch.Tensor) -> bool:
    """Return True if the sum over a token's experts is better left to the norm after it: in steps of few rows."""
    return on_triton(x) and x.shape[0] <= _MAX_LATE_SUMS


def sum_experts(late: ExpertSum) -> torch.Tensor:
    """See kernels.moe.reference.sum_experts."""
    if not on_triton(late.outputs):
        return moe.sum_experts(late)
    return triton_sums.sum_experts(late, pdl=has_pdl(late.outputs.device))


def sum_experts_add_rms_norm(
    late: ExpertSum, residual: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | None
) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
    """See kernels.moe.reference.sum_experts_add_rms_norm."""
    if not on_triton(late.outputs):
        return moe.sum_experts_add_rms_norm(late, residual, weight, eps, rounding)
    return triton_sums.sum_experts_add_rms_norm(
        late, residual, weight, eps, rounding, pdl=has_pdl(late.outputs.device)
    )  # fmt: skip


class TokenSampler:
    """The Triton sampler over one device state; see kernels.sampling.triton_draw.sample. Owns one stream's scratch."""

    def __init__(self, state: SamplingState, *, vocab_size: int, max_rows: int) -> None:
        """Allocate the scratch. max_rows: most rows of logits in one call."""
        self._state = state
        device = state.last_token.device
        self._scratch: SamplingScratch = triton_draw.SamplingScratch.allocate(
            max_rows=max_rows, vocab_size=vocab_size, device=device
        )

    def __call__(
        self,
        logits: torch.Tensor,
        *,
        req_index: torch.Tensor,
        positions: torch.Tensor,
        has_truncation: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [S] int64 token ids, in `out` if given, also written to last_token[req_index]; logits: [S, V]."""
        out = torch.empty_like(req_index) if out is None else out
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
            self._tiles = lora_triton.LoraTiles.allocate(
                num_adapters=num_adapters, max_tokens=max_tokens, device=device
            )

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
