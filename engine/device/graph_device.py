"""CudaGraphDevice captures what a function launches as a CUDA graph, in pieces if it is interrupted. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch


class Interruption:
    """Pauses a capture between two layers as soon as something else is to be done."""

    def __init__(self) -> None:
        self.is_wanted: Callable[[], bool] | None = None  # set while a capture may pause
        self.pause: Callable[[], None]  # returns when the capture is to go on; set with is_wanted

    def check(self) -> None:
        """Pause the capture under way if it is to pause."""
        if self.is_wanted is not None and self.is_wanted():
            self.pause()


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Launch it."""
        ...


class GraphDevice(Protocol):
    """Captures steps: CudaGraphDevice, or the fake in tests/support/fake_graphs.py."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record what `run` launches, executing nothing; return the graph and the place of its output."""
        ...

    def outside_capture(self) -> contextlib.AbstractContextManager[None]:
        """Called by `run`: what is launched inside is executed, by any thread. The graph gets one more piece."""
        ...

    def begin_thread(self) -> None:
        """Prepare the calling thread for captures. Blocks."""
        ...

    def time(self, graph: Graph) -> float:
        """Replay a graph; return its seconds on the device. Blocks."""
        ...

    def synchronize(self) -> None:
        """Wait for everything launched."""
        ...


class _Pieces:
    """A step captured in pieces, which are replayed one after the other."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.is_open = False  # whether the last one is being captured

    def end(self) -> None:
        """End the piece."""
        self.graphs[-1].capture_end()
        self.is_open = False

    def replay(self) -> None:
        """See Graph.replay."""
        for graph in self.graphs:
            graph.replay()


class CudaGraphDevice:
    """Captures on one stream into one memory pool, so that all graphs share the activations of the largest.

    torch.cuda.graph would also wait for the device and empty the allocator's cache before each capture.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._index = torch.cuda.current_device()
        self._pieces = _Pieces()  # of the capture under way

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See GraphDevice.capture. Its kernels must have been loaded."""
        self._pieces = pieces = _Pieces()
        with torch.cuda.stream(self._stream):
            self._begin(pieces)
            try:
                output = run()
                pieces.end()
            except BaseException:
                if pieces.is_open:
                    self._leave(pieces)
                raise
        return pieces.graphs[0] if len(pieces.graphs) == 1 else pieces, output

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        """See GraphDevice.outside_capture. Activations stay in the pool meanwhile, and others may be captured."""
        pieces = self._pieces
        pieces.end()
        yield
        self._pieces = pieces
        self._begin(pieces)

    def begin_thread(self) -> None:
        """See GraphDevice.begin_thread: a thread has its own device and handle of cuBLAS, which no capture can make."""
        torch.cuda.set_device(self._index)
        with torch.cuda.stream(self._stream):
            one = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
            torch.mm(one, one)
            self._stream.synchronize()

    def _begin(self, pieces: _Pieces) -> None:
        """Begin to capture the next piece."""
        graph = torch.cuda.CUDAGraph()
        # thread_local, since a thread of NCCL queries events during the capture
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        pieces.graphs.append(graph)
        pieces.is_open = True

    def _leave(self, pieces: _Pieces) -> None:
        """End a capture that failed, so that others can follow."""
        try:
            pieces.end()
        except RuntimeError:  # the error ended it, but for the allocator, which would refuse to free memory
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()

    def time(self, graph: Graph) -> float:
        """See GraphDevice.time."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        """See GraphDevice.synchronize."""
        torch.cuda.synchronize()
