"""Mamba-2's state space in torch for serving: rows of one token at once, longer rows one by one in chunks. Any device.

T. Dao, A. Gu, "Transformers are SSMs", 2024, section 6: within a chunk the recurrence is a masked matrix product, and
only states go from chunk to chunk. Chunks have 64 tokens, counted from the row's start, and the operations on a chunk
depend on its own tokens and on the state before it alone: a prompt in one row, or cut at multiples of 64, has equal
states bit by bit on a CPU.
"""

from __future__ import annotations

import torch

from kernels.states import StateMetadata, StateView, load_states, save_states

CHUNK = 64


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
    """Equal kernels.mamba2.reference.mamba2; its arguments and result."""
    num_heads, head_dim = x.shape[1:]
    states = load_states(view, metadata).view(-1, num_heads, head_dim, b.shape[2])
    num_rows = len(metadata.seq_lens)
    if metadata.num_decodes == num_rows:
        y = _step(states, x.float(), b.float(), c.float(), dt, a, d)
        out = torch.where(metadata.seq_lens[:, None, None] > 0, y, 0.0).to(x.dtype)
    else:
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        lens = [starts[row + 1] - starts[row] if seq_lens[row] else 0 for row in range(num_rows)]
        if 1 in lens:
            rows = torch.tensor([row for row, count in enumerate(lens) if count == 1], device=x.device)
            tokens, single = metadata.query_start_loc[rows].long(), states[rows]
            y = _step(single, x[tokens].float(), b[tokens].float(), c[tokens].float(), dt[tokens], a, d)
            states[rows], out[tokens] = single, y.to(x.dtype)
        for row, count in enumerate(lens):
            if count > 1:
                own = slice(starts[row], starts[row + 1])
                state = states[row].clone()  # its address is aligned alike for every row, as products may depend on it
                out[own] = _scan(state, x[own], b[own], c[own], dt[own], a, d)
                states[row] = state
    save_states(view, metadata, states.flatten(1, 2))
    return out


def _step(
    states: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    """Advance states [R, heads, head_dim, N], in place, by one token each; return y [R, heads, head_dim] float32."""
    repeat = x.shape[1] // b.shape[1]
    b, c = (vectors.repeat_interleave(repeat, dim=1) for vectors in (b, c))
    states.mul_((dt * a).exp()[..., None, None])
    states.addcmul_((dt[..., None] * x)[..., None], b[:, :, None])
    # A product of a matrix and a vector takes a CPU longer than this sum
    return (states * c[:, :, None]).sum(-1) + d[:, None] * x


def _scan(
    state: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    """Advance a row's state [heads, head_dim, N], in place, by its tokens; return y [tokens, heads, head_dim]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for first in range(0, len(x), CHUNK):
        chunk = slice(first, first + CHUNK)
        tokens = (x[chunk].float(), b[chunk].float(), c[chunk].float(), dt[chunk])
        # A rest of one token is computed as if it were a row
        y = _step(state[None], *tokens, a, d) if len(tokens[0]) == 1 else _advance(state, *tokens, a, d)
        out[chunk] = y.to(x.dtype)
    return out


def _advance(
    state: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    """Advance a state, in place, by a chunk of L tokens; return y [L, heads, head_dim] float32.

    Decays are sums of logarithms over just the tokens between two, none a difference: strong decay in front of them
    costs no digits. All are at most 0, so nothing overflows.
    """
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_size = b.shape[1:]
    heads_of_group = num_heads // num_groups
    b, c = (vectors.transpose(0, 1).contiguous() for vectors in (b, c))  # [groups, L, N]
    log_decay = (dt * a).T.contiguous()  # [heads, L]
    # [heads, i, j]: the sum over tokens j + 1 to i
    between = log_decay[:, :, None].expand(-1, -1, num_tokens).tril(-1).cumsum(1)
    from_start = (between[:, :, 0] + log_decay[:, :1]).exp()
    to_end = between[:, -1].exp()
    scores = (c @ b.mT)[:, None] * between.exp().tril().unflatten(0, (num_groups, heads_of_group))
    inputs = x.transpose(0, 1) * dt.T[..., None]  # [heads, L, head_dim]
    y = scores.flatten(0, 1) @ inputs
    read = c @ state.view(num_groups, heads_of_group * head_dim, state_size).mT  # [groups, L, heads * head_dim]
    read = read.view(num_groups, num_tokens, heads_of_group, head_dim).transpose(1, 2).flatten(0, 1)
    y += read * from_start[..., None]
    added = (inputs * to_end[..., None]).mT.reshape(num_groups, heads_of_group * head_dim, num_tokens) @ b
    state.mul_(from_start[:, -1, None, None]).add_(added.view(state.shape))
    return y.transpose(0, 1) + d[:, None] * x
