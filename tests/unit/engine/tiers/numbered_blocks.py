"""Blocks of different sizes whose bytes follow from their numbers, for tests of stores in several processes."""

IDENTITY = bytes(range(32))
NUM_BYTES = 4 * 2**20  # of a store


def key_of(number: int) -> bytes:
    """The key of a block."""
    return number.to_bytes(32, "little")


def size_of(number: int) -> int:
    """The bytes of a block, up to 320 KiB."""
    return (number % 10 + 1) * 32768 + number % 7


def block_of(number: int) -> bytes:
    """The bytes of a block."""
    return (number.to_bytes(4, "little") * (size_of(number) // 4 + 1))[: size_of(number)]


def is_removed(number: int) -> bool:
    """Whether the writer removes the block after it was written."""
    return number % 5 == 0
