"""How much runs at once, of what the user left open. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError

_MANY_SAMPLES = 256  # positions of a step


@dataclass(frozen=True)
class Limits:
    """How much runs at once; see EngineConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_samples: int | None = None  # positions that a step with drafts samples; None: there are no drafts


def choose_limits(config: EngineConfig, *, is_cuda: bool) -> Limits:
    """Fill in what the user left open. Raises StartupError for limits that starve each other."""
    num_seqs = config.max_num_seqs or min(256 if is_cuda else 64, config.max_num_batched_tokens or 256)
    batched = config.max_num_batched_tokens or max(8192 if is_cuda else 512, num_seqs)
    for flag, tokens in (
        ("--max-num-batched-tokens", batched),
        ("--max-num-mixed-tokens", config.max_num_mixed_tokens or batched),
    ):
        if tokens < num_seqs:
            raise StartupError(
                f"{flag} {tokens} is less than --max-num-seqs {num_seqs}: "
                "each running request needs one token per step."
            )
    if config.speculative is None:
        return Limits(num_seqs, batched)
    # What is sampled without drafts is set aside anyway; few requests may need more
    with_drafts = min(num_seqs * (1 + config.speculative.num_tokens), _MANY_SAMPLES, batched)
    return Limits(num_seqs, batched, max(num_seqs, with_drafts))
