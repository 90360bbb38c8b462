"""The gated delta rule by chunks of tokens: the torch version that serves CPUs. Equals reference.py but for rounding.

S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, section 3 (the UT
transform), with the gates of "Gated Delta Networks", 2024. Within a chunk, with D[i, j] the decay from token j to i:

    (I + strictly lower part of beta_i k_i.k_j D[i, j]) u = beta (v - S k decayed from the chunk's start)
    o = scale * (S q decayed from the chunk's start + sum over j <= i of (q_i.k_j D[i, j]) u_j)

Gates may be strong: no power of a positive number is taken, and no two sums of gates are subtracted. A chunk has 64
tokens, counted from the row's start, or what is left; a single token is computed as in a row of one token. So a prompt
gives the same state, to the bit, in one row and in several that begin at multiples of 64.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.delta_rule.gates import delta_gates
from kernels.delta_rule.reference import normalised
from kernels.states import StateMetadata, StateView, load_states, save_states

CHUNK = 64
# Tokens for which the decays of each key dimension are computed pair by pair
_PART = 16


def gated_delta_rule(
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
    [T, value heads]. view: [value heads * d_v, d_k]. Computed in float32. Outputs of padding rows are zeros; behind the
    last row they are undefined.
    """
    num_heads, d_v = v.shape[1:]
    states = load_states(view, metadata).unflatten(1, (num_heads, d_v))
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    lengths = torch.where(metadata.seq_lens > 0, metadata.query_start_loc.diff(), 0)
    places = torch.arange(CHUNK, device=v.device)
    for position in range(0, metadata.max_query_len, CHUNK):
        for is_step, chosen in ((True, lengths == position + 1), (False, lengths > position + 1)):
            rows = chosen.nonzero()[:, 0]
            if not len(rows):
                continue
            tokens = metadata.query_start_loc[rows, None] + position + (places[:1] if is_step else places)
            is_token = tokens < metadata.query_start_loc[rows + 1, None]
            tokens = tokens.clamp(max=len(v) - 1)
            chunk = _gather(q, k, v, g, beta, tokens, is_token, eps)
            advance = _step if is_step else _chunk
            if len(rows) == len(states):  # no copies
                states, read = advance(*chunk, states)
            else:
                states[rows], read = advance(*chunk, states[rows])
            out[tokens[is_token]] = (read * scale).transpose(1, 2)[is_token].to(v.dtype)
    save_states(view, metadata, states.flatten(1, 2))
    return out


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    scale: float,
    max_beta: float = 1.0,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return gated_delta_rule with the gates of delta_gates, whose arguments follow v; rows have at most one token."""
    g, beta = delta_gates(a, b, a_log, dt_bias, max_beta=max_beta)
    return gated_delta_rule(q, k, v, g, beta, view, metadata, scale=scale, eps=eps)


Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _gather(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tokens: torch.Tensor,
    is_token: torch.Tensor,
    eps: float,
) -> Chunk:
    """Return all five as [N, heads, tokens, ...] float32, 0 where there is no token; queries and keys normalised."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        mask = is_token.view(*is_token.shape, *[1] * (x.dim() - 1))
        return torch.where(mask, x[tokens], 0.0).transpose(1, 2).float()

    return normalised(gather(q), eps), normalised(gather(k), eps), gather(v), gather(g), gather(beta)


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: reference.py's step. Returns (states, in place, and reads [N, heads, 1, d_v])."""
    repeat = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
    states *= (g if g.dim() == 4 else g[..., None]).exp()
    update = beta[..., None] * (v - k @ states.mT)
    states.addcmul_(update.mT, k)
    return states, q @ states.mT


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to CHUNK tokens of each row; zeros change nothing. Returns (new states, reads [N, heads, CHUNK, d_v])."""
    repeat = v.shape[1] // k.shape[1]
    if g.dim() == 4:
        q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
        keys, queries = _pairs_by_dimension(q, k, g)
        from_start, to_end = g.cumsum(2), _sum_behind(g)
    else:
        decays = _sums_between(g[..., None])[..., 0].exp()
        keys = (k @ k.mT).repeat_interleave(repeat, dim=1) * decays
        queries = (q @ k.mT).repeat_interleave(repeat, dim=1) * decays
        q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
        from_start, to_end = g.cumsum(2)[..., None], _sum_behind(g)[..., None]
    start_decays = from_start.exp()
    errors = beta[..., None] * (v - (k * start_decays) @ states.mT)
    # The diagonal and what is above it are not read
    updates = torch.linalg.solve_triangular(beta[..., None] * keys, errors, upper=False, unitriangular=True)
    reads = (q * start_decays) @ states.mT + queries @ updates
    return states * start_decays[:, :, -1:] + updates.mT @ (k * to_end.exp()), reads


def _pairs_by_dimension(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k_i.k_j and q_i.k_j decayed from token j to i, dimension by dimension: [N, heads, CHUNK, CHUNK] each.

    The chunk is cut into parts. Between two parts the decay is that from j to the end of its part, times that of the
    parts between, times that from the start of i's part: a product of matrices. Within a part it goes pair by pair.
    """
    parts = CHUNK // _PART
    keys, gates = k.unflatten(2, (parts, _PART)), g.unflatten(2, (parts, _PART))
    both = torch.stack((k, q), dim=2).unflatten(3, (parts, _PART))
    from_start, to_end, whole = gates.cumsum(3), _sum_behind(gates, 3), gates.sum(3, keepdim=True)
    pairs = both.new_zeros(*both.shape[:3], CHUNK, CHUNK)
    inside = _sums_between(gates).exp() * keys[:, :, :, None]
    for i in range(parts):
        rows = slice(i * _PART, (i + 1) * _PART)
        pairs[..., rows, rows] = (inside[:, :, None, i] @ both[:, :, :, i, ..., None])[..., 0]
        decayed = both[:, :, :, i] * from_start[:, :, None, i].exp()
        between = torch.zeros_like(whole[:, :, 0])
        for j in reversed(range(i)):
            sources = keys[:, :, j] * (to_end[:, :, j] + between).exp()
            pairs[..., rows, j * _PART : (j + 1) * _PART] = decayed @ sources[:, :, None].mT
            between = between + whole[:, :, j]
    return pairs[:, :, 0], pairs[:, :, 1]


def _sums_between(g: torch.Tensor) -> torch.Tensor:
    """Return the sum of g[j + 1] to g[i] for i >= j, else -inf: [..., tokens i, tokens j, D] of g [..., tokens, D]."""
    size = g.shape[-2]
    is_below = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)[..., None]
    sums = torch.where(is_below, g[..., :, None, :], 0.0).cumsum(-3)
    return torch.where(is_below.transpose(0, 1), -torch.inf, sums)


def _sum_behind(g: torch.Tensor, dim: int = 2) -> torch.Tensor:
    """Return at each token the sum of g at all later tokens."""
    behind = g.flip(dim).cumsum(dim).flip(dim)
    return functional.pad(behind.narrow(dim, 1, g.shape[dim] - 1).movedim(dim, -1), (0, 1)).movedim(-1, dim)
