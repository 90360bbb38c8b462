"""A block's file passes only if every byte of it is as it was written, and it is the block that is asked for."""

import random

import pytest

from engine.tiers.block_file import HEADER_BYTES, VERSION, header_of, is_intact, name_of
from engine.tiers.checksum import checksum

IDENTITY = bytes(range(32))
NAME = name_of(IDENTITY, 0, b"key")
SIZES = [0, 1, 8, 4095, 4096, 4097, 3 * 4096 + 5, 300 * 4096]


def block_of(size, seed=1):
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_intact(size):
    block = block_of(size)
    header = header_of(NAME, memoryview(block))
    assert len(header) == HEADER_BYTES
    assert is_intact(header, NAME, memoryview(block))
    assert is_intact(bytearray(header), NAME, memoryview(bytearray(block)))


def test_every_bit_of_a_header_counts():
    block = memoryview(block_of(100))
    header = header_of(NAME, block)
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        assert not is_intact(changed, NAME, block), bit
    assert not is_intact(header[:-1], NAME, block)
    assert not is_intact(b"", NAME, block)


def test_the_bits_of_a_block_count():
    block = bytearray(block_of(4096 + 40))
    header = header_of(NAME, memoryview(block))
    for bit in range(0, 8 * len(block), 7):
        block[bit // 8] ^= 1 << bit % 8
        assert not is_intact(header, NAME, memoryview(block)), bit
        block[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:4096] + bytes(4096) + data[8192:],  # a page that was not written
        lambda data: bytes(len(data)),
        lambda data: data[4096:8192] + data[:4096] + data[8192:],
        lambda data: data[8:16] + data[:8] + data[16:],
        lambda data: bytes(byte ^ 0x80 * (i % 8 == 7 and i < 16) for i, byte in enumerate(data)),  # two sign bits
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
)
def test_damage_changes_the_checksum(damage):
    data = block_of(30 * 4096 + 100)
    damaged = damage(data)
    assert len(damaged) == len(data)
    assert checksum(damaged) != checksum(data)


def test_zeros_of_different_lengths_have_different_checksums():
    assert len({checksum(bytes(size)) for size in (*SIZES, 8192)}) == len(SIZES) + 1


def test_a_checksum_is_the_same_on_every_machine():
    assert checksum(b"").hex() == "c804ce198ec337e3dc762bdd1a09aece"
    assert checksum(bytes(range(256)) * 33).hex() == "bba105dff394f0d699875f042ab3584a"


def test_a_block_of_another_name_version_or_length_is_refused():
    block = memoryview(block_of(5000))
    header = header_of(NAME, block)
    assert not is_intact(header, name_of(IDENTITY, 1, b"key"), block)
    assert not is_intact(header, NAME, block[:-1])
    newer = bytearray(header)
    newer[8] = VERSION + 1
    assert not is_intact(newer, NAME, block)


def test_a_name_depends_on_identity_group_and_key():
    others = [name_of(bytes(32), 0, b"key"), name_of(IDENTITY, 1, b"key"), name_of(IDENTITY, 0, b"kez")]
    assert len({NAME, *others}) == 4
    assert len(NAME) == 32
