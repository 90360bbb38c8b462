"""The ops of a Mamba-2 layer behind its convolution: the torch specification, token by token. Any device.

T. Dao, A. Gu, "Transformers are SSMs", 2024, section 2. Each head has a state of [head_dim, N]:

    S = S * exp(a * dt) + dt * x B^T;  y = S C + D * x

mamba2_dt makes dt, and grouped_gated_norm is between y and the output projection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

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


def mamba2_dt(dt: torch.Tensor, dt_bias: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
    """Return softplus(dt + dt_bias) between limits (the config's time_step_limit), [T, heads] float32, contiguous.

    dt: [T, heads], may be a slice of wider rows; dt_bias: [heads]. Both are widened to float32 before they are added.
    """
    return functional.softplus(dt.float() + dt_bias.float()).clamp(*limits).contiguous()


def grouped_gated_norm(
    y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    group_size: int,
    has_norm_first: bool = False,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Gate y by SiLU(z) and normalise each group of channels by its root mean square; has_norm_first: in reverse order.

    y, z: [T, d] of one dtype, each may be a slice of wider rows; weight: [d], None: no norm, the result is y * SiLU(z).
    float32 inside. A weight of y's dtype is applied after rounding to it, as transformers' Nemotron-H does; one in
    float32 before the only rounding, as its Falcon-H1 does; has_norm_first needs one in float32.
    group_size: channels of a group over all ranks. all_reduce: this rank has d of a group's channels, or whole groups
    as other ranks have; gets the sums of squares, [T, groups of this rank] float32, and returns those of whole groups,
    which it may write in place. None: groups are whole here. Returns [T, d], contiguous, in y's dtype.
    """
    gates = functional.silu(z.float())
    if weight is None:
        return (y.float() * gates).to(y.dtype)
    values = y.float() if has_norm_first else y.float() * gates
    groups = values.unflatten(-1, (-1, min(group_size, values.shape[-1])))
    sums = groups.square().sum(-1)
    if all_reduce is not None:
        sums = all_reduce(sums)
    normed = (groups * torch.rsqrt(sums / group_size + eps)[..., None]).flatten(-2)
    if has_norm_first:
        return (weight * normed * gates).to(y.dtype)
    return (weight * normed.to(weight.dtype)).to(y.dtype)
