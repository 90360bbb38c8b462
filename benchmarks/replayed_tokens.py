"""Tokens of streams beside those of undisturbed runs: which are equal, and where the first differs. Pure values.

A replay computes a prompt and the tokens that its client has in one step of many tokens, where the earlier engine
computed token by token. Numbers rounded in another order may then choose another token wherever two are about equally
likely. So each comparison also tells how far the log-probabilities of equal tokens are apart, and how close the two
most likely tokens were where texts part. Tokens that came before the replay were chosen by the earlier engine: a stream
that differs among them is counted by itself.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.kills import ENDS, Streamed
from benchmarks.latency import percentile

ASKED = {"ignore_eos": True, "return_token_ids": True, "logprobs": 2}  # of a completion that is to be compared


@dataclass
class TokenStream(Streamed):
    """A stream of one choice, asked with ASKED. For each token: its id, log-probability, gap and time."""

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)  # between the two most likely; None: they have one text
    token_times_s: list[float] = field(default_factory=list)
    num_replays: int = 0

    def take(self, payload: bytes, now_s: float) -> None:
        """Add one event."""
        super().take(payload, now_s)
        if payload in ENDS:
            return
        event = json.loads(payload)
        self.num_replays = event.get("timings", {}).get("replays", self.num_replays)
        for choice in event.get("choices", ()):
            self.prompt_ids += choice.get("prompt_token_ids") or []
            token_ids = choice.get("token_ids") or []
            self.token_ids += token_ids
            self.token_times_s += [now_s] * len(token_ids)
            logprobs = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
            self.logprobs += logprobs["token_logprobs"]
            self.gaps += [_gap(top) for top in logprobs["top_logprobs"]]

    def num_tokens_at(self, at_s: float) -> int:
        """Return how many tokens had come at a time."""
        return sum(token_s < at_s for token_s in self.token_times_s)


def _gap(top: dict[str, float]) -> float | None:
    best = sorted(top.values(), reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One stream beside an undisturbed one of the same request."""

    begin: int  # the first token that a replay chose; 0 without a replay
    end: int  # of the tokens that are equal: the position of the first that differs, or the number of tokens
    is_equal: bool
    gap: float | None  # at `end`, of the undisturbed stream; None: equal, or not known
    logprob_distances: list[float]  # of the equal tokens from begin on


def compared(stream: TokenStream, expected: TokenStream, *, begin: int = 0, ahead: int = 0) -> Difference:
    """Compare a stream with an undisturbed one. ahead: tokens that only the latter has, before the stream's first."""
    token_ids, gaps = expected.token_ids[ahead:], expected.gaps[ahead:]
    pairs = zip(stream.token_ids, token_ids, strict=False)
    shorter = min(len(stream.token_ids), len(token_ids))
    end = next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
    is_equal = stream.token_ids == token_ids
    logprobs = zip(stream.logprobs[begin:end], expected.logprobs[ahead + begin :], strict=False)
    return Difference(
        begin=begin,
        end=end,
        is_equal=is_equal,
        gap=gaps[end] if not is_equal and end < len(gaps) else None,
        logprob_distances=[abs(one - other) for one, other in logprobs],
    )


def summary(differences: Sequence[Difference]) -> dict[str, Any]:
    """Return the figures of many comparisons.

    Those that differ before `begin` are counted as differed_before, and are in no other figure. tokens: from begin on,
    the first that differs included; tokens_for_a_difference: of these, for each stream that differs.
    """
    kept = [each for each in differences if each.is_equal or each.end >= each.begin]
    parted = [each for each in kept if not each.is_equal]
    num_tokens = sum(each.end - each.begin + (not each.is_equal) for each in kept)
    distances = sorted(distance for each in kept for distance in each.logprob_distances)
    return {
        "streams": len(differences),
        "differed_before": len(differences) - len(kept),
        "equal": len(kept) - len(parted),
        "share_equal": round((len(kept) - len(parted)) / len(kept), 4) if kept else None,
        "first_differing_positions": sorted(each.end for each in parted),
        "of_these_after_begin": sorted(each.end - each.begin for each in parted),
        "tokens": num_tokens,
        "tokens_for_a_difference": round(num_tokens / len(parted), 1) if parted else None,
        "gap_at_the_difference": _spread([each.gap for each in parted if each.gap is not None]),
        "share_of_logprobs_equal": round(distances.count(0.0) / len(distances), 4) if distances else None,
        "logprob_distance": _spread(distances),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum; {} without values."""
    if not values:
        return {}
    ordered = sorted(values)
    places = {"p50": percentile(ordered, 50), "p99": percentile(ordered, 99), "max": ordered[-1]}
    return {name: round(value, 6) for name, value in places.items()}


def typical_gap(streams: Sequence[TokenStream]) -> float | None:
    """Return the median of the gaps between the two most likely tokens, at all positions."""
    gaps = [gap for each in streams for gap in each.gaps if gap is not None]
    return round(statistics.median(gaps), 4) if gaps else None
