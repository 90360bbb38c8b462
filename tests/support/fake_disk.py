"""FakeDisk: what the engine sees of a disk behind host memory, in a dictionary. Its threads are turns of the loop.

Blocks outlive the engine: give the dictionary to the next one. A test may let it be slow, lose blocks, and refuse them.
"""

from engine.core.disk_tier import DiskParts
from engine.tiers.disk_state import DiskCounts, DiskStatus
from engine.tiers.store_threads import Transfer


class Slot(int):
    """Stands for the memory of a slot."""

    nbytes = 1


class FakeDisk:
    def __init__(self, harness, blocks=None):
        self.blocks = {} if blocks is None else blocks  # by name: what the executor had in the slots
        self.polls_until_done = 1
        self.is_hanging = False
        self.refuses = lambda name: False  # to write
        self.loses = lambda name: False  # when it reads
        self.log = []  # of the names that were read
        self._host = harness.executor._host
        self._queued = []  # [transfer, polls left]
        self.num_dropped = self.num_queued_bytes = 0
        self._watched = set()
        self.counts = DiskCounts()
        self.status = DiskStatus(0, 0, is_paused=False)
        self.pinned = {}  # by name: owner and seconds, in the order of pinning
        harness.scheduler.kv.tiers.open_disk(DiskParts(threads=self, slot_memory=Slot, facts=self, pins=self))

    def has(self, group, key):
        return (group, key) in self.blocks

    def put(self, group, key, parts, *, slots):
        if self.refuses((group, key)):
            return None
        return self._queue(Transfer(group, key, parts, is_read=False))

    def get(self, group, key, parts, *, slots):
        self.log.append((group, key))
        return self._queue(Transfer(group, key, parts, is_read=True))

    def evict(self, name):
        """Lose a block, as for want of room."""
        del self.blocks[name]

    def watch(self, group, key):
        if (group, key) not in self.blocks:
            return False
        self._watched.add((group, key))
        return True

    def take_lost(self):
        lost = self._watched - self.blocks.keys()
        self._watched -= lost
        return sorted(lost)

    def call(self, function, *, num_blocks):
        function()
        return True

    def pin(self, names, *, owner, for_s):
        assert all(name in self.blocks for name in names)
        self.pinned.update(dict.fromkeys(names, (owner, for_s)))

    def pinned_for_s(self, group, key):
        return self.pinned.get((group, key), ("", 0.0))[1]

    def cancel(self, transfer):
        transfer.is_cancelled = True

    def remove(self, names):
        for name in names:
            self.blocks.pop(name, None)
            for transfer, _ in self._queued:
                if (transfer.group, transfer.key) == name:
                    transfer.is_cancelled = True

    def take_done(self):
        if self.is_hanging:
            return []
        for entry in self._queued:
            entry[1] -= 1
        done = [transfer for transfer, left in self._queued if left <= 0]
        self._queued = [entry for entry in self._queued if entry[1] > 0]
        for transfer in done:
            if not transfer.is_cancelled:
                self._run(transfer)
        return done

    @property
    def num_queued(self):
        return len(self._queued)

    def _queue(self, transfer):
        self._queued.append([transfer, self.polls_until_done])
        return transfer

    def _run(self, transfer):
        name = (transfer.group, transfer.key)
        if not transfer.is_read:
            self.blocks[name] = [(list(self._host[slot][0]), self._host[slot][1]) for slot in transfer.parts]
            transfer.is_kept = True
        elif name in self.blocks and not self.loses(name):
            for slot, (memory, kinds) in zip(transfer.parts, self.blocks[name], strict=True):
                self._host[slot] = (list(memory), kinds)
            transfer.is_kept = True
