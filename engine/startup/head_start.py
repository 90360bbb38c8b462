"""begin_head_start(): does in threads what needs no torch, while the main thread imports it. Standard library only.

These threads wait for a disk, a driver or a hash, and let the interpreter go on meanwhile:
- the checkpoint's files are read into the page cache, from where the loader takes them,
- the CUDA context is created, which torch then finds,
- Triton hashes itself, several hundred MB, to look up compiled kernels.
Each is done again, more slowly, where it is needed, so an error here is of no account.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.interface.config import EngineConfig

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 16 * 1024**2
_MOST_OF_MEMORY = 0.7  # a larger checkpoint would push out its own first files


def begin_head_start(config: EngineConfig, *, may_use_device: bool = True) -> list[threading.Thread]:
    """Start the threads that are of use with this configuration, and return them. Does not block.

    may_use_device: False leaves the CUDA context, which takes memory of the device.
    """
    work: list[Callable[[], object]] = []
    if config.load_format != "dummy":
        work.append(lambda: read_ahead(Path(config.model)))
    if config.device in ("auto", "cuda"):
        work.append(hash_triton)
        if config.tensor_parallel_size == 1 and may_use_device:  # else each rank has its own device
            work.append(create_context)
    threads = [threading.Thread(target=run, name="head-start", daemon=True) for run in work]
    for thread in threads:
        thread.start()
    return threads


def read_ahead(folder: Path) -> int:
    """Read the folder's weights into the page cache, if memory has room for them; return the bytes read. Blocks."""
    started_s, num_bytes = time.monotonic(), 0
    with contextlib.suppress(OSError, ValueError):
        files = _weight_files(folder)
        if sum(file.stat().st_size for file in files) > _MOST_OF_MEMORY * _available_bytes():
            return 0
        buffer = bytearray(_CHUNK_BYTES)
        for file in files:
            with file.open("rb", buffering=0) as source:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while count := source.readinto(buffer):
                    num_bytes += count
    logger.info("weights read ahead bytes=%d seconds=%.1f", num_bytes, time.monotonic() - started_s)
    return num_bytes


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that loading reads: those of the index, or the single file. Raises OSError, ValueError."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    weight_map = json.loads(index.read_bytes()).get("weight_map", {})
    return [folder / name for name in sorted({Path(str(file)).name for file in weight_map.values()})]


def create_context() -> bool:
    """Create the primary context of the first CUDA device; return True if there is one. Blocks."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")  # calls of a CDLL let other threads run
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            return driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    return False


def hash_triton() -> None:
    """Let Triton compute and keep the part of its cache keys that identifies its version, if there is CUDA. Blocks."""
    try:
        ctypes.CDLL("libcuda.so.1")
        from triton.runtime.cache import triton_key
    except (ImportError, OSError):  # no driver, no Triton, or another version, which computes it at the first launch
        return
    triton_key()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
