"""The gated delta rule (gated delta net, Kimi delta attention): the torch specification, token by token. Any device.

S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024, equation 10. Each value head has a state of [d_v, d_k],
stored transposed against the paper, so that the rows of a state, one for each value dimension, are independent:

    S = S * exp(g);  u = beta * (v - S k);  S = S + u k^T;  o = S q * scale
"""

from __future__ import annotations

import torch

from kernels.states import StateMetadata, StateView, load_states, save_states


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    scale: float,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Advance each row's state by its tokens; return what each token reads, [T, value heads, d_v] in v's dtype.

    q, k: [T, key heads, d_k], normalised here: x / sqrt(sum of x^2 + eps) of each head; key head j serves value heads
    j * r to j * r + r - 1. v: [T, value heads, d_v]; all three may be slices of wider rows.
    g: float32, at most 0: [T, value heads], or [T, value heads, d_k] with a gate for each key dimension. beta: float32
    [T, value heads]. view: [value heads * d_v, d_k]. Computed in float32. Outputs of padding rows are zeros.
    """
    num_heads, d_v = v.shape[1:]
    d_k, repeat = q.shape[2], num_heads // q.shape[1]
    q, k = (normalised(x, eps).repeat_interleave(repeat, dim=1) for x in (q, k))
    gates = g.float().exp() if g.dim() == 3 else g.float().exp()[..., None]
    states = load_states(view, metadata).view(-1, num_heads, d_v, d_k)
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    starts = metadata.query_start_loc.tolist()
    for row, num_tokens in enumerate(metadata.seq_lens.tolist()):
        for token in range(starts[row], starts[row + 1]) if num_tokens else ():
            state = states[row] * gates[token][:, None, :]
            error = v[token].float() - (state * k[token][:, None]).sum(-1)
            states[row] = state + (beta[token].float()[:, None] * error)[..., None] * k[token][:, None]
            out[token] = ((states[row] * q[token][:, None]).sum(-1) * scale).to(v.dtype)
    save_states(view, metadata, states.flatten(1, 2))
    return out


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(sum of x^2 over the last dimension + eps), in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
