"""The state of a disk store: its counts, its contents, and the health of its disk. Plain Python; never torch."""

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger(__name__)

MAX_ERRORS = 5  # in a row
PAUSE_S = 10.0
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk without room


@dataclass(slots=True)
class DiskCounts:
    """What a store has done since it was opened. Bytes are those of one rank."""

    num_written: int = 0
    num_evicted: int = 0
    num_damaged: int = 0  # files that were not what their names say; deleted
    num_dropped: int = 0  # blocks that were not written: a pause, an error, or no room
    num_errors: int = 0
    num_pauses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    written_s: float = 0.0


class DiskStatus(NamedTuple):
    """A store's state now."""

    num_blocks: int  # files
    num_bytes: int
    is_paused: bool
    max_bytes: int = 0
    num_ranks: int = 1  # each has a file of every block
    num_pinned_bytes: int = 0  # of num_bytes


@dataclass(slots=True)
class FolderLooks:
    """When a store has looked at its folder last, and what was written since."""

    at: float
    written_bytes: int = 0
    was_shared: bool = False
    written_names: set[bytes] = field(default_factory=set)  # while it is being looked at


@dataclass(slots=True)
class DiskHealth:
    """Decides whether the disk may be used, from the errors in a row."""

    clock: Callable[[], float]
    num_in_row: int = 0
    paused_until: float | None = None

    @property
    def is_paused(self) -> bool:
        """True while the disk is left alone."""
        return self.paused_until is not None and self.clock() < self.paused_until

    def note_success(self) -> None:
        """Note a call that the disk has answered."""
        if self.paused_until is not None:
            logger.info("the disk of --kv-disk works again")
        self.num_in_row, self.paused_until = 0, None

    def note_error(self) -> bool:
        """Note a call that failed; return whether a pause begins."""
        self.num_in_row += 1
        if self.num_in_row < MAX_ERRORS or self.is_paused:
            return False
        self.paused_until = self.clock() + PAUSE_S
        return True
