"""KvEvents: which blocks the prefix cache gained and lost, tier by tier, for routers. Plain Python; never torch.

Pool, host memory and disk tell what can be found in them, and what no more: stored, removed. take() returns what was
told since the last call, in order, with neighbours of one prompt in one event; engine/kv_publisher.py sends it. Blocks
of the leading group, the first with full attention, are described with their tokens and the block before them, since
a router finds a prompt by its tokens. Those of other groups are named alone. A block is remembered while a tier has it.

A disk has blocks of earlier processes, whose tokens are not known: they are told of when a request asks for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from engine.core.cache_layout import CacheLayout, GroupLayout
from engine.core.request import Request

Name = tuple[int, bytes]  # a block's group and its key
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: hashes of groups differ in many bits


class Medium(IntEnum):
    """A tier."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(slots=True)
class Stored:
    """Blocks that can be found from now on, each the next of one prompt; if token_ids is empty, in any order."""

    medium: Medium
    group: int
    hashes: list[int]  # 64 bits, without sign
    parent: int | None  # the block before the first; None: it begins its prompt, or is not described
    token_ids: array[int]  # of all of them
    lora_index: int  # 0: none


@dataclass(slots=True)
class Removed:
    """Blocks that cannot be found any more in this tier."""

    medium: Medium
    group: int
    hashes: list[int]


KvEvent = Stored | Removed


@dataclass(slots=True, eq=False)
class _Block:
    hash: int
    parent: int | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    lora_index: int = 0
    tiers: int = 0  # a bit for each that has it


class KvEvents:
    """Owns the descriptions of all blocks that a tier has. Every operation is O(1) per block."""

    def __init__(self, layout: CacheLayout) -> None:
        self._leading = (layout.full or layout.growing or layout.groups)[0]
        self._blocks: dict[Name, _Block] = {}
        self._events: list[KvEvent] = []

    @property
    def leading(self) -> int:
        """The group whose blocks are described."""
        return self._leading.index

    @property
    def num_blocks(self) -> int:
        """Blocks that a tier has."""
        return len(self._blocks)

    def held(self, medium: Medium) -> set[Name]:
        """Return the blocks that a tier has, as far as it was told."""
        return {name for name, block in self._blocks.items() if block.tiers >> medium & 1}

    def hash_of(self, name: Name) -> int:
        """Return what names a block in events: of the leading group, the end of its key."""
        return int.from_bytes(name[1][-8:], "big") ^ ((name[0] - self.leading) * _ODD & _MASK)

    def describe(self, request: Request, group: GroupLayout, columns: Iterable[int]) -> None:
        """Note tokens and neighbours of a request's blocks, which must be stored next, or given up by forget()."""
        if group is not self._leading:
            return
        hashes, links, size = request.block_hashes, group.links, group.tokens
        for column in columns:
            name = (group.index, hashes[(column + 1) * links - 1])
            if name not in self._blocks:
                self._blocks[name] = _Block(
                    self.hash_of(name),
                    self.hash_of((group.index, hashes[column * links - 1])) if column else None,
                    array("i", request.token_ids(column * size, (column + 1) * size)),
                    request.lora_index,
                )

    def forget(self, name: Name) -> None:
        """Forget the description of a block that was not stored after all."""
        block = self._blocks.get(name)
        if block is not None and not block.tiers:
            del self._blocks[name]

    def stored(self, medium: Medium, name: Name) -> None:
        """Tell that a tier has a block."""
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(self.hash_of(name))
        if block.tiers >> medium & 1:
            return
        block.tiers |= 1 << medium
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, Stored)
            and (last.medium, last.group, last.lora_index) == (medium, name[0], block.lora_index)
            and bool(last.token_ids) == bool(block.token_ids)
            and (not block.token_ids or block.parent == last.hashes[-1])
        ):
            last.hashes.append(block.hash)
            last.token_ids.extend(block.token_ids)
        else:
            token_ids = block.token_ids[:]
            self._events.append(Stored(medium, name[0], [block.hash], block.parent, token_ids, block.lora_index))

    def removed(self, medium: Medium, name: Name) -> None:
        """Tell that a tier has a block no more."""
        block = self._blocks.get(name)
        if block is None or not block.tiers >> medium & 1:
            return
        block.tiers ^= 1 << medium
        if not block.tiers:
            del self._blocks[name]
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and (last.medium, last.group) == (medium, name[0]):
            last.hashes.append(block.hash)
        else:
            self._events.append(Removed(medium, name[0], [block.hash]))

    def take(self) -> list[KvEvent]:
        """Return what was told since the last call."""
        events, self._events = self._events, []
        return events
