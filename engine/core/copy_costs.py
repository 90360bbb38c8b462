"""CopyCosts: how much a step may copy between pool and host, and when copying is quicker than computing. Never torch.

The bounds follow the step. Decode rows wait for the whole step, so beside them a step copies little. A prompt chunk
takes long, and fills many blocks: a step copies more for each of its prompt tokens, a fixed share of the time that they
take. A step without decode rows has more time in any case.

A prompt that comes is copied or computed by rates of the start, when nothing else ran. A preempted request is one of
many, so it is swapped or computed by rates that are measured meanwhile: how long requests waited at the gate for each
page, and the device's time for each prompt token. Both begin with those of the start. A rate that seems bad and is used
no more is forgotten, so that it is tried again.
"""

import math

from engine.interface.config import HostTierConfig

_MEMORY_S = 10.0  # of waits at the gate after which a wait counts for 1/e
_KEPT = 0.9  # of what was measured, after a request that was computed instead
_START_TOKENS = 256  # that the start's rate of prompts counts for; that of copies counts for the copies of a step


class _Rate:
    """Seconds that one of something takes: of the start, and of what was measured since."""

    def __init__(self, start_s: float, count: float) -> None:
        """start_s: 0: unknown. count: how many the start's rate counts for."""
        self.seconds = self.count = 0.0  # measured
        self._start_count = count if start_s else 0.0
        self._start_seconds = start_s * self._start_count

    @property
    def value(self) -> float:
        """0: unknown."""
        count = self.count + self._start_count
        return (self.seconds + self._start_seconds) / count if count > 1e-3 else 0.0

    def keep(self, share: float) -> None:
        """Forget all but a share of what was measured."""
        self.seconds, self.count = self.seconds * share, self.count * share


class CopyCosts:
    """Owns the rates and the bounds of copies."""

    def __init__(self, config: HostTierConfig) -> None:
        self._config = config
        self._page = _Rate(config.page_s, config.max_copies)
        self._token = _Rate(config.token_s, _START_TOKENS)
        self._credit_s = 0.0  # of copies to the host beside decode rows; negative after a block of more pages
        self._committed_s: float | None = None

    @property
    def page_s(self) -> float:
        """Seconds that a request waits for a page from the host, as measured lately. 0: unknown."""
        return self._page.value

    @property
    def token_s(self) -> float:
        """Seconds that a prompt token takes, as measured lately. 0: unknown."""
        return self._token.value

    def most_pages(self, *, num_prompt_tokens: int, num_decodes: int) -> int:
        """Return how many pages a step with these tokens copies in each direction, or the pages of one block."""
        config = self._config
        share = int(num_prompt_tokens * config.copies_per_token)
        if num_decodes and config.max_copies_beside is not None:
            return config.max_copies_beside + share
        return max(config.max_copies, share)

    def most_unasked(self, *, most: int, num_prompt_tokens: int, num_decodes: int) -> int:
        """Return how many of `most` pages may be copied to the host though nobody waits for them.

        Beside decode rows they take a share of the time between commits, and what prompt tokens allow.
        """
        config = self._config
        if config.unasked_share is None or not config.page_s or not num_decodes:
            return most
        return min(most, max(int(self._credit_s / config.page_s), 0) + int(num_prompt_tokens * config.copies_per_token))

    def spend(self, num_pages: int) -> None:
        """Note pages that a step copies to the host though nobody waits for them."""
        self._credit_s -= num_pages * self._config.page_s

    def observe_commit(self, now: float) -> None:
        """Let time pass, in seconds of the engine's clock: it earns copies, at most those of one step."""
        config = self._config
        if config.unasked_share is not None and self._committed_s is not None:
            most_pages = config.max_copies if config.max_copies_beside is None else config.max_copies_beside
            earned_s = (
                max(self._credit_s, -most_pages * config.page_s) + (now - self._committed_s) * config.unasked_share
            )
            self._credit_s = min(earned_s, most_pages * config.page_s)
        self._committed_s = now

    def is_worth_copying(self, *, num_tokens: int, num_pages: int) -> bool:
        """Return whether copying these pages takes less time than computing the tokens. True if rates are unknown."""
        config = self._config
        return not config.token_s or num_pages * config.page_s < num_tokens * config.token_s

    def is_worth_swapping(self, *, num_tokens: int, num_pages: int) -> bool:
        """Return the same of a preempted request, by the rates of late."""
        if not self.token_s or num_pages * self.page_s < num_tokens * self.token_s:
            return True
        self._page.keep(_KEPT)
        return False

    def observe_gate(self, *, num_pages: int, seconds: float) -> None:
        """Learn from a request that waited so long for so many pages."""
        self._page.keep(math.exp(-seconds / _MEMORY_S))
        self._page.seconds += seconds
        self._page.count += num_pages

    def observe_prompts(self, *, seconds: float, num_tokens: float) -> None:
        """Note what prompt tokens took lately."""
        self._token.seconds, self._token.count = seconds, num_tokens
