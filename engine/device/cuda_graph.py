"""DecodeGraphs and MixedGraphs: capture forward passes as CUDA graphs and replay them. Imports torch.

A replay costs the host microseconds, launching every kernel costs milliseconds.
DecodeGraphs: one token per row, one graph per padded number of rows. A graph reads DeviceState by the req_index values
in one fixed buffer, so the host only updates this buffer, and only when the set of decoding requests changed. Rows
after the real ones use the state's padding row.
MixedGraphs: rows of any length, one graph per padded number of tokens and rows; they read what InputBatchBuilder.pack()
sent to the device.
Some sizes of both have a second version, for steps whose rows are grouped by shared prefixes (is_grouped); a step with
groups replays the other version, which reads each row's whole table, until that one is captured.
Both end at the last hidden states: logits are a hundred times larger, and each graph would keep its own (graphs of
engine/device/decode_tails.py keep their tokens alone). A step replays the smallest graph that fits among those captured
so far; engine/device/graph_captures.py captures them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.device.graph_device import Graph, GraphDevice
from engine.device.input_batch import MixedShape, PackedStep
from engine.device.step_times import StepTimes

Layers = Sequence[int] | None  # the layers of a model that a pass runs; None: all
RunDecode = Callable[[torch.Tensor, bool, Layers], torch.Tensor]
RunMixed = Callable[[MixedShape, bool, Layers], torch.Tensor]

# Padded numbers of tokens. Up to FEW_ROWS_MAX_TOKENS there are also shapes with few rows. Up to
# FEW_PREFILLS_MAX_TOKENS, where idle programs of the prefill kernel cost measurable time, few rows may be prompts
TOKEN_SIZES = (
    32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
FEW_ROWS, FEW_ROWS_MAX_TOKENS, FEW_PREFILLS_MAX_TOKENS = 32, 2048, 4096
MANY_DRAFTED_MAX_TOKENS = 512  # limit of shapes with drafts in many rows
GROUPED_TOKEN_SIZES = (128, 256, 512, 1024, 2048)  # of mixed steps with groups: in larger ones prompts take most time
# Sizes that are captured before the engine is ready, beside the largest: steps of other sizes are padded up to them
_FIRST_TOKENS = (32, 128, 256, 512, 1024, 2048, 4096)
_MOST_TIMED_TOKENS = 4096  # more take twice as long for twice the tokens


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
    """Return the padded batch sizes of steps with groups, ascending: few, as each costs memory and a capture."""
    sizes = [4, 16, 32, 64, 96, 128, 192, 256, *range(384, max_num_seqs, 128)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeSize(NamedTuple):
    """A version of the decode step to capture."""

    num_rows: int  # padded
    is_grouped: bool  # for steps whose rows are grouped by shared prefixes


class MixedSize(NamedTuple):
    """A version of the mixed step to capture."""

    shape: MixedShape
    is_grouped: bool  # for steps whose rows are grouped by shared prefixes


class DecodeGraphs:
    """Captures `run_decode` (req_index [B] int64, is_grouped → hidden [B, hidden_size]; no sync) and replays it."""

    def __init__(
        self,
        run_decode: RunDecode,
        *,
        max_num_seqs: int,
        padding_row: int,
        device: torch.device,
        has_groups: bool = False,
    ) -> None:
        """has_groups: also in a version for steps whose rows are grouped by shared prefixes."""
        self.sizes = [DecodeSize(num_rows, False) for num_rows in graph_sizes(max_num_seqs)]  # ascending
        if has_groups:
            grouped = (DecodeSize(num_rows, True) for num_rows in grouped_sizes(max_num_seqs))
            self.sizes = sorted([*self.sizes, *grouped])
        self._run_decode = run_decode
        self._padding_row = padding_row
        # [max_num_seqs] int64: the buffer that every graph reads
        self._req_index = torch.full((max_num_seqs,), padding_row, dtype=torch.int64, device=device)
        self._num_rows = 0
        self._loaded: torch.Tensor | None = None  # the tensor whose values are in the buffer
        self._captured: list[DecodeSize] = []  # ascending
        self._size_of: dict[tuple[int, bool], DecodeSize] = {}  # by rows and is_grouped, among the captured ones
        self._graphs: dict[DecodeSize, Graph] = {}
        self._hidden: dict[DecodeSize, torch.Tensor] = {}
        self.device: GraphDevice  # with the first capture

    @property
    def first_sizes(self) -> list[DecodeSize]:
        """The sizes to capture before the engine is ready, the largest among them: powers of two without 2.

        None is grouped.
        """
        plain = [size for size in self.sizes if not size.is_grouped]
        return [size for size in plain if size == plain[-1] or (size.num_rows != 2 and size.num_rows.bit_count() == 1)]

    def run(self, size: DecodeSize, layers: Layers) -> None:
        """Run a step of padding rows without a graph, which loads its kernels. Only before the first real step."""
        self._run_decode(self._req_index[: size.num_rows], size.is_grouped, layers)

    def capture(self, size: DecodeSize, device: GraphDevice) -> None:
        """Capture a size."""
        self.device = device
        rows = self._req_index[: size.num_rows]
        self._graphs[size], self._hidden[size] = device.capture(lambda: self._run_decode(rows, size.is_grouped, None))
        self._captured = sorted(self._graphs)
        self._size_of.clear()

    def output(self, size: DecodeSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a captured size leaves hidden [B, hidden_size], and its rows [B] int64, padding included."""
        return self._hidden[size][: size.num_rows], self._req_index[: size.num_rows]

    def replay(self, req_index: torch.Tensor, *, is_grouped: bool) -> DecodeSize:
        """Launch the step of these rows ([R] int64); return its size, whose output() is valid until the next replay."""
        num_rows = req_index.shape[0]
        size = self._size_of.get((num_rows, is_grouped)) or self._captured_size(num_rows, is_grouped=is_grouped)
        if self._loaded is not req_index:
            self._req_index[:num_rows].copy_(req_index)
            if self._num_rows > num_rows:
                self._req_index[num_rows : self._num_rows].fill_(self._padding_row)
            self._num_rows, self._loaded = num_rows, req_index
        self._graphs[size].replay()
        return size

    def _captured_size(self, num_rows: int, *, is_grouped: bool) -> DecodeSize:
        """Return the smallest captured size for these rows: one that is not grouped serves rows with groups, too."""
        fitting = [size for size in self._captured if size.num_rows >= num_rows]
        plain = next(size for size in fitting if not size.is_grouped)
        size = next((size for size in fitting if size.is_grouped), plain) if is_grouped else plain
        self._size_of[num_rows, is_grouped] = size
        return size


class MixedGraphs:
    """Captures `run_mixed` (MixedShape, is_grouped → hidden [R, hidden_size], no sync inside) and replays it."""

    def __init__(self, run_mixed: RunMixed, *, shapes: list[MixedShape], has_groups: bool = False) -> None:
        """has_groups: also in a few versions for steps whose rows are grouped by shared prefixes."""
        self._widest = {shape.num_tokens: shape for shape in shapes}
        self.sizes = [MixedSize(shape, False) for shape in shapes]  # ascending
        if has_groups:
            grouped = (shape for size, shape in self._widest.items() if size in GROUPED_TOKEN_SIZES)
            self.sizes = sorted([*self.sizes, *(MixedSize(shape, True) for shape in grouped)])
        self.times = StepTimes({}, 0.0)  # set before the first replay, with all numbers of tokens
        self._run_mixed = run_mixed
        self._captured: list[MixedSize] = []  # ascending
        self._graphs: dict[MixedSize, Graph] = {}
        self._hidden: dict[MixedSize, torch.Tensor] = {}

    @property
    def num_tokens(self) -> list[int]:
        """The padded numbers of tokens, ascending."""
        return list(self._widest)

    @property
    def first_sizes(self) -> list[MixedSize]:
        """The sizes to capture before the engine is ready, the largest among them: of any rows, not grouped."""
        most = max(self._widest)
        return [self.of_tokens(num_tokens) for num_tokens in self._widest if num_tokens in (*_FIRST_TOKENS, most)]

    def of_tokens(self, num_tokens: int) -> MixedSize:
        """Return the size with the most rows of a padded number of tokens, none grouped."""
        return MixedSize(self._widest[num_tokens], False)

    def run(self, size: MixedSize, layers: Layers) -> None:
        """Run a step of padding without a graph, which loads its kernels. Only before the first real step."""
        self._run_mixed(*size, layers)

    def capture(self, size: MixedSize, device: GraphDevice) -> None:
        """Capture a size."""
        self._graphs[size], self._hidden[size] = device.capture(lambda: self._run_mixed(*size, None))
        self._captured = [size for size in self.sizes if size in self._graphs]

    def fitting_shape(self, needed: MixedShape) -> MixedShape | None:
        """Return the smallest captured shape for a step, or None if the step is faster without a graph and padding."""
        shape = self._smallest(needed, is_grouped=False)
        if shape is None or not self.times.is_worth_padding(needed.num_tokens, shape.num_tokens):
            return None
        return shape

    def grouped_shape(self, needed: MixedShape, plain: MixedShape, *, spared_s: float) -> MixedShape | None:
        """Return the smallest captured shape for a step with groups.

        None: none fits, or it costs more than `plain`, less what the groups spare.
        """
        shape, seconds = self._smallest(needed, is_grouped=True), self.times.seconds
        if shape is None or seconds[shape.num_tokens] - seconds[plain.num_tokens] >= spared_s:
            return None
        return shape

    def replay(self, packed: PackedStep, *, is_grouped: bool) -> torch.Tensor:
        """Launch a step; return hidden [R, hidden_size], first the rows that sample, valid until the next replay."""
        size = MixedSize(packed.shape, is_grouped)
        self._graphs[size].replay()
        return self._hidden[size]

    def timed_sizes(self) -> list[int]:
        """Return the numbers of tokens whose captured graphs are to be timed, ascending; spread() has the others."""
        sizes = [num_tokens for num_tokens in self._widest if self.of_tokens(num_tokens) in self._graphs]
        return [size for size in sizes if size <= _MOST_TIMED_TOKENS] or sizes

    def time(self, num_tokens: int, device: GraphDevice) -> float:
        """Replay the captured graph of a size with the most rows; return its seconds on the device. Blocks."""
        return device.time(self._graphs[self.of_tokens(num_tokens)])

    def time_launch(self, device: GraphDevice) -> float:
        """Return the host's seconds to launch one step without a graph. Blocks. Only before the first real step."""
        launches_s = []
        for _ in range(3):
            device.synchronize()
            launched_s = time.perf_counter()
            self._run_mixed(self.sizes[0].shape, False, None)
            launches_s.append(time.perf_counter() - launched_s)
        device.synchronize()
        return statistics.median(launches_s)

    def _smallest(self, needed: MixedShape, *, is_grouped: bool) -> MixedShape | None:
        """Return the smallest captured shape that a step fits into."""
        num_tokens, num_rows, num_prefills = needed
        for shape, has_groups in self._captured:  # each mixed step looks
            is_large = shape.num_tokens >= num_tokens and shape.num_rows >= num_rows
            if is_large and shape.num_prefills >= num_prefills and has_groups == is_grouped:
                return shape
        return None
