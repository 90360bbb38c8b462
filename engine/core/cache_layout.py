"""CacheLayout: which blocks of each group of layers a request of some length needs, and how many pages they are.

Plain Python; never torch. Derived from SchedulerConfig, never changed. A row that starts at token p of its request
reads, of a full group, all blocks of the tokens before p; of a window group those with the window - 1 tokens before p,
or with the tokens of p's chunk.
"""

from dataclasses import dataclass
from math import lcm

from engine.interface.config import SchedulerConfig
from engine.interface.kv_snapshot import LayerKind

NEVER = 1 << 62  # tokens


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One CacheGroup, with derived facts."""

    index: int
    kind: LayerKind
    tokens: int  # of a block
    pages: int  # of a block
    links: int  # of a block, in the chain of hashes
    first_table: int  # of its tables, which are numbered group after group
    window: int  # the most tokens that a token sees, itself included; NEVER: all
    is_window: bool  # blocks leave the request's table while it runs
    is_chunked: bool  # the window is the token's own chunk of so many positions

    def first_block(self, start: int) -> int:
        """Return the first block that a row that starts at `start` reads."""
        oldest = start // self.window * self.window if self.is_chunked else max(start - self.window + 1, 0)
        return oldest // self.tokens

    def last_start(self, column: int) -> int:
        """Return the last start of a row that reads this block, or one before it, of a window group."""
        end = (column + 1) * self.tokens
        return -(-end // self.window) * self.window - 1 if self.is_chunked else end + self.window - 2

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks with which a request of this length can go on: all, or those of the window and one."""
        whole = -(-num_tokens // self.tokens)
        return min(whole, (self.window + self.tokens - 2) // self.tokens + 2) if self.is_window else whole


class CacheLayout:
    """All groups of a model. unit: tokens of a link in the chain of hashes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.unit = config.block_size
        self.groups: list[GroupLayout] = []
        num_tables = 0
        for index, group in enumerate(config.cache_groups):
            assert group.block_tokens % self.unit == 0
            window = group.chunk if group.window is None else group.window
            assert (group.kind == "window") == (window is not None)
            self.groups.append(
                GroupLayout(
                    index,
                    group.kind,
                    group.block_tokens,
                    group.pages_per_block,
                    group.block_tokens // self.unit,
                    num_tables,
                    NEVER if window is None else window,
                    group.kind == "window",
                    group.chunk is not None,
                )
            )
            num_tables += group.num_tables
        is_state = [group.kind == "state" for group in config.cache_groups]
        self.states = [group for group in self.groups if is_state[group.index]]
        self.growing = [group for group in self.groups if not is_state[group.index]]  # with a block for every T tokens
        self.full = [group for group in self.growing if not group.is_window]
        self.windows = [group for group in self.growing if group.is_window]
        self.step = lcm(*(group.tokens for group in self.groups))  # a hit is a multiple of so many tokens
        self.most_pages = sum(group.pages for group in self.growing)  # that one more token takes
        self.reserve = max((group.pages for group in self.growing), default=0)  # kept free for a running request

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages with which a request of this length can go on to its end if it runs alone."""
        growing = sum(group.num_blocks(num_tokens) * group.pages for group in self.growing)
        return growing + sum(group.pages for group in self.states)

    def max_num_tokens(self, *, num_pages: int, most: int) -> int:
        """Return the length of the longest request that fits into num_pages, at most `most` tokens."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_pages(middle) <= num_pages else (low, middle - 1)
        return low
