"""PrefixFinder: the longest prefix of a request that all groups of layers have in the prefix cache. Never torch.

A request's prefixes are named by its chain of hashes (Request.extend_hashes), one link per unit of tokens.
The block of a group is found by the hash of all tokens up to its end, a saved state by that of all tokens before it.
A hit is a position p that every group supplies: a full group all blocks up to p, a window group those that a row that
starts at p reads, a state group the state saved at p.
"""

from collections import Counter
from typing import NamedTuple, Protocol

from engine.core.cache_layout import CacheLayout, GroupLayout
from engine.core.late_blocks import LateBlocks
from engine.core.request import Request
from engine.interface.kv_snapshot import LayerKind


class Hit(NamedTuple):
    """A prefix in the cache."""

    num_tokens: int
    blocks: list[list[int]]  # by group; of a state group: the block of the saved state
    num_full_tokens: int = 0  # the prefix that the full groups alone would supply
    limits: tuple[tuple[LayerKind, int], ...] = ()  # kinds of groups, and by how many tokens each made it shorter
    num_matched_tokens: int = 0  # the blocks that all full groups have, also those behind the last place for a hit


def hit_names(request: Request, group: GroupLayout, num_tokens: int) -> list[tuple[int, bytes]]:
    """Return group and key of a group's blocks in a hit of so many tokens."""
    end = num_tokens // group.tokens
    columns = range(end - 1 if group.kind == "state" else group.first_block(num_tokens), end)
    return [(group.index, request.block_hashes[(column + 1) * group.links - 1]) for column in columns]


class Blocks(Protocol):
    """Knows blocks by their keys: PagePool, or both tiers (engine/core/host_tier.py)."""

    def find(self, group: int, key: bytes) -> int | None:
        """Return the group's block with this key, or None."""
        ...


class PrefixFinder:
    """Looks requests up in the prefix cache; changes nothing but their chains of hashes."""

    def __init__(self, layout: CacheLayout, pool: Blocks, late: LateBlocks | None = None) -> None:
        """late: blocks to publish when a lookup comes to them."""
        self._layout = layout
        self._pool = pool
        self._late = late

    def find(self, request: Request, *, within: int | None = None) -> Hit:
        """Return the longest hit within the request's cacheable tokens, of these the first ones if `within` is given.

        O(1) per block of the request.
        """
        layout, most = self._layout, request.num_cacheable_tokens
        most = (most if within is None else min(most, within)) // layout.step * layout.step
        if self._late is None or not self._late.can_wait:  # others look at the whole chain
            request.extend_hashes(most, unit=layout.unit)
        found = {group.index: self._find_full(request, group, most) for group in layout.full}
        for group in layout.full:
            most = min(most, len(found[group.index]) * group.tokens)
        num_matched = most if layout.full else 0
        most = end = most // layout.step * layout.step
        limits: Counter[LayerKind] = Counter()
        while end and (missing := self._missing_before(request, end)) is not None:
            kind, lower = missing
            lower = lower // layout.step * layout.step
            limits[kind] += end - lower
            end = lower
        blocks: list[list[int]] = [[] for _ in layout.groups]
        if end:
            for group in layout.full:
                blocks[group.index] = found[group.index][: end // group.tokens]
            for group in layout.windows:
                columns = range(group.first_block(end), end // group.tokens)
                blocks[group.index] = [self._block(request, group, column) for column in columns]
            for group in layout.states:
                blocks[group.index] = [self._block(request, group, end // group.tokens - 1)]
        return Hit(end, blocks, most if layout.full else end, tuple(limits.items()), num_matched or end)

    def may_find_more(self, request: Request, found: Hit) -> bool:
        """Return False if find() has no longer hit than `found`, of fewer blocks, for sure. Hashes a link or two."""
        end = found.num_tokens
        if end + self._layout.step > request.num_cacheable_tokens:
            return False
        if end < found.num_full_tokens:
            return True  # windows or states are missing, perhaps
        for group in self._layout.full:
            request.extend_hashes(end + group.tokens, unit=self._layout.unit)
            if self._lookup(request, group, end // group.tokens) is None:
                return False
        return True

    def _find_full(self, request: Request, group: GroupLayout, most: int) -> list[int]:
        """Return the blocks of the longest prefix within `most` tokens."""
        hits: list[int] = []
        hashes, links, unit = request.block_hashes, group.links, self._layout.unit
        for link in range(links - 1, most // unit, links):
            if link >= len(hashes):  # of a prompt that nobody knows no more is hashed before it is computed
                request.extend_hashes(min(2 * (link + 1) * unit, most), unit=unit)
            block = self._pool.find(group.index, hashes[link])
            if block is None and self._late is not None:
                self._late.publish_after(hashes[link - links] if hits else request.root_hash())
                block = self._pool.find(group.index, hashes[link])
            if block is None:
                break
            hits.append(block)
        return hits

    def _missing_before(self, request: Request, end: int) -> tuple[LayerKind, int] | None:
        """Return the kind that does not supply `end`, and a bound of what it supplies; None: all supply `end`."""
        for group in self._layout.states:
            if self._lookup(request, group, end // group.tokens - 1) is None:
                return "state", end - 1
        for group in self._layout.windows:
            for column in range(end // group.tokens - 1, group.first_block(end) - 1, -1):
                if self._lookup(request, group, column) is None:
                    return "window", column * group.tokens  # every hit between needs this block
        return None

    def _lookup(self, request: Request, group: GroupLayout, column: int) -> int | None:
        return self._pool.find(group.index, request.block_hashes[(column + 1) * group.links - 1])

    def _block(self, request: Request, group: GroupLayout, column: int) -> int:
        block = self._lookup(request, group, column)
        assert block is not None
        return block
