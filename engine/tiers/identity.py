"""CacheIdentity: everything on which the bytes of a cached block depend, beside its tokens. Plain Python; never torch.

Blocks outlive the process that computed them, so their names begin with this identity's digest
(engine/tiers/block_file.py): a block of another model, layout or split is never found. Adapters and salts differ by
request, and are in the root of its chain of hashes (engine/core/request.py), adapters by adapter_digest().

Facts that only move the last bits of a value, such as the attention backend, count as well: requests that share a
prefix then share it with requests that were computed alike. Limits that change no value, such as the size of the pool,
do not count, so that a restart with other ones finds its blocks. Versions of Quire share blocks until FORMAT is raised.

Weights count by all their bytes. Reading them takes as long as loading them, so DigestMemory remembers the digest of
each file with its device, inode, size, and times of modification and of change. A file whose bytes were replaced under
all of these is not noticed. No program can set the time of change, so that takes a clock that was set back, a write
within the clock's resolution, or a device that was written below its file system. A digest that was forged in the
folder is believed: who can write there can also write blocks. Files that change while the model loads are noticed:
stamps_of() them before the first is read equals stamps_of() them after the last.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from engine.interface.config import CacheGroup
from engine.tiers.checksum import checksum

FORMAT = 1  # raised when the values or the layout of a block change for equal facts
DIGEST_BYTES = 32
_PIECE_BYTES = 8 * 2**20
_NUM_READERS = 4
_DIGESTS_FILE = "digests.json"
_MOST_REMEMBERED = 4096  # files


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The facts; each must be given."""

    weights: bytes  # weights_digest() or digest_of_dummy(); scales of an fp8 cache are among the weights
    config_json: bytes  # the file as it is: shapes, positions, windows, norms
    model_impl: str  # quire | transformers
    quantization: str  # as applied, whether by the checkpoint or by a flag
    dtype: str
    kv_dtype: str
    is_long: bool  # longrope: the long factors are used, since the longest request exceeds the original length
    block_size: int  # tokens of a link in the chain of hashes
    groups: tuple[CacheGroup, ...]
    page_layout: str  # bytes of a page, and where each layer's part is
    tensor_parallel_size: int
    tensor_parallel_rank: int
    is_expert_parallel: bool
    device: str  # cuda | mps | cpu
    attention_backend: str

    def digest(self) -> bytes:
        """Return the digest, 32 bytes, equal in every process."""
        return blake2b(msgspec.json.encode([FORMAT, self]), digest_size=DIGEST_BYTES).digest()


class _Remembered(msgspec.Struct, array_like=True, frozen=True):
    stamp: tuple[int, ...]
    digest: bytes


class DigestMemory:
    """Digests of large files, remembered in a folder; one that is lost or damaged costs another reading."""

    def __init__(self, folder: Path | None) -> None:
        """folder: private to this user, as that of the blocks. Need not exist. None: they are not kept."""
        self._path = None if folder is None else folder / _DIGESTS_FILE
        self._digests: dict[str, _Remembered] = {}
        if self._path is None:
            return
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._digests = msgspec.json.decode(self._path.read_bytes(), type=dict[str, _Remembered])

    def find(self, path: Path, stamp: tuple[int, ...]) -> bytes | None:
        """Return the digest of a file that has this stamp, if it is known."""
        known = self._digests.get(str(path))
        return known.digest if known is not None and known.stamp == stamp else None

    def keep(self, path: Path, stamp: tuple[int, ...], digest: bytes) -> None:
        """Remember a digest until save()."""
        self._digests.pop(str(path), None)
        self._digests[str(path)] = _Remembered(stamp, digest)
        while len(self._digests) > _MOST_REMEMBERED:
            del self._digests[next(iter(self._digests))]

    def save(self) -> None:
        """Write what is remembered, whole or not at all; if it cannot be written, it is forgotten."""
        if self._path is None:
            return
        temporary = self._path.with_name(f"{_DIGESTS_FILE}.{os.getpid()}")
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as opened:
                opened.write(msgspec.json.encode(self._digests))
            temporary.rename(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()


def stamps_of(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return what tells whether files are the same later, by path; without those that are not there."""
    stamps: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            stamps[str(path)] = _stamp(path)
    return stamps


def weights_digest(paths: Sequence[Path], memory: DigestMemory) -> bytes:
    """Return the digest of a model's files of weights. Reads those that the memory does not know. Raises OSError."""
    stamps = {str(path): _stamp(path) for path in paths}
    found = {path: memory.find(path, stamps[str(path)]) for path in paths}
    unknown = [path for path, digest in found.items() if digest is None]
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        for path, digest in zip(unknown, readers.map(_read_digest, unknown), strict=True):
            found[path] = digest
            if _stamp(path) == stamps[str(path)]:
                memory.keep(path, stamps[str(path)], digest)
    if unknown:
        memory.save()
    return _joined((path.name.encode(), found[path] or b"") for path in paths)


def weights_stamp(paths: Sequence[Path]) -> bytes:
    """Return what stands for files of weights within one host, without reading them. Raises OSError."""
    return _joined((str(path).encode(), repr(_stamp(path)).encode()) for path in paths)


def digest_of_dummy(*, seed: int, generator: str) -> bytes:
    """Return what stands for random weights. generator: the library and version that draws them."""
    return blake2b(f"dummy {seed} {generator}".encode(), digest_size=DIGEST_BYTES).digest()


def adapter_digest(config_file: Path, weights_file: Path) -> bytes:
    """Return the digest of an adapter, wherever it lies and whatever its name and number are. Raises OSError."""
    return _joined([(b"config", blake2b(config_file.read_bytes()).digest()), (b"weights", _read_digest(weights_file))])


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _read_digest(path: Path) -> bytes:
    """Return the digest of a file's bytes. Leaves its pages in the system's cache, for whoever loads it."""
    whole, buffer = blake2b(digest_size=DIGEST_BYTES), bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := _fill(file.readinto, memoryview(buffer)):
            whole.update(checksum(memoryview(buffer)[:count]))
    return whole.digest()


def _fill(read_into: Callable[[memoryview], int | None], buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends, so that pieces do not depend on the system; return the bytes."""
    count = 0
    while count < len(buffer) and (more := read_into(buffer[count:])):
        count += more
    return count


def _joined(parts: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a digest of named digests, in order."""
    whole = blake2b(digest_size=DIGEST_BYTES)
    for name, digest in parts:
        whole.update(len(name).to_bytes(8, "little") + name + len(digest).to_bytes(8, "little") + digest)
    return whole.digest()
