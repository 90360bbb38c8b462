"""DecodeGraphs: the forward pass of a decode-only step as CUDA graphs, one per padded number of rows.

A graph reads DeviceState by the req_index values in one fixed buffer, so a replay needs nothing from the host but, when
the set of decoding requests changed, that buffer. Rows past the real ones point at the state's padding row. Captured
largest first into one memory pool, so that all sizes share the largest one's activations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RunDecode = Callable[[torch.Tensor], torch.Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the padded batch sizes, ascending: fine where a step is short, by 16 above 32, by 32 above 128."""
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, *range(48, 129, 16), *range(160, max_num_seqs + 32, 32)]
    fitting = [size for size in sizes if size < max_num_seqs]
    return [*fitting, max_num_seqs]


class DecodeGraphs:
    """Captures `run_decode` (req_index [B] int64 → logits [B, V], no sync inside) and replays it."""

    def __init__(self, run_decode: RunDecode, *, max_num_seqs: int, padding_row: int, device: torch.device) -> None:
        self._run_decode = run_decode
        self._padding_row = padding_row
        self._sizes = graph_sizes(max_num_seqs)
        # [max_num_seqs] int64: what every graph reads
        self._req_index = torch.full((max_num_seqs,), padding_row, dtype=torch.int64, device=device)
        self._num_rows = 0
        self._loaded: torch.Tensor | None = None  # the decode rows whose indices are in the buffer
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._pool: tuple[int, int] | None = None

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture every size. Blocks; on_progress(done, total) after each."""
        for done, size in enumerate(reversed(self._sizes), start=1):
            self._capture_one(size)
            on_progress(done, len(self._sizes))

    def replay(self, req_index: torch.Tensor) -> torch.Tensor:
        """Launch the step of these rows ([R] int64); return logits [R, V], valid until the next replay."""
        num_rows = req_index.shape[0]
        size = next(size for size in self._sizes if size >= num_rows)
        if self._loaded is not req_index:
            self._req_index[:num_rows].copy_(req_index)
            if self._num_rows > num_rows:
                self._req_index[num_rows : self._num_rows].fill_(self._padding_row)
            self._num_rows, self._loaded = num_rows, req_index
        self._graphs[size].replay()
        return self._logits[size][:num_rows]

    def _capture_one(self, size: int) -> None:
        rows = self._req_index[:size]
        self._run_decode(rows)  # compiles kernels and fills library caches outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._logits[size] = self._run_decode(rows)
        self._pool = graph.pool()
        self._graphs[size] = graph
