"""GraphCaptures: captures the CUDA graphs of one ModelRunner: some before the engine is ready, the rest later.

Life: warm_up → capture → capture_next, as long as it returns True, between two steps → close.
A capture records launches and executes nothing, so it may happen at any time between steps. The kernels that it records
must have been loaded: warm_up() runs every size before the first real step, grouped ones too, with one layer of each
kind, since the other layers launch the same kernels. Graphs are captured largest first into one memory pool, so that
all sizes share the largest one's activations.
A late capture pauses between two layers when a message arrives, and goes on in a later idle turn: it runs in a thread
of its own. So no request waits for more than _LEAST_S, a layer and the end of a piece, and a busy engine gets its
graphs, too. What was recorded before a pause is a graph of its own, replayed first: an open capture would keep the
allocator from freeing memory.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.device.cuda_graph import DecodeGraphs, DecodeSize, Layers, MixedGraphs, MixedSize
from engine.device.graph_device import GraphDevice, Interruption
from engine.device.memory import is_out_of_memory
from engine.device.side_thread import SideThread
from engine.device.step_times import Agree, StepTimes, measure_sizes, spread
from engine.interface.errors import first_line

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]

_LEAST_S = 0.004  # from one pause to the next, since a piece more takes 10 to 25 µs of each step
_URGENT_S = 0.008  # that an urgent capture takes between two steps, and a layer more


@dataclass(frozen=True)
class _Size:
    """A size of decode or mixed steps."""

    name: str  # unique
    run: Callable[[Layers], None] = field(compare=False)
    capture: Callable[[], None] = field(compare=False)


class GraphCaptures:
    """The graphs of decode and mixed steps, and the sizes still to be captured."""

    def __init__(
        self,
        decode: DecodeGraphs,
        mixed: MixedGraphs,
        device: GraphDevice,
        *,
        layers: Layers,
        agree: Agree,
        interruption: Interruption,
    ) -> None:
        """layers: one of each kind; None: all, for ranks, whose sums over ranks must not fail on one of them alone.

        agree: returns the first rank's measurements on every rank, since all ranks must choose the same graphs.
        interruption: the passes that are captured late check it before each layer.
        """
        self.decode = decode
        self.mixed = mixed
        self._device = device
        self._layers = layers
        self._agree = agree
        self._left: list[_Size] = []  # the next one is last
        self._urgent: list[_Size] = []  # of these: not to be left until the engine is idle
        self._interruption = interruption
        self._under_way: _Size | None = None
        self._thread: SideThread | None = None  # that captures what is left
        self._num_late = self._num_failed = self._num_pauses = 0
        self._longest_s = self._asked_s = 0.0  # that a message may have waited; when was last asked for one

    @property
    def num_left(self) -> int:
        """The number of graphs that capture() left out and capture_next() has not captured yet."""
        return len(self._left) + (self._under_way is not None)

    def warm_up(self) -> None:
        """Run a step of each size without a graph, which loads its kernels. Blocks. Before the first real step."""
        with torch.inference_mode():
            for size in self._largest_first(self.mixed.sizes, self.decode.sizes):
                size.run(self._layers)
        self._device.synchronize()

    def capture(self, on_progress: OnProgress, *, is_partial: bool, long_step_s: float) -> None:
        """Capture all sizes, or some of each magnitude (is_partial), and measure how long steps take. Blocks.

        long_step_s: the aim for long steps with decode rows; the size that comes nearest to it is captured, too.
        """
        started_s = time.perf_counter()
        first = self._largest_first(
            self.mixed.first_sizes if is_partial else self.mixed.sizes,
            self.decode.first_sizes if is_partial else self.decode.sizes,
        )
        done = itertools.count(1)
        with torch.inference_mode():
            launch_s = self.mixed.time_launch(self._device)
            torch.cuda.empty_cache()  # memory of the steps before: the pool of graphs has its own
            for size in first:
                self._capture_or_warm_up(size)
                on_progress(next(done), len(first))
            captured_s = time.perf_counter()
            self.mixed.times = self._measure(launch_s)
            measured_s = time.perf_counter()
            common = {self.mixed.times.efficient_tokens(long_step_s), self.mixed.times.fitting_tokens(long_step_s)}
            for size in self._largest_first([self.mixed.of_tokens(num_tokens) for num_tokens in sorted(common)], []):
                if size not in first:
                    self._capture_or_warm_up(size)
                    first.append(size)
        torch.cuda.empty_cache()
        rest = self._largest_first(self.mixed.sizes, self.decode.sizes)
        self._left = [size for size in reversed(rest) if size not in first]
        self._begin_thread()
        logger.info(
            "graphs captured=%d later=%d capture_s=%.2f timing_s=%.2f launch_ms=%.1f",
            len(first),
            len(self._left),
            captured_s - started_s,
            measured_s - captured_s,
            launch_s * 1e3,
        )

    def capture_few(self, on_progress: OnProgress, times: StepTimes, *, long_step_s: float) -> None:
        """Capture the sizes that the first steps need; the others of capture() are urgent then. Blocks.

        These are the largest, which serve every step, those to which the scheduler fills steps, and two up to which
        padding costs no more than launching a step kernel by kernel. times: what an engine before this one measured of
        the same steps.
        """
        started_s = time.perf_counter()
        self.mixed.times = times
        at_once = self._largest_first(self._first_needed(times, long_step_s), self.decode.first_sizes[-1:])
        with torch.inference_mode():
            torch.cuda.empty_cache()
            for done, size in enumerate(at_once, 1):
                self._capture_or_warm_up(size)
                on_progress(done, len(at_once))
        torch.cuda.empty_cache()
        first = self._largest_first(self.mixed.first_sizes, self.decode.first_sizes)
        self._urgent = [size for size in first if size not in at_once]
        rest = self._largest_first(self.mixed.sizes, self.decode.sizes)
        late = [size for size in rest if size not in at_once and size not in self._urgent]
        self._left = [*late[::-1], *self._urgent[::-1]]
        self._begin_thread()
        logger.info(
            "graphs captured=%d urgent=%d later=%d capture_s=%.2f",
            len(at_once),
            len(self._urgent),
            len(late),
            time.perf_counter() - started_s,
        )

    def _first_needed(self, times: StepTimes, long_step_s: float) -> list[MixedSize]:
        """Return the mixed sizes of capture_few(), ascending."""
        common = [
            self.mixed.of_tokens(tokens)
            for tokens in (times.efficient_tokens(long_step_s), times.fitting_tokens(long_step_s))
        ]
        first = self.mixed.first_sizes
        cheap = [size for size in first if times.seconds[size.shape.num_tokens] <= times.launch_s]
        few = [size for size in cheap if cheap[-1].shape.num_tokens >= 4 * size.shape.num_tokens]
        return sorted({first[-1], *common, *cheap[-1:], *few[-1:]})

    def capture_urgent(self) -> bool:
        """Go on with the urgent sizes for a while; return True if some are left. Between two steps."""
        if self._has_urgent:
            began_s = time.perf_counter()
            self.capture_next(lambda: time.perf_counter() - began_s >= _URGENT_S)
            self._longest_s = max(self._longest_s, time.perf_counter() - began_s)
        return self._has_urgent

    @property
    def _has_urgent(self) -> bool:
        following = self._left[-1] if self._left else None
        return (self._under_way or following) in self._urgent

    def capture_next(self, is_awaited: Callable[[], bool] | None = None) -> bool:
        """Go on with the next size, if any is left; return True if some are left. Takes about two launches of a step.

        is_awaited: asked before each layer, but for the first _LEAST_S; True pauses the capture, and the next call goes
        on with it. None: never.
        A size whose capture fails stays without: its steps go on with the next larger graph, or without one.
        """
        if not self.num_left:
            return False
        assert self._thread is not None
        self._asked_s = time.perf_counter()
        self._interruption.is_wanted = partial(self._is_wanted, is_awaited, self._asked_s + _LEAST_S)
        try:
            self._thread.resume()
        finally:
            self._interruption.is_wanted = None  # else a step's own pass would pause
        self._note_wait()
        if not self.num_left:
            logger.info(
                "late graphs captured=%d failed=%d pauses=%d longest_wait_ms=%.1f",
                self._num_late,
                self._num_failed,
                self._num_pauses,
                self._longest_s * 1e3,
            )
        return self.num_left > 0

    def close(self) -> None:
        """End the capture under way, if any. No other call may follow."""
        self._left.clear()
        if self._thread is not None:
            self._thread.stop()
        self._under_way = None

    def _begin_thread(self) -> None:
        """Start the thread that captures what is left, up to its first pause."""
        if self._left:
            self._thread = SideThread(self._capture_rest, name="quire-capture")
            self._thread.resume()

    def _capture_rest(self) -> None:
        """Capture what is left; runs in the thread, which pauses before each size."""
        assert self._thread is not None
        self._interruption.pause = self._pause
        self._device.begin_thread()
        with torch.inference_mode():
            while self._left:
                self._thread.pause()
                self._under_way = self._left.pop()
                try:
                    self._under_way.capture()
                    self._num_late += 1
                except RuntimeError as error:
                    self._num_failed += 1
                    logger.warning("graph not captured %s reason=%r", self._under_way.name, first_line(error))
                self._under_way = None

    def _is_wanted(self, is_awaited: Callable[[], bool] | None, least_s: float) -> bool:
        if time.perf_counter() < least_s:
            return False
        if is_awaited is not None and is_awaited():
            return True  # it may wait since it was asked for before, and waits for the end of the piece
        self._note_wait()
        return False

    def _note_wait(self) -> None:
        now_s = time.perf_counter()
        self._longest_s, self._asked_s = max(self._longest_s, now_s - self._asked_s), now_s

    def _pause(self) -> None:
        """Let the loop go on; runs in the thread."""
        assert self._thread is not None
        self._num_pauses += 1
        with self._device.outside_capture():
            self._thread.pause()

    def _largest_first(self, mixed: Sequence[MixedSize], decode: Sequence[DecodeSize]) -> list[_Size]:
        """Return mixed and decode sizes, both ascending, with the largest first: mixed steps are larger."""
        return [
            *(
                _Size(
                    f"tokens={size.shape.num_tokens} rows={size.shape.num_rows} prompts={size.shape.num_prefills} "
                    f"is_grouped={size.is_grouped}",
                    partial(self.mixed.run, size),
                    partial(self.mixed.capture, size, self._device),
                )
                for size in reversed(mixed)
            ),
            *(
                _Size(
                    f"decode_rows={size.num_rows} is_grouped={size.is_grouped}",
                    partial(self.decode.run, size),
                    partial(self.decode.capture, size, self._device),
                )
                for size in reversed(decode)
            ),
        ]

    def _capture_or_warm_up(self, size: _Size) -> None:
        """Capture a size before the first real step; if a layer has kernels of its own, after a run of all layers."""
        try:
            size.capture()
        except RuntimeError as error:
            if self._layers is None or is_out_of_memory(error):
                raise
            logger.info("graph captured in a second attempt %s reason=%r", size.name, first_line(error))
            size.run(None)
            self._device.synchronize()
            size.capture()

    def _measure(self, launch_s: float) -> StepTimes:
        sizes = self.mixed.timed_sizes()
        timed = measure_sizes(sizes, lambda size: self.mixed.time(size, self._device), self._agree)
        (agreed_s,) = self._agree([launch_s])
        return StepTimes(spread(timed, self.mixed.num_tokens), agreed_s)
