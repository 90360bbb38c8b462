"""Depthwise causal convolution over the tokens of each request: the torch specification. Any device.

The state has the last width - 1 inputs of each channel before the row, the oldest first: a tensor of [channels,
width - 1] (kernels.states.StateView).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.states import StateMetadata, StateView, load_states, save_states


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    view: StateView,
    metadata: StateMetadata,
    *,
    has_silu: bool,
) -> torch.Tensor:
    """Convolve each row's tokens with those before them; advance the state.

    x: [T, channels], may be a slice of wider rows; weight: [channels, width], the newest input last; bias: [channels].
    Computed in float32. Returns [T, channels], contiguous, in x's dtype: the sum of weight[:, i] * x[t - width + 1 + i]
    over i, plus bias, then SiLU if has_silu. Outputs of padding rows are zeros.
    """
    states = load_states(view, metadata)
    out, after = torch.zeros_like(x, memory_format=torch.contiguous_format), states.clone()
    starts = metadata.query_start_loc.tolist()
    for row, num_tokens in enumerate(metadata.seq_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        if not num_tokens or first == end:
            continue
        inputs = torch.cat([states[row], x[first:end].T.float()], dim=1)  # [channels, width - 1 + tokens]
        y = functional.conv1d(
            inputs[None], weight[:, None].float(), None if bias is None else bias.float(), groups=x.shape[1]
        )[0]
        out[first:end] = (functional.silu(y) if has_silu else y).T.to(x.dtype)
        after[row] = inputs[:, end - first :]
    save_states(view, metadata, after)
    return out
