"""The form of a block's file: a header that names and checks the block, then its bytes. Plain Python; never torch.

    0    magic, 8 bytes
    8    version, 4 bytes; all numbers are little-endian
    12   zeros, 4 bytes
    16   name, 32 bytes: a hash of the cache's identity, the group and the key; also the file's name, in hexadecimal
    48   length of the block, 8 bytes
    56   checksum of the block, 16 bytes
    72   BLAKE2 of all before, 16 bytes
    88   zeros
    128  the block

Everything but the block itself is known to whoever asks for it, or is checked. So a file that is damaged, cut, of
another block, another cache or another version does not pass, whatever happened to it.
"""

import struct
from hashlib import blake2b

from engine.tiers.checksum import CHECKSUM_BYTES, checksum

HEADER_BYTES = 128
VERSION = 1
_MAGIC = b"QuireKV\n"
_FIELDS = struct.Struct(f"<8sI4x32sQ{CHECKSUM_BYTES}s")
_DIGEST_BYTES = 16


def name_of(identity: bytes, group: int, key: bytes) -> bytes:
    """Return the name of a block, 32 bytes. identity: 32 bytes, of everything on which a block's bytes depend."""
    return blake2b(group.to_bytes(4, "little") + key, key=identity, digest_size=32).digest()


def header_of(name: bytes, block: memoryview) -> bytes:
    """Return the header of a block's file."""
    fields = _FIELDS.pack(_MAGIC, VERSION, name, len(block), checksum(block))
    return (fields + _digest(fields)).ljust(HEADER_BYTES, b"\0")


def is_intact(header: bytes | bytearray, name: bytes, block: memoryview) -> bool:
    """Return whether these are the header and the bytes of the block of this name."""
    fields, rest = bytes(header[: _FIELDS.size]), bytes(header[_FIELDS.size :])
    if len(header) != HEADER_BYTES or rest != _digest(fields).ljust(HEADER_BYTES - _FIELDS.size, b"\0"):
        return False
    magic, version, named, length, expected = _FIELDS.unpack(fields)
    if (magic, version, named, length) != (_MAGIC, VERSION, name, len(block)):
        return False
    return bool(checksum(block) == expected)


def _digest(fields: bytes) -> bytes:
    return blake2b(fields, digest_size=_DIGEST_BYTES).digest()
