"""StagedCopies: copies ranges of files to a GPU by several threads, each through a buffer of pinned memory.

One thread copies from the page cache at a few GB/s, and so does a driver that is given a mapped file; the GPU takes 50.
Life: __init__ → read, any number of times → close.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch

NUM_THREADS = 8
CHUNK_BYTES = 4 * 1024**2


class StagedCopies:
    """Threads and their buffers, for one device. Used by one thread at a time."""

    def __init__(self, device: torch.device, *, num_threads: int = NUM_THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._files: dict[Path, int] = {}
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(2 * num_threads):  # of each thread one is filled while another is on its way
            self._buffers.put(_Buffer(chunk_bytes, device))

    def read(self, path: Path, *, first: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the values that begin at byte `first` of a file, as a new tensor on the device.

        Blocks until the file is read; the current stream has the rest of the copies. Raises OSError, also if the file
        is too short.
        """
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        out = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        target = out.view(-1).view(torch.uint8)
        starts = range(0, target.numel(), self._chunk_bytes)
        parts = [target[start : start + self._chunk_bytes] for start in starts]
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        copies = [
            self._threads.submit(self._copy, self._files[path], first + start, part, stream)
            for start, part in zip(starts, parts, strict=True)
        ]
        for copy in copies:
            copy.result()
        return out

    def close(self) -> None:
        """End the threads and wait for all copies."""
        self._threads.shutdown()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        while not self._buffers.empty():
            self._buffers.get().await_copy()

    def _copy(self, file: int, first: int, part: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        buffer = self._buffers.get()
        try:
            buffer.await_copy()
            view, num_bytes = buffer.host.numpy().data, part.numel()
            done = 0
            while done < num_bytes:
                count = os.preadv(file, [view[done:num_bytes]], first + done)
                if count == 0:
                    raise OSError(f"it ends {num_bytes - done} bytes too early")
                done += count
            if stream is None:
                part.copy_(buffer.host[:num_bytes])
            else:
                with torch.inference_mode(), torch.cuda.stream(stream):
                    part.copy_(buffer.host[:num_bytes], non_blocking=True)
                    buffer.copied = stream.record_event()
        finally:
            self._buffers.put(buffer)


class _Buffer:
    """Host memory, pinned for a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.copied: torch.cuda.Event | None = None  # the last copy from it

    def await_copy(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
