"""Writes blocks to the store in the folder argv[1] until it is killed, the numbers from argv[2] on; for a test."""

import itertools
import sys
from pathlib import Path

from engine.tiers.block_folder import BlockFolder
from engine.tiers.disk_store import DiskStore
from tests.unit.engine.tiers.numbered_blocks import IDENTITY, NUM_BYTES, block_of, is_removed, key_of


def main() -> None:
    store = DiskStore(BlockFolder(Path(sys.argv[1])), identity=IDENTITY, size_bytes=NUM_BYTES)
    store.find_blocks()
    print("ready", flush=True)
    for number in itertools.count(int(sys.argv[2])):
        if not store.put(0, key_of(number), block_of(number)):
            sys.exit(f"block {number} was dropped")
        if is_removed(number):
            store.remove([(0, key_of(number))])


if __name__ == "__main__":
    main()
