"""The selective state space of Mamba-2: the torch specification, token by token. Any device.

T. Dao, A. Gu, "Transformers are SSMs", 2024, section 2. Each head has a state of [head_dim, N]:

    S = S * exp(a * dt) + dt * x B^T;  y = S C + D * x
"""

from __future__ import annotations

import torch

from kernels.states import StateMetadata, StateView, load_states, save_states


def mamba2(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
) -> torch.Tensor:
    """Advance each row's state by its tokens; return y, [T, heads, head_dim] in x's dtype.

    x: [T, heads, head_dim]; b, c: [T, groups, N], heads of a group are neighbours; all may be slices of wider rows.
    dt: float32 [T, heads], after its bias, softplus and limits. a: [heads] float32, negative; d: [heads] float32.
    view: [heads * head_dim, N]. Computed in float32. Outputs of padding rows are zeros.
    """
    num_heads, head_dim = x.shape[1:]
    repeat = num_heads // b.shape[1]
    b, c = (vectors.float().repeat_interleave(repeat, dim=1) for vectors in (b, c))
    decay = (dt * a).exp()
    states = load_states(view, metadata).view(-1, num_heads, head_dim, b.shape[2])
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    starts = metadata.query_start_loc.tolist()
    for row, num_tokens in enumerate(metadata.seq_lens.tolist()):
        for token in range(starts[row], starts[row + 1]) if num_tokens else ():
            inputs = x[token].float()
            added = (dt[token][:, None] * inputs)[..., None] * b[token][:, None]
            states[row] = states[row] * decay[token][:, None, None] + added
            out[token] = ((states[row] * c[token][:, None]).sum(-1) + d[:, None] * inputs).to(x.dtype)
    save_states(view, metadata, states.flatten(1, 2))
    return out
