"""The longest wait of a message that arrives while the engine captures a graph after its start, on CUDA.

    python -m benchmarks.late_captures --shape llama-3.1-8b --json out.json
Each size that the start left out is abandoned before its first, middle and last layer, then captured whole. Checked
first: an abandoned size stays on the list, and repeating it takes no memory. A message waits for the longest time
between two layers and for the end of the capture: `abandoned_ms`; or from the last layer to the end: `end_ms`.
Random weights.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.interface.config import EngineConfig
from engine.offline import OfflineEngine
from engine.startup.loaded_engine import LoadedEngine

_SHAPES = Path(__file__).parent / "shapes"


@dataclass
class Capture:
    """Milliseconds of one size: between two layers at most, after the last check, to abandon it, and as a whole."""

    layer_ms: float
    end_ms: float
    abandoned_ms: float  # from the check that ends it to the return, the longest of three
    whole_ms: float


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
    num_layers = offline.loaded.model_config.num_layers
    check_memory(offline.loaded, num_layers)
    measured = []
    while captures.num_left:
        measured.append(measure(offline.loaded, num_layers))
    for name in ("layer_ms", "end_ms", "abandoned_ms", "whole_ms"):
        print(f"{args.shape} graphs={len(measured)} longest {name}={max(asdict(one)[name] for one in measured):.1f}")
    wait_ms = max(max(one.layer_ms + one.abandoned_ms, one.end_ms) for one in measured)
    print(f"{args.shape} longest wait of a message: {wait_ms:.1f} ms; without abandoning it: whole_ms")
    if args.json:
        report = {"shape": args.shape, "wait_ms": wait_ms, "captures": [asdict(one) for one in measured]}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    offline.loaded.close()
    return 0


def check_memory(loaded: LoadedEngine, num_layers: int) -> None:
    """Abandon the next size four times; the memory taken by the first must suffice for the others."""
    captures = loaded.captures
    assert captures is not None
    num_left, reserved_bytes = captures.num_left, []
    for _ in range(4):
        captures.capture_next(record([], stop_at=num_layers))
        assert captures.num_left == num_left, "an abandoned size left the list"
        reserved_bytes.append(torch.cuda.memory_reserved())
    assert len(set(reserved_bytes)) == 1, f"abandoned captures keep memory: {reserved_bytes}"


def measure(loaded: LoadedEngine, num_layers: int) -> Capture:
    """Abandon the next size before its first, middle and last layer, then capture it whole."""
    captures = loaded.captures
    assert captures is not None
    abandoned_s = []
    for layer in (1, 1 + num_layers // 2, num_layers):
        checked_s: list[float] = []
        num_left = captures.num_left
        captures.capture_next(record(checked_s, stop_at=layer))
        if captures.num_left == num_left:
            abandoned_s.append(time.perf_counter() - checked_s[-1])
    began_s, checked_s = time.perf_counter(), []
    captures.capture_next(record(checked_s, stop_at=0))
    ended_s = time.perf_counter()
    times_s = [began_s, *checked_s]
    longest_s = max(after - before for before, after in itertools.pairwise(times_s))
    return Capture(
        longest_s * 1e3, (ended_s - times_s[-1]) * 1e3, max(abandoned_s, default=0.0) * 1e3, (ended_s - began_s) * 1e3
    )


def record(checked_s: list[float], *, stop_at: int) -> Callable[[], bool]:
    """Return a check that keeps its times and abandons the capture before layer `stop_at`, from 1; 0: never."""

    def is_awaited() -> bool:
        checked_s.append(time.perf_counter())
        return len(checked_s) == stop_at

    return is_awaited


if __name__ == "__main__":
    sys.exit(main())
