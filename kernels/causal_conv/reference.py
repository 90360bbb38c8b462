"""Depthwise causal convolution over the tokens of each request: the torch specification. Any device, no sync.

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
    over i, plus bias, then SiLU if has_silu. Outputs of padding rows are zeros; behind the last row they are undefined.
    """
    starts, num_tokens = metadata.query_start_loc[:-1].long(), metadata.query_start_loc.diff().long()
    tokens = torch.arange(len(x), device=x.device)
    rows = torch.searchsorted(metadata.query_start_loc, tokens, right=True) - 1
    is_token = (rows < len(starts)) & (metadata.seq_lens > 0)[rows.clamp(max=len(starts) - 1)]
    inputs = torch.where(is_token[:, None], x, 0).float()
    offsets = tokens - metadata.query_start_loc.long()[rows]
    states, taps = load_states(view, metadata), weight.float().T
    before = len(taps) - 1
    # From the newest input to the oldest, whether it is in the row or in the state: so where a prompt is cut into rows
    # changes no bit of a sum
    y = inputs * taps[-1]
    for back in range(1, len(taps)):
        tap = taps[before - back]
        y[back:] += torch.where((offsets >= back)[back:, None], inputs[:-back] * tap, 0.0)
        for offset in range(back):
            products = torch.where((num_tokens > offset)[:, None], states[..., before - back + offset] * tap, 0.0)
            y.index_add_(0, (starts + offset).clamp(max=len(x) - 1), products)
    if bias is not None:
        y += bias.float()
    y = functional.silu(y) if has_silu else y
    save_states(view, metadata, _last_inputs(inputs, states, starts, num_tokens))
    return torch.where(is_token[:, None], y, 0.0).to(x.dtype)


def _last_inputs(
    inputs: torch.Tensor, states: torch.Tensor, starts: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    """Return the newest inputs of each row, of its tokens or from before it: [R, channels, width - 1] as `states`."""
    width = states.shape[2]
    offsets = num_tokens[:, None] - width + torch.arange(width, device=states.device)
    new = inputs[(starts[:, None] + offsets).clamp(0, len(inputs) - 1)].transpose(1, 2)
    old = states.gather(2, (offsets + width).clamp(max=width - 1)[:, None].expand(states.shape))
    return torch.where((offsets >= 0)[:, None], new, old)
