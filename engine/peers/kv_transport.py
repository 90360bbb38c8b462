"""KvTransport: the seam to what copies blocks from one engine's host memory to another's. Never torch.

Both engines have their host memory in slots of equal size (engine/device/host_pages.py). A decode engine reads: it
names slots of the peer and slots of its own, and takes the Reading back when it is done. Who owns the bytes does
nothing for a read, but leaves them as they are until it is told (engine/peers/messages.py, Taken).

Implementations: SharedMemory (engine/peers/shared_memory.py), for engines of one host, and NixlTransport
(engine/peers/nixl.py). Of a split model each rank has one (engine/tensor_parallel/peer_shares.py).
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Reading:
    """A copy of slots out of a peer's memory."""

    peer: int
    sources: list[int]  # the peer's slots
    targets: list[int]  # as many slots of one's own
    is_done: bool = False
    is_whole: bool = False  # once it is done: all targets have their bytes; else what they have is undefined


class KvTransport(Protocol):
    """Copies slots. Calls come from one thread, the engine's loop, and do not wait for copies."""

    @property
    def memory(self) -> bytes:
        """What a peer needs for connect(), to read this engine's slots."""
        ...

    def connect(self, peer: int, memory: bytes) -> None:
        """Get access to a peer's slots, in place of those of its former process. Raises OSError if that fails."""
        ...

    def disconnect(self, peer: int) -> None:
        """Give up access to a peer's slots, when the copies from it are done. Without access this does nothing."""
        ...

    def read(self, peer: int, sources: list[int], targets: list[int]) -> Reading:
        """Begin to copy slots of a connected peer. The targets are undefined until the reading is taken back."""
        ...

    def take_done(self) -> list[Reading]:
        """Take back the readings that are done."""
        ...
