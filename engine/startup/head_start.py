"""begin_head_start(): does in threads what needs no torch, while the main thread imports it. Standard library only.

These threads wait for a disk, a driver, the linker or a hash, and let the interpreter go on meanwhile:
- the checkpoint's files are read into the page cache, from where the loader takes them,
- the CUDA context is created, which torch then finds,
- torch's libraries are linked, which `import torch` would do with the interpreter's lock held,
- Triton hashes itself, several hundred MB, to look up compiled kernels.
While the libraries are linked, an import of any other compiled module waits, with the interpreter's lock, and so does
the search for a function in a library: the main thread does first what needs neither, and no thread needs them.
Each is done again, more slowly, where it is needed, so an error here is of no account.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from engine.interface.config import EngineConfig

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 16 * 1024**2
_SENT_BYTES = 1024**3
_MOST_OF_MEMORY = 0.7  # a larger checkpoint would push out its own first files


class HeadStart:
    """The running threads. Life: begin_head_start() → join() or describe(), or neither."""

    def __init__(self, works: Mapping[str, Callable[[], object]]) -> None:
        """Start a thread for each of `works`, by name."""
        self._started_s = time.monotonic()
        self._ended_s: dict[str, float] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(name, work), name="head-start", daemon=True)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all threads. Blocks."""
        for thread in self._threads:
            thread.join()

    def describe(self) -> str:
        """Return when each thread ended that has, in seconds after the start: "context 0.41, torch 1.20"."""
        return ", ".join(f"{name} {ended_s - self._started_s:.2f}" for name, ended_s in self._ended_s.copy().items())

    def _run(self, name: str, work: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            work()
        self._ended_s[name] = time.monotonic()


def begin_head_start(config: EngineConfig, *, may_use_device: bool = True) -> HeadStart:
    """Start the threads that are of use with this configuration, and link the driver before. Does not block else.

    may_use_device: False leaves the CUDA context, which takes memory of the device.
    """
    works: dict[str, Callable[[], object]] = {}
    is_linked = threading.Event()
    has_device = config.device in ("auto", "cuda")
    if has_device and config.tensor_parallel_size == 1 and may_use_device:  # else each rank has its own device
        works["context"] = context_maker()
    if config.load_format != "dummy":
        works["weights"] = lambda: read_ahead(Path(config.model))
    link_torch = torch_linker()

    def link() -> None:
        try:
            link_torch()
        finally:
            is_linked.set()

    def hash_after() -> None:  # its import would wait for the linker, with the interpreter's lock
        is_linked.wait()
        hash_triton()

    works["torch"] = link
    if has_device:
        works["triton"] = hash_after
    return HeadStart(works)


def read_ahead(folder: Path) -> int:
    """Read the folder's weights into the page cache, if memory has room for them; return the bytes read. Blocks."""
    started_s, num_bytes = time.monotonic(), 0
    with contextlib.suppress(OSError, ValueError):
        files = _weight_files(folder)
        if sum(file.stat().st_size for file in files) > _MOST_OF_MEMORY * _available_bytes():
            return 0
        for file in files:
            try:
                num_bytes += _send(file)
            except (AttributeError, OSError):  # not Linux, or a filesystem that cannot
                num_bytes += _read(file)
    logger.info("weights read ahead bytes=%d seconds=%.1f", num_bytes, time.monotonic() - started_s)
    return num_bytes


def _send(file: Path) -> int:
    """Read a file into the page cache without a copy, a gigabyte at a time: each wants the interpreter's lock again."""
    num_bytes = 0
    with file.open("rb", buffering=0) as source, open(os.devnull, "wb", buffering=0) as nowhere:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := os.sendfile(nowhere.fileno(), source.fileno(), num_bytes, _SENT_BYTES):
            num_bytes += count
    return num_bytes


def _read(file: Path) -> int:
    num_bytes, buffer = 0, bytearray(_CHUNK_BYTES)
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            num_bytes += count
    return num_bytes


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that loading reads: those of the index, or the single file. Raises OSError, ValueError."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    weight_map = json.loads(index.read_bytes()).get("weight_map", {})
    return [folder / name for name in sorted({Path(str(file)).name for file in weight_map.values()})]


def context_maker() -> Callable[[], bool]:
    """Return what creates the primary context of the first CUDA device. It returns whether there is one, and blocks.

    The driver is linked and its functions are found before: while torch is linked, both would wait for that, with the
    interpreter's lock held.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # calls of a CDLL let other threads run
        init, get_device, retain = driver.cuInit, driver.cuDeviceGet, driver.cuDevicePrimaryCtxRetain
    except (OSError, AttributeError):
        return lambda: False

    def create() -> bool:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        has_device = init(0) == 0 and get_device(ctypes.byref(device), 0) == 0
        return has_device and retain(ctypes.byref(context), device) == 0

    return create


def torch_linker() -> Callable[[], bool]:
    """Return what loads and links torch's libraries, but the one that calls Python: `import torch` finds them then.

    It returns whether that worked, blocks, and needs the interpreter's lock only before and after: unlike an import, or
    ctypes.CDLL. It does nothing where it is not known how.
    """
    try:
        spec = importlib.util.find_spec("torch")  # imports nothing
        dlopen = ctypes.CDLL(None).dlopen
    except (ImportError, ValueError, OSError, AttributeError, TypeError):  # as on other systems
        return lambda: False
    if sys.platform != "linux" or spec is None or spec.origin is None:
        return lambda: False
    # the one that needs all others, which are found as torch's own import finds them
    library = os.fsencode(Path(spec.origin).parent / "lib" / "libtorch.so")
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    return lambda: dlopen(library, os.RTLD_NOW) is not None


def hash_triton() -> None:
    """Let Triton compute and keep the part of its cache keys that identifies its version, if there is CUDA. Blocks."""
    try:
        ctypes.CDLL("libcuda.so.1")
        import triton.runtime.cache
    except (ImportError, OSError):  # no driver, no Triton, or another version, which computes it at the first launch
        return
    with _whole_files(triton.runtime.cache):
        triton.runtime.cache.triton_key()


@contextlib.contextmanager
def _whole_files(module: ModuleType) -> Iterator[None]:
    """Let a module read files whole, however much it asks for: by the MiB, each wants the interpreter's lock again."""
    namespace = vars(module)
    namespace["open"] = lambda path, mode="r", **options: (_WholeFile if mode == "rb" else open)(path, mode, **options)
    try:
        yield
    finally:
        del namespace["open"]


class _WholeFile:
    """A file whose first read returns all of it, as pages of the page cache."""

    def __init__(self, path: str, mode: str) -> None:
        with open(path, mode) as file:
            is_empty = os.fstat(file.fileno()).st_size == 0
            self._rest: mmap.mmap | bytes = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> _WholeFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._rest = b""

    def read(self, _: int = -1) -> mmap.mmap | bytes:
        """Return what is left, more than was asked for."""
        content, self._rest = self._rest, b""
        return content


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
