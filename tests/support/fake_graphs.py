"""FakeGraphDevice: an engine.device.graph_device.GraphDevice on any device. Its graphs run their step when replayed."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.core.local_client import LocalTransport
from engine.device.graph_captures import GraphCaptures
from engine.device.step_times import StepTimes
from engine.interface.metrics import Metrics
from engine.offline import OfflineEngine


@dataclass
class FakeGraph:
    """Runs a step and leaves its output at one address, as a replay does."""

    run: Callable[[], torch.Tensor]
    output: torch.Tensor  # with room for any step
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        hidden = self.run()
        if hidden.ndim == 2:  # a tail leaves its tokens itself
            self.output[: len(hidden)] = hidden


class FakeGraphDevice:
    """Captures steps without executing them.

    fails: numbers of captures, from 0, that raise as on a device that has too little memory.
    """

    def __init__(self, hidden_size: int, *, max_rows: int = 64, fails: tuple[int, ...] = ()) -> None:
        self.graphs: list[FakeGraph] = []
        self.on_capture: Callable[[], None] = lambda: None
        self.before_run: Callable[[], None] = lambda: None
        self.runs = False  # whether a capture calls its pass, as a real one does; before the first real step
        self.num_pauses = 0
        self._output_shape = (max_rows, hidden_size)
        self._fails = fails
        self._num_captures = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[FakeGraph, torch.Tensor]:
        self._num_captures += 1
        if self._num_captures - 1 in self._fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        if self.runs:
            self.before_run()
            run()
        graph = FakeGraph(run, torch.full(self._output_shape, torch.nan))
        self.graphs.append(graph)
        self.on_capture()
        return graph, graph.output

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        self.num_pauses += 1
        yield

    def begin_thread(self) -> None:
        pass

    def time(self, graph: FakeGraph) -> float:
        return 1e-4  # shorter than any launch, so that each step that fits a graph replays it

    def synchronize(self) -> None:
        pass


def capture_on(
    offline: OfflineEngine,
    device: FakeGraphDevice,
    *,
    is_partial: bool,
    depth: int | None = None,
    known: StepTimes | None = None,
) -> GraphCaptures:
    """Give a loaded engine graphs of this device, and a new loop, which captures the rest when it is idle.

    known: only what the first steps need, as in a takeover.
    """
    runner = offline.loaded.runner
    captures = runner.plan_graphs(device, layers=offline.loaded.model_config.layers_of_each_kind)
    captures.warm_up()
    if known is None:
        captures.capture(lambda done, total: None, is_partial=is_partial, long_step_s=0.045)
    else:
        captures.capture_few(lambda done, total: None, known, long_step_s=0.045)
    runner.replay_graphs(captures)
    offline.loaded = dataclasses.replace(offline.loaded, captures=captures)
    offline.transport = LocalTransport()
    offline.engine = offline.loaded.engine(offline.transport, Metrics(), overlap_depth=depth, captures_graphs=True)
    return captures
