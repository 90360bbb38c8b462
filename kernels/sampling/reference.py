"""Sampling of tokens from logits: the torch specification of every sampling op. Any device; nothing here syncs it.

S rows, V vocabulary entries. Randomness is stateless: the noise of (seed, position, token id) is a hash, so a seeded
request draws the same tokens alone, in any batch, and after a preemption.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

NO_TOKEN = -1  # in place of the token of a row with a logit that is NaN or +inf
_INT32_GOLDEN = -1640531527  # 0x9E3779B9, as a signed 32-bit number


class Truncation(NamedTuple):
    """Top-k, top-p and min-p of each row; [S] each."""

    top_k: torch.Tensor  # int64, 0: off
    top_p: torch.Tensor  # float32, 1: off
    min_p: torch.Tensor  # float32, 0: off
    max_top_k: int  # the largest top_k if every row has one, else 0: only so many entries need sorting


@dataclass(frozen=True)
class SamplingState:
    """Each request's sampling parameters and newest token, by req_index: the tensors of DeviceState."""

    # [rows] float32 each
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    # [rows] int64 each
    top_k: torch.Tensor
    seeds: torch.Tensor
    last_token: torch.Tensor


def apply_penalties(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    *,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Return logits [S, V] float32 lowered for tokens seen before.

    output_counts: [S, V] int32, how often each token was generated; in_prompt: [S, V] bool; the rest [S] float32.
    Presence and frequency as OpenAI defines them; repetition as Keskar et al. 2019 (CTRL) §4.1, over both.
    """
    has_output = output_counts > 0
    repeated = has_output | in_prompt
    scale = torch.where(repeated, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    return logits - frequency[:, None] * output_counts - presence[:, None] * has_output


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    req_index: torch.Tensor,
    *,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Apply the penalties of requests req_index [P] to rows [P] of logits [S, V] float32, in place; both int64.

    The rest is indexed by req_index: [R, V] int32, [R, V] bool, [R] float32.
    """
    logits[rows] = apply_penalties(
        logits[rows],
        output_counts[req_index],
        in_prompt[req_index],
        presence=presence[req_index],
        frequency=frequency[req_index],
        repetition=repetition[req_index],
    )


def allow_only(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set rows [P] int64 of logits [S, V] to -inf where the bit of a token is 0, in place.

    bitmask: [P, V / 32, rounded up] int32, the bits of a word from the lowest up, as grammar engines write it.
    """
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add values [B] to logits[rows, token_ids] in place (float("-inf") bans a token). rows, token_ids: [B] int64."""
    return logits.index_put_((rows, token_ids), values, accumulate=True)


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: Truncation | None = None,
) -> torch.Tensor:
    """Return [S] int64 token ids: a draw by the Gumbel-max trick, the argmax where temperature is 0; or NO_TOKEN.

    logits: [S, V] float32, penalties and bias applied; temperature: [S] float32; seeds, positions: as gumbel_noise.
    """
    largest, greedy = logits.max(dim=-1)  # NaN if any is
    is_finite = largest < float("inf")
    logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    token_ids = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    if truncation is not None:
        count = truncation.max_top_k or logits.shape[-1]
        logits, token_ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
        logits = truncate(logits, truncation)
    choice = (logits + gumbel_noise(seeds, positions, token_ids)).argmax(dim=-1, keepdim=True)
    drawn = token_ids.expand_as(logits).gather(-1, choice).squeeze(-1)
    return torch.where(is_finite, torch.where(temperature > 0, drawn, greedy), NO_TOKEN)


def truncate(logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return logits [S, C], which are in descending order, with -inf where top-k, top-p or min-p drops an entry.

    top_p applies to the distribution that top_k leaves (Holtzman et al. 2020, §3.1: the smallest set whose mass reaches
    top_p); min_p keeps entries at least min_p times as likely as the most likely entry (Nguyen et al. 2024). The most
    likely entry is always kept.
    """
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    dropped = (ranks[None, :] >= truncation.top_k[:, None]) & (truncation.top_k > 0)[:, None]
    probs = logits.masked_fill(dropped, float("-inf")).softmax(dim=-1)
    dropped |= probs.cumsum(dim=-1) - probs >= truncation.top_p[:, None]
    dropped |= logits < logits[:, :1] + truncation.min_p.log()[:, None]
    dropped[:, 0] = False
    return logits.masked_fill(dropped, float("-inf"))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return [S, C] float32 standard Gumbel noise, a pure function of (seed, position, token id).

    seeds: [S] int64; positions: [S] int64, the request position of the token to be chosen; token_ids: [S or 1, C].
    """
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    key_0 = _mix(low ^ _mix(positions.to(torch.int32) * _INT32_GOLDEN))
    key_1 = _mix(high + key_0)
    bits = _mix(_mix(token_ids.to(torch.int32) ^ key_0[:, None]).add_(key_1[:, None]))
    # the largest 24-bit value would round up to 1, whose noise is infinite
    uniform = ((bits >> 8) & 0xFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-24).clamp_(max=1.0 - 2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logprob [S] of token_ids [S], the `count` most likely ids [S, count] int64, their logprobs), float32.

    One log-softmax is used for all three, so a token in both lists has bit-equal values.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(count, dim=-1)
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1), ids, values


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective 32-bit hash with low bias: C. Wellons, hash-prospector, `lowbias32`. int32 in and out, wrapping."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)
