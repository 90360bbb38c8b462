"""CopyCosts: how much a step may copy between pool and host, and when copying is quicker than computing. Never torch.

The bounds follow the step. Decode rows wait for the whole step, so beside them a step copies little. A prompt chunk
takes long, and fills many blocks: a step copies more for each of its prompt tokens, a fixed share of the time that they
take. A step without decode rows has more time in any case.
"""

from engine.interface.config import HostTierConfig


class CopyCosts:
    """Owns the rates and the bounds of copies."""

    def __init__(self, config: HostTierConfig) -> None:
        self._config = config

    def most_pages(self, *, num_prompt_tokens: int, num_decodes: int) -> int:
        """Return how many pages a step with these tokens copies in each direction, or the pages of one block."""
        config = self._config
        share = int(num_prompt_tokens * config.copies_per_token)
        if num_decodes and config.max_copies_beside is not None:
            return config.max_copies_beside + share
        return max(config.max_copies, share)

    def is_worth_copying(self, *, num_tokens: int, num_pages: int) -> bool:
        """Return whether copying these pages takes less time than computing the tokens. True if rates are unknown."""
        config = self._config
        return not config.token_s or num_pages * config.page_s < num_tokens * config.token_s
