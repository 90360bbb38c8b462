"""DecodeGraphs and MixedGraphs: capture forward passes as CUDA graphs and replay them. Imports torch.

A replay costs the host microseconds, launching every kernel costs milliseconds.
DecodeGraphs: one token per row, one graph per padded number of rows. A graph reads DeviceState by the req_index values
in one fixed buffer, so the host only updates this buffer, and only when the set of decoding requests changed. Rows
after the real ones use the state's padding row.
MixedGraphs: rows of any length, one graph per padded number of tokens and rows; they read what InputBatchBuilder.pack()
sent to the device.
Both end at the last hidden states: logits are a hundred times larger, and each graph would keep its own. Graphs are
captured largest first into one memory pool, so that all sizes share the largest one's activations.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.device.input_batch import MixedShape, PackedStep

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as GraphPool  # torch has no public name

RunDecode = Callable[[torch.Tensor, bool], torch.Tensor]
RunMixed = Callable[[MixedShape, bool], torch.Tensor]
Agree = Callable[[list[float]], list[float]]

# Padded numbers of tokens. Up to FEW_ROWS_MAX_TOKENS there are also shapes with few rows. Up to
# FEW_PREFILLS_MAX_TOKENS, where idle programs of the prefill kernel cost measurable time, few rows may be prompts
TOKEN_SIZES = (
    32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
_NEARLY = 0.95  # share of the best rate
# The replays of measure_sizes() beyond one of each size take less than 0.3 s: 12 ms for each size up to 30 ms per step
_WARM_UP_S, _TIMED_S, _LONG_S = 0.030, 0.012, 0.030
FEW_ROWS, FEW_ROWS_MAX_TOKENS, FEW_PREFILLS_MAX_TOKENS = 32, 2048, 4096
MANY_DRAFTED_MAX_TOKENS = 512  # limit of shapes with drafts in many rows
GROUPED_TOKEN_SIZES = (128, 256, 512, 1024, 2048)  # of mixed steps with groups: in larger ones prompts take most time


def mixed_shapes(
    max_num_seqs: int, max_num_batched_tokens: int, *, max_num_samples: int | None = None
) -> list[MixedShape]:
    """Return the padded shapes of mixed steps, ascending; each has one more row than requests, for padding.

    max_num_samples: with drafts, the maximum number of sampled positions of a step; small shapes then also exist in a
    version in which every row may have several tokens. None: no drafts.
    """
    shapes = []
    for num_tokens in TOKEN_SIZES:
        rows = max(max_num_seqs, max_num_samples or 0) + 1
        if num_tokens <= FEW_ROWS_MAX_TOKENS and rows > FEW_ROWS:
            shapes.append(MixedShape(num_tokens, FEW_ROWS, FEW_ROWS))
        num_prefills = min(FEW_ROWS, rows) if num_tokens <= FEW_PREFILLS_MAX_TOKENS else rows
        shapes.append(MixedShape(num_tokens, rows, num_prefills))
        if max_num_samples is not None and num_prefills < rows and 2 * FEW_ROWS < num_tokens <= MANY_DRAFTED_MAX_TOKENS:
            shapes.append(MixedShape(num_tokens, rows, rows))
        if num_tokens >= max_num_batched_tokens:
            break
    return shapes


def max_step_tokens(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the maximum number of tokens of a step, padding included."""
    return max(max_num_batched_tokens, mixed_shapes(max_num_seqs, max_num_batched_tokens)[-1].num_tokens)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the padded batch sizes, ascending: in small increments up to 32, then by 16, and by 32 above 128."""
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, *range(48, 129, 16), *range(160, max_num_seqs + 32, 32)]
    fitting = [size for size in sizes if size < max_num_seqs]
    return [*fitting, max_num_seqs]


def grouped_sizes(max_num_seqs: int) -> list[int]:
    """Return the padded batch sizes of steps with groups, ascending: few, as each costs memory and the start time."""
    sizes = [4, 16, 32, 64, 96, 128, 192, 256, *range(384, max_num_seqs, 128)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Captures `run_decode` (req_index [B] int64, is_grouped → hidden [B, hidden_size]; no sync) and replays it."""

    def __init__(
        self, run_decode: RunDecode, *, max_num_seqs: int, padding_row: int, device: torch.device, has_groups: bool
    ) -> None:
        """has_groups: also in a version for steps whose rows are grouped by shared prefixes."""
        self._run_decode = run_decode
        self._padding_row = padding_row
        self._sizes = [(size, False) for size in graph_sizes(max_num_seqs)]
        if has_groups:
            self._sizes = sorted([*self._sizes, *((size, True) for size in grouped_sizes(max_num_seqs))])
        # [max_num_seqs] int64: the buffer that every graph reads
        self._req_index = torch.full((max_num_seqs,), padding_row, dtype=torch.int64, device=device)
        self._num_rows = 0
        self._loaded: torch.Tensor | None = None  # the tensor whose values are in the buffer
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._hidden: dict[tuple[int, bool], torch.Tensor] = {}

    @property
    def num_graphs(self) -> int:
        """The number of graphs that capture() makes."""
        return len(self._sizes)

    def capture(self, pool: GraphPool, on_captured: Callable[[], None]) -> None:
        """Capture every size into `pool`; call on_captured() after each. Blocks."""
        for size, is_grouped in reversed(self._sizes):
            run = partial(self._run_decode, self._req_index[:size], is_grouped)
            self._graphs[size, is_grouped], self._hidden[size, is_grouped] = _capture(run, pool)
            on_captured()

    def replay(self, req_index: torch.Tensor, *, is_grouped: bool) -> torch.Tensor:
        """Launch the step of these rows ([R] int64); return hidden [R, hidden_size], valid until the next replay."""
        num_rows = req_index.shape[0]
        size = next(each for each in self._sizes if each[0] >= num_rows and each[1] == is_grouped)
        if self._loaded is not req_index:
            self._req_index[:num_rows].copy_(req_index)
            if self._num_rows > num_rows:
                self._req_index[num_rows : self._num_rows].fill_(self._padding_row)
            self._num_rows, self._loaded = num_rows, req_index
        self._graphs[size].replay()
        return self._hidden[size][:num_rows]


class MixedGraphs:
    """Captures `run_mixed` (MixedShape, is_grouped → hidden [R, hidden_size], no sync inside) and replays it."""

    def __init__(
        self, run_mixed: RunMixed, *, shapes: list[MixedShape], agree: Agree, has_groups: bool = False
    ) -> None:
        """agree: returns the first rank's measurements on every rank, since all ranks must choose the same graphs.

        has_groups: also in a few versions for steps whose rows are grouped by shared prefixes.
        """
        self._run_mixed = run_mixed
        self._agree = agree
        self.shapes = shapes
        widest = {shape.num_tokens: shape for shape in shapes if shape.num_tokens in GROUPED_TOKEN_SIZES}
        self._grouped_shapes = list(widest.values()) if has_groups else []
        self._graphs: dict[tuple[MixedShape, bool], torch.cuda.CUDAGraph] = {}
        self._hidden: dict[tuple[MixedShape, bool], torch.Tensor] = {}
        # by number of tokens: a step's time without attention to context, measured after the capture
        self._seconds: dict[int, float] = {}
        self._launch_s = 0.0  # host time to launch one step without a graph

    @property
    def num_graphs(self) -> int:
        """The number of graphs that capture() makes."""
        return len(self.shapes) + len(self._grouped_shapes)

    @property
    def num_tokens(self) -> list[int]:
        """The padded numbers of tokens, ascending."""
        return sorted({shape.num_tokens for shape in self.shapes})

    def capture(self, pool: GraphPool, on_captured: Callable[[], None]) -> None:
        """Capture every shape into `pool`; call on_captured() after each. Blocks."""
        for key in sorted([*((s, False) for s in self.shapes), *((s, True) for s in self._grouped_shapes)])[::-1]:
            self._graphs[key], self._hidden[key] = _capture(partial(self._run_mixed, *key), pool)
            on_captured()
        self._measure()

    def fitting_shape(self, needed: MixedShape) -> MixedShape | None:
        """Return the smallest shape for a step, or None if the step is faster without a graph and padding."""
        fits = (shape for shape in self.shapes if all(has >= needs for has, needs in zip(shape, needed, strict=True)))
        shape = next(fits, None)
        if shape is None:
            return None
        padded_s = self._seconds[shape.num_tokens]
        return shape if padded_s <= max(self._launch_s, padded_s * needed.num_tokens / shape.num_tokens) else None

    def grouped_shape(self, needed: MixedShape, plain: MixedShape, *, spared_s: float) -> MixedShape | None:
        """Return the smallest shape for a step with groups; None: it costs more than `plain`, less what they spare."""
        fits = (s for s in self._grouped_shapes if all(has >= needs for has, needs in zip(s, needed, strict=True)))
        shape = next(fits, None)
        if shape is None or self._seconds[shape.num_tokens] - self._seconds[plain.num_tokens] >= spared_s:
            return None
        return shape

    def fitting_tokens(self, seconds: float) -> int:
        """Return the padded number of tokens whose step time is closest to `seconds`."""
        return min(self._seconds, key=lambda num_tokens: abs(math.log(self._seconds[num_tokens] / seconds)))

    @property
    def efficient_tokens(self) -> int:
        """The smallest padded number of tokens with nearly the best rate of tokens per second."""
        rates = self._rates()
        return min(num_tokens for num_tokens, rate in rates.items() if rate >= _NEARLY * max(rates.values()))

    def tokens_at_best_rate(self, seconds: float) -> int:
        """Return the number of tokens computed in `seconds` at the best measured rate."""
        return int(seconds * max(self._rates().values()))

    def _rates(self) -> dict[int, float]:
        return {num_tokens: num_tokens / seconds for num_tokens, seconds in self._seconds.items()}

    def replay(self, packed: PackedStep, *, is_grouped: bool) -> torch.Tensor:
        """Launch a step; return hidden [R, hidden_size], first the rows that sample, valid until the next replay."""
        self._graphs[packed.shape, is_grouped].replay()
        return self._hidden[packed.shape, is_grouped]

    def _measure(self) -> None:
        """Time the graph with the most rows of each size, and the host's launch of a step without a graph. Blocks."""
        widest = {shape.num_tokens: shape for shape in self.shapes}
        for num_tokens, shape in widest.items():
            if num_tokens <= FEW_ROWS_MAX_TOKENS:  # a first replay uploads the graph, which a long step hides
                self._graphs[shape, False].replay()
        self._seconds = measure_sizes(list(widest), lambda size: _time(self._graphs[widest[size], False]), self._agree)
        launches_s = []
        for _ in range(3):
            torch.cuda.synchronize()
            launched_s = time.perf_counter()
            self._run_mixed(self.shapes[0], False)
            launches_s.append(time.perf_counter() - launched_s)
        torch.cuda.synchronize()
        (self._launch_s,) = self._agree([statistics.median(launches_s)])


def measure_sizes(sizes: list[int], time_once: Callable[[int], float], agree: Agree) -> dict[int, float]:
    """Return the seconds of a step of each size: the median of several replays on warm clocks, fewer of long steps.

    sizes: ascending. time_once: replays one step of a size and returns its seconds. agree: as in MixedGraphs. Every
    rank makes the same replays, since they contain collectives.
    """
    first = dict(zip(sizes, agree([time_once(size) for size in sizes]), strict=True))  # this warms the clocks up
    for _ in range(math.ceil((_WARM_UP_S - sum(first.values())) / first[sizes[-1]])):
        time_once(sizes[-1])
    medians = {
        size: statistics.median(time_once(size) for _ in range(_num_replays(seconds)))
        for size, seconds in first.items()
        if seconds <= _LONG_S  # longer ones came last, when the clocks were warm
    }
    return dict(zip(sizes, agree([medians.get(size, first[size]) for size in sizes]), strict=True))


def _num_replays(seconds: float) -> int:
    """Return how often to time a step that takes about `seconds`: at most 5 times, in about _TIMED_S, at least once."""
    return max(1, min(5, int(_TIMED_S / seconds)))


def _time(graph: torch.cuda.CUDAGraph) -> float:
    """Replay a graph; return its seconds on the device. Blocks."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _capture(run: Callable[[], torch.Tensor], pool: GraphPool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Run once, to compile kernels and fill library caches, then capture; return the graph and its output."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local, since a thread of NCCL queries events during the capture
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = run()
    return graph, output
