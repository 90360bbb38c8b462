"""Blocks on disk: a file for each against segments, and checksums: python -m benchmarks.kv_disk FOLDER [--json FILE].

Writes blocks of three sizes to a disk by DiskStore, a file each, and as segments: files of 64 MiB to which headers and
blocks are appended, of which the index is rebuilt by reading every header. Never torch. Cold numbers need root, to drop
the system's cache; without, they are left out.
"""

import argparse
import hashlib
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import format_table, now, write_report
from engine.tiers.block_file import HEADER_BYTES, name_of
from engine.tiers.block_folder import BlockFolder
from engine.tiers.checksum import checksum
from engine.tiers.disk_store import DiskStore

SEGMENT_BYTES = 64 << 20
SIZES = (32 << 10, 2 << 20, 12 << 20)
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
Row = dict[str, Any]


def measure_checksums() -> list[Row]:
    """Return the rates of checksums on one thread, the best of five."""
    functions: dict[str, Callable[[bytes], object]] = {
        "Quire's": checksum,
        "zlib.crc32": zlib.crc32,
        "SHA-256": hashlib.sha256,
        "BLAKE2b": hashlib.blake2b,
    }
    rows = []
    for size in SIZES:
        data, times = os.urandom(size), max((8 << 20) // size, 1)
        for name, function in functions.items():
            best = min(_timed(partial(_repeat, function, data, times)) for _ in range(5))
            rows.append({"checksum": name, "block_kib": size >> 10, "gb_per_s": times * size / best / 1e9})
    return rows


def measure_files(folder: Path, size: int, num_blocks: int) -> Row:
    """Return the rates of DiskStore."""
    block, out = memoryview(os.urandom(size)), memoryview(bytearray(size))
    keys = [number.to_bytes(32, "little") for number in range(num_blocks)]

    def open_store() -> DiskStore:
        return DiskStore(BlockFolder(folder), identity=bytes(32), size_bytes=2 * num_blocks * (size + 8192))

    def find_blocks() -> None:
        again = open_store()
        again.find_blocks()
        assert again.status.num_blocks == num_blocks
        again.close()

    def read(some: list[bytes]) -> None:
        assert all(store.get(0, key, out) for key in some)

    store = open_store()
    row: Row = {"form": "a file each", "block_kib": size >> 10, "num_blocks": num_blocks}
    written_s = _timed(lambda: [store.put(0, key, block) for key in keys])
    row |= {"written_per_s": num_blocks / written_s, "written_gb_per_s": num_blocks * size / written_s / 1e9}
    row["flush_s"] = _timed(os.sync)
    row["found_us"] = _timed(find_blocks) / num_blocks * 1e6
    row["found_cold_us"] = _cold(find_blocks, num_blocks)
    some = keys[:: max(num_blocks // 500, 1)]
    read_s = _cold(lambda: read(some), len(some))
    row["read_cold_gb_per_s"] = read_s and size / (read_s / 1e6) / 1e9
    row["read_gb_per_s"] = len(some) * size / _timed(lambda: read(some)) / 1e9
    store.close()
    with BlockFolder(folder) as files:
        names = [name_of(bytes(32), 0, key) for key in keys]
        row["deleted_us"] = _timed(partial(_each, partial(_delete, files), names)) / num_blocks * 1e6
    return row


def _delete(files: BlockFolder, name: bytes) -> None:
    files.remove(name)


def measure_segments(folder: Path, size: int, num_blocks: int) -> Row:
    """Return the rates of the same blocks in segments."""
    block, header = os.urandom(size), bytes(HEADER_BYTES)
    per_segment = max(SEGMENT_BYTES // (HEADER_BYTES + size), 1)
    paths = [folder / f"{first}.segment" for first in range(0, num_blocks, per_segment)]

    def write() -> None:
        for number, path in enumerate(paths):
            with path.open("xb", buffering=0) as file:
                for _ in range(min(per_segment, num_blocks - number * per_segment)):
                    checksum(block)
                    os.writev(file.fileno(), [header, block])

    def find_blocks() -> None:
        num_found = 0
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while os.pread(file.fileno(), HEADER_BYTES, file.tell()):
                    file.seek(HEADER_BYTES + size, os.SEEK_CUR)
                    num_found += 1
        assert num_found == num_blocks

    row: Row = {"form": "segments", "block_kib": size >> 10, "num_blocks": num_blocks}
    written_s = _timed(write)
    row |= {"written_per_s": num_blocks / written_s, "written_gb_per_s": num_blocks * size / written_s / 1e9}
    row["flush_s"] = _timed(os.sync)
    row["found_us"] = _timed(find_blocks) / num_blocks * 1e6
    row["found_cold_us"] = _cold(find_blocks, num_blocks)
    row["deleted_us"] = _timed(partial(_each, Path.unlink, paths)) / len(paths) * 1e6  # of a whole segment
    return row


def _repeat(function: Callable[[bytes], object], data: bytes, times: int) -> None:
    for _ in range(times):
        function(data)


def _each(function: Callable[[Any], None], arguments: Sequence[Any]) -> None:
    for argument in arguments:
        function(argument)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _cold(call: Callable[[], object], count: int) -> float | None:
    """Return the microseconds per block of a call that finds nothing in the system's cache; None: that needs root."""
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        return None
    return _timed(call) / count * 1e6


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_disk", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder on the disk, in which a new one is made and deleted")
    parser.add_argument("--mib", type=int, default=1024, help="written for each row (default: 1024)")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    checksums, rows = measure_checksums(), []
    for size in SIZES:
        for measure in (measure_segments, measure_files):
            folder = arguments.folder / "kv-disk-measurement"
            folder.mkdir()
            try:
                rows.append(measure(folder, size, (arguments.mib << 20) // size))
            finally:
                shutil.rmtree(folder)
                os.sync()
    for table in (checksums, rows):
        names = list(dict.fromkeys(name for row in table for name in row))
        print(format_table([names, *([_text(row.get(name)) for name in names] for row in table)]))
    if arguments.json is not None:
        settings = {"mib": arguments.mib, "segment_mib": SEGMENT_BYTES >> 20}
        write_report(
            arguments.json, {"kind": "kv-disk", "date": now(), **settings, "checksums": checksums, "rows": rows}
        )
    return 0


def _text(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
