"""Forward passes as CUDA graphs: a replay costs the host microseconds where launching every kernel costs milliseconds.

DecodeGraphs: one token per row, by padded number of rows. A graph reads DeviceState by the req_index values in one
fixed buffer, so a replay needs nothing from the host but, when the set of decoding requests changed, that buffer. Rows
past the real ones point at the state's padding row.
MixedGraphs: rows of any length, by padded number of tokens and of rows, from fixed copies of an InputBatch.
Both end at the last hidden states: logits are a hundred times larger, and each graph would keep its own. Captured
largest first into one memory pool, so that all sizes share the largest one's activations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from engine.input_batch import InputBatch
from kernels.attention.base import AttentionMetadata

RunDecode = Callable[[torch.Tensor], torch.Tensor]
GraphPool = tuple[int, int]
RunMixed = Callable[[InputBatch], torch.Tensor]

# Padded numbers of tokens, and with each the padded numbers of rows: few large steps, which do not feel wasted rows
TOKEN_SIZES = (32, 64, 128, 192, 256, 384, 512, 576, 640, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192)
SMALL_ROWS, SMALL_ROWS_MAX_TOKENS = 32, 2048


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the padded batch sizes, ascending: fine where a step is short, by 16 above 32, by 32 above 128."""
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, *range(48, 129, 16), *range(160, max_num_seqs + 32, 32)]
    fitting = [size for size in sizes if size < max_num_seqs]
    return [*fitting, max_num_seqs]


class DecodeGraphs:
    """Captures `run_decode` (req_index [B] int64 → hidden [B, hidden_size], no sync inside) and replays it."""

    def __init__(self, run_decode: RunDecode, *, max_num_seqs: int, padding_row: int, device: torch.device) -> None:
        self._run_decode = run_decode
        self._padding_row = padding_row
        self._sizes = graph_sizes(max_num_seqs)
        # [max_num_seqs] int64: what every graph reads
        self._req_index = torch.full((max_num_seqs,), padding_row, dtype=torch.int64, device=device)
        self._num_rows = 0
        self._loaded: torch.Tensor | None = None  # the decode rows whose indices are in the buffer
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, torch.Tensor] = {}

    @property
    def num_graphs(self) -> int:
        """How many graphs capture() makes."""
        return len(self._sizes)

    def capture(self, pool: GraphPool, on_captured: Callable[[], None]) -> None:
        """Capture every size into `pool`. Blocks; on_captured() after each."""
        for size in reversed(self._sizes):
            rows = self._req_index[:size]
            self._graphs[size], self._hidden[size] = _capture(lambda rows=rows: self._run_decode(rows), pool)
            on_captured()

    def replay(self, req_index: torch.Tensor) -> torch.Tensor:
        """Launch the step of these rows ([R] int64); return hidden [R, hidden_size], valid until the next replay."""
        num_rows = req_index.shape[0]
        size = next(size for size in self._sizes if size >= num_rows)
        if self._loaded is not req_index:
            self._req_index[:num_rows].copy_(req_index)
            if self._num_rows > num_rows:
                self._req_index[num_rows : self._num_rows].fill_(self._padding_row)
            self._num_rows, self._loaded = num_rows, req_index
        self._graphs[size].replay()
        return self._hidden[size][:num_rows]


class MixedGraphs:
    """Captures `run_mixed` (InputBatch → hidden [R, hidden_size], no sync inside) and replays it."""

    def __init__(
        self, run_mixed: RunMixed, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._run_mixed = run_mixed
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._sizes = [(t, self._padded_rows(t, rows)) for t in TOKEN_SIZES for rows in (1, max_num_seqs)]
        self._sizes = list(dict.fromkeys(self._sizes))
        max_rows, max_tokens = max_num_seqs + 1, TOKEN_SIZES[-1]
        max_blocks = -(-max(max_model_len, max_tokens) // block_size)
        # what every graph reads; one row more than requests, for the tokens of padding
        self._input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._query_start_loc = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}
        self.tokens_per_s = 0.0  # of a large step, measured after the capture: all but attention over long contexts
        self._launch_s = 0.0  # host time to launch one step without a graph

    @property
    def num_graphs(self) -> int:
        """How many graphs capture() makes."""
        return len(self._sizes)

    def capture(self, pool: GraphPool, on_captured: Callable[[], None]) -> None:
        """Capture every pair of sizes into `pool`. Blocks; on_captured() after each."""
        for num_tokens, num_rows in reversed(self._sizes):
            # one row holds all tokens while capturing: any shape of batch gives the same kernels
            self._query_start_loc[1:].fill_(num_tokens)
            self._seq_lens.fill_(num_tokens)
            batch = self._view(num_tokens, num_rows)
            key = num_tokens, num_rows
            self._graphs[key], self._hidden[key] = _capture(lambda batch=batch: self._run_mixed(batch), pool)
            on_captured()
        self._measure()

    def is_faster(self, num_tokens: int) -> bool:
        """Whether a graph, padding included, beats launching a step of num_tokens kernel by kernel."""
        size = next((size for size in TOKEN_SIZES if size >= num_tokens), None)
        return size is not None and size / self.tokens_per_s <= max(self._launch_s, num_tokens / self.tokens_per_s)

    def fitting_size(self, seconds: float) -> int:
        """The padded number of tokens whose step takes nearest to `seconds`."""
        return min(TOKEN_SIZES, key=lambda size: abs(math.log(size / self.tokens_per_s / seconds)))

    def replay(self, batch: InputBatch) -> torch.Tensor:
        """Launch the step; return hidden [R, hidden_size] of each row's last token, valid until the next replay."""
        num_tokens, num_rows = batch.input_ids.shape[0], batch.req_index.shape[0]
        t = next(size for size in TOKEN_SIZES if size >= num_tokens)
        r = self._padded_rows(t, num_rows)
        metadata = batch.attention
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slots[:num_tokens].copy_(metadata.slot_mapping)
        self._slots[num_tokens:t].zero_()
        self._query_start_loc[: num_rows + 1].copy_(metadata.query_start_loc)
        self._query_start_loc[num_rows + 1 : r + 2].fill_(t)
        self._seq_lens[:num_rows].copy_(metadata.seq_lens)
        self._seq_lens[num_rows : num_rows + 1].fill_(t - num_tokens)
        self._block_table[:num_rows, : metadata.block_table.shape[1]].copy_(metadata.block_table)
        self._block_table[num_rows].zero_()
        assert batch.last_tokens is not None
        self._last_tokens[:num_rows].copy_(batch.last_tokens)
        self._last_tokens[num_rows : r + 1].zero_()
        self._graphs[t, r].replay()
        return self._hidden[t, r][:num_rows]

    def _measure(self) -> None:
        """Time the largest graph, and how long the host takes to launch such a step without one. Blocks."""
        num_tokens, num_rows = self._sizes[-1]
        self._slots.zero_()  # padding's block alone is written
        self._block_table.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for event in (start, end):
            self._graphs[num_tokens, num_rows].replay()
            event.record()
        end.synchronize()
        self.tokens_per_s = num_tokens / start.elapsed_time(end) * 1e3
        launched_s = time.perf_counter()
        self._run_mixed(self._view(TOKEN_SIZES[0], 1))
        self._launch_s = time.perf_counter() - launched_s
        torch.cuda.synchronize()

    def _padded_rows(self, num_tokens: int, num_rows: int) -> int:
        small = min(SMALL_ROWS, self._max_num_seqs)
        return small if num_rows <= small and num_tokens <= SMALL_ROWS_MAX_TOKENS else self._max_num_seqs

    def _view(self, num_tokens: int, num_rows: int) -> InputBatch:
        """The fixed buffers as a batch of num_rows rows and one of padding."""
        rows = num_rows + 1
        metadata = AttentionMetadata(
            query_start_loc=self._query_start_loc[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            block_table=self._block_table[:rows],
            slot_mapping=self._slots[:num_tokens],
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
            num_decodes=None,
        )
        return InputBatch(
            self._input_ids[:num_tokens], self._positions[:num_tokens], metadata, self._last_tokens[:rows],
            last_tokens=self._last_tokens[:rows],
        )  # fmt: skip


def _capture(run: Callable[[], torch.Tensor], pool: GraphPool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Run once, which compiles kernels and fills library caches, then capture; returns the graph and its output."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = run()
    return graph, output
