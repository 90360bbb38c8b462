"""BlockStore: the seam to a store of published blocks behind host memory, such as a disk. Plain Python; never torch.

A block is the bytes of the pages of one group of layers, named by the group's number and its key: the hash of all
tokens before its end (engine/core/request.py). The bytes of equal names are equal, so a block is written once and never
changed. A store belongs to one rank and one kind of cache: whoever opens it makes sure that weights, dtypes, page
layout and rank are the same as when its blocks were written.

A store is bounded and may lose any block at any time. Losing one costs a computation; returning other bytes than were
put would be a wrong answer, so a store checks what it reads.
Calls: has(), put(), get() and remove() may come from several threads. has() answers from memory, since the engine's
loop asks it; put() and get() may wait for a device, so the loop never calls them.
"""

from collections.abc import Sequence
from typing import Protocol


class BlockStore(Protocol):
    """Keeps blocks by group and key. Errors of its device are misses, which it counts and logs; it never raises them.

    Life: open, by its own constructor → has, put, get, remove in any order → close().
    """

    def has(self, group: int, key: bytes) -> bool:
        """Return whether get() would find the block now, as far as is known. Does not wait."""
        ...

    def put(self, group: int, key: bytes, data: bytes | memoryview) -> bool:
        """Keep a copy of a block; return whether it is kept now. May wait for the device.

        False: the store is full of better ones, or the device is slow or failing. data: read before the call returns.
        """
        ...

    def get(self, group: int, key: bytes, out: memoryview) -> bool:
        """Fill `out`, which is as large as the block, and return True; False: not found. May wait for the device.

        After False the bytes of `out` are undefined: a damaged block may have been read into it.
        """
        ...

    def remove(self, names: Sequence[tuple[int, bytes]]) -> None:
        """Forget blocks, by group and key, that are there: their values are not finite.

        None must be found again, even after a crash. Many at once cost one wait for the device.
        """
        ...

    def close(self) -> None:
        """Finish what was put, and release files and threads. No call follows."""
        ...
