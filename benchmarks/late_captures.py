"""The longest wait of a message that arrives while the engine captures a graph after its start, on CUDA.

    python -m benchmarks.late_captures --shape llama-3.1-8b --json out.json
Of the sizes that the start left out every second one is captured whole: `wait_ms` is the longest time between two
looks for messages, or from the last one to the end. The others pause as soon as they may, after 4 ms: `wait_ms` is the
longest turn, with the end of a piece. A message waits for the next look and for the end of a piece: for less than both
together. Then a step of eight rows is captured in 1, 2, 4 … pieces: `pieces_ms` is a replay's time on the device.
Random weights.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.device.cuda_graph import DecodeSize
from engine.device.graph_device import CudaGraphDevice
from engine.interface.config import EngineConfig
from engine.offline import OfflineEngine
from engine.startup.loaded_engine import LoadedEngine

_SHAPES = Path(__file__).parent / "shapes"
_SIZE = DecodeSize(8, is_grouped=False)
_NUM_PIECES = (1, 2, 4, 8, 16)
_NUM_REPLAYS = 200


@dataclass
class Capture:
    """Milliseconds of one size."""

    is_paused: bool  # as soon as it may
    wait_ms: float  # the longest turn, or time between two looks for messages
    whole_ms: float  # of all turns


def main() -> int:
    """Capture what the start left out; print a line of the longest times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.late_captures", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    config = EngineConfig(model=str(_SHAPES / args.shape), load_format="dummy", max_model_len=8192)
    offline = OfflineEngine.load(config, leaves_rest=True)
    captures = offline.loaded.captures
    assert captures is not None, "no graphs on this device"
    measured: list[Capture] = []
    while captures.num_left:
        measured.append(measure(offline.loaded, is_paused=len(measured) % 2 == 1))
    for is_paused in (False, True):
        of_kind = [one for one in measured if one.is_paused == is_paused]
        waits = [one.wait_ms for one in of_kind]
        print(
            f"{args.shape} graphs={len(of_kind)} is_paused={is_paused} wait_ms median={statistics.median(waits):.1f} "
            f"longest={max(waits):.1f} whole_ms longest={max(one.whole_ms for one in of_kind):.1f}"
        )
    pieces_ms = {num_pieces: time_pieces(offline.loaded, num_pieces) for num_pieces in _NUM_PIECES}
    print(f"{args.shape} rows={_SIZE.num_rows}", *(f"pieces={n} ms={ms:.4f}" for n, ms in pieces_ms.items()))
    if args.json:
        report = {"shape": args.shape, "captures": [asdict(one) for one in measured], "pieces_ms": pieces_ms}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    offline.loaded.close()
    return 0


def measure(loaded: LoadedEngine, *, is_paused: bool) -> Capture:
    """Capture the next size, with all pauses that it may have or without."""
    captures = loaded.captures
    assert captures is not None
    num_left, turns_s, checked_s = captures.num_left, list[float](), list[float]()

    def is_awaited() -> bool:
        checked_s.append(time.perf_counter())
        return is_paused

    began_s = time.perf_counter()
    while captures.num_left == num_left:
        turn_s = time.perf_counter()
        captures.capture_next(is_awaited)
        turns_s.append(time.perf_counter() - turn_s)
    ended_s = time.perf_counter()
    waits_s = [after - before for before, after in itertools.pairwise([began_s, *checked_s, ended_s])]
    return Capture(is_paused, max(turns_s if is_paused else waits_s) * 1e3, (ended_s - began_s) * 1e3)


def time_pieces(loaded: LoadedEngine, num_pieces: int) -> float:
    """Capture a decode step in pieces; return the milliseconds of one of many replays."""
    captures, interruption, device = loaded.captures, loaded.runner._interruption, CudaGraphDevice()
    assert captures is not None
    num_layers, layers = loaded.model_config.num_layers, itertools.count()

    def is_wanted() -> bool:
        layer = next(layers)
        return layer > 0 and layer * num_pieces // num_layers > (layer - 1) * num_pieces // num_layers

    def pause() -> None:
        with device.outside_capture():
            pass

    interruption.is_wanted, interruption.pause = is_wanted, pause
    with torch.inference_mode():
        captures.decode.capture(_SIZE, device)
    interruption.is_wanted = None
    graph = captures.decode._graphs[_SIZE]
    return time_replays(graph.replay)


def time_replays(replay: Callable[[], None]) -> float:
    """Return the milliseconds of one of many replays on the device."""
    for _ in range(10):
        replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(_NUM_REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _NUM_REPLAYS


if __name__ == "__main__":
    sys.exit(main())
