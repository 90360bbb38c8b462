"""A disk store in a folder of a test, with clocks that the test sets and a device that fails when it says so."""

import os
import time

from engine.tiers.block_file import HEADER_BYTES, name_of
from engine.tiers.block_folder import FOLDER_NAME, BlockFolder, bytes_on_disk
from engine.tiers.disk_store import DiskStore

IDENTITY = bytes(range(32))
SIZE = 5000
EACH = bytes_on_disk(SIZE)


def block(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(2, "little") * (size // 2)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Wall:
    """The clock of the host, which a test may set."""

    def __init__(self):
        self.now_ns = None

    def __call__(self):
        return time.time_ns() if self.now_ns is None else self.now_ns


class FaultyFolder(BlockFolder):
    """Raises an error of the device instead of doing some of its calls."""

    fault: int | None = None
    calls: tuple[str, ...] = ("_write_all", "_fill")
    times = 1 << 30

    def _fail(self, call):
        if self.fault is not None and call in self.calls and self.times:
            self.times -= 1
            raise OSError(self.fault, os.strerror(self.fault))

    def _write_all(self, file, data):
        if len(data) > HEADER_BYTES:
            os.write(file, bytes(data[:1000]))
            self._fail("_write_all")
            os.lseek(file, HEADER_BYTES, os.SEEK_SET)
        super()._write_all(file, data)

    def _fill(self, file, header, out):
        self._fail("_fill")
        return super()._fill(file, header, out)

    def set_time(self, name, used_ns):
        self._fail("set_time")
        super().set_time(name, used_ns)

    def remove(self, name):
        self._fail("remove")
        return super().remove(name)

    def scan(self, pause):
        self._fail("scan")
        return super().scan(pause)


class Opened:
    """A store with what a test wants to see of it."""

    def __init__(self, path, *, num_blocks=100, identity=IDENTITY, folder=BlockFolder):
        self.clock = Clock()
        self.path = path / FOLDER_NAME
        self.folder = folder(path)
        size = num_blocks * EACH
        self.wall = Wall()
        self.store = DiskStore(
            self.folder,
            identity=identity,
            size_bytes=size,
            pin_share=0.25,
            clock=self.clock,
            wall_ns=self.wall,
            sleep=lambda seconds: None,
        )
        self.store.find_blocks()

    def put(self, *numbers):
        return [self.store.put(0, key(number), block(number)) for number in numbers]

    def get(self, number, size=SIZE):
        out = bytearray(size)
        return bytes(out) if self.store.get(0, key(number), memoryview(out)) else None

    def kept(self, numbers):
        """The blocks that are there; each must be right."""
        found = {number: self.get(number) for number in numbers}
        assert all(data in (None, block(number)) for number, data in found.items())
        return [number for number, data in found.items() if data is not None]

    def file(self, number):
        return self.path / f"{name_of(IDENTITY, 0, key(number)).hex()}.kv"

    def num_bytes(self):
        return sum(bytes_on_disk(file.stat().st_size - HEADER_BYTES) for file in self.path.glob("*.kv"))
