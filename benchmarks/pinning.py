"""Steps while host memory is pinned beside them: python -m benchmarks.pinning [--gib 0.5] [--json FILE].

[--step-ms 0.8] [--pieces 4 16 64 256] [--rest 8 32] [--seconds 1.2]

A stand-in for decode steps: copies of a few inputs, some kernels launched one by one, and a graph of small products,
two steps in flight. A thread pins memory meanwhile, piece by piece: by cudaHostRegister of memory whose pages the
system has made before (register), has made before as pages of 2 MiB (huge), or makes then (untouched), and by
cudaHostAlloc (alloc). Each run is compared with the steps before and after it. Bytes that are copied to what was pinned
and back are checked in each run. Last, steps beside copies to memory that is not pinned, and what it takes to unpin.
"""

import argparse
import ctypes
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import format_table, host_facts, now, write_report
from engine.device.memory import zeros
from engine.device.pinned_memory import pin, unpin
from engine.interface.units import MIB

KINDS = ("register", "huge", "untouched", "alloc")
_HUGE, _POPULATE_WRITE = 14, 23  # of madvise
_QUIET_S = 0.2  # steps before and after a run
_SIZE, _LAUNCHES, _INPUTS = 1024, 24, 6


class Steps:
    """Steps of about step_ms on the device, launched two ahead, as the engine does."""

    def __init__(self, step_ms: float) -> None:
        self._weights = torch.randn(_SIZE, 8 * _SIZE, device="cuda", dtype=torch.bfloat16)
        self._rows = torch.randn(16, _SIZE, device="cuda", dtype=torch.bfloat16)
        self._small = torch.zeros(4096, device="cuda")
        self._inputs = [torch.zeros(256, dtype=torch.int64).pin_memory() for _ in range(_INPUTS)]
        self._targets = [torch.zeros(256, dtype=torch.int64, device="cuda") for _ in range(_INPUTS)]
        self._output = torch.zeros(256, dtype=torch.int64).pin_memory()
        self._graph = torch.cuda.CUDAGraph()
        self._products(4)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self._products(200)
        torch.cuda.synchronize()
        count = max(int(step_ms / 1e3 / ((time.perf_counter() - begun) / 200)), 1)
        with torch.cuda.graph(self._graph):
            self._products(count)
        self.run(0.2)

    def _products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._rows, self._weights)

    def _launch(self) -> torch.cuda.Event:
        for source, target in zip(self._inputs, self._targets, strict=True):
            target.copy_(source, non_blocking=True)
        for _ in range(_LAUNCHES):
            self._small.add_(1.0)
        self._graph.replay()
        self._output.copy_(self._targets[0], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, seconds: float, *, until: Callable[[], bool] = lambda: False, beside: Any = None) -> list[float]:
        """Run steps for so long, or until something is done; return the milliseconds of each.

        beside: called before each launch.
        """
        times: list[float] = []
        waiting, last = self._launch(), time.perf_counter()
        ends = last + seconds
        while last < ends and not until():
            if beside is not None:
                beside()
            following = self._launch()
            waiting.synchronize()
            at = time.perf_counter()
            times.append((at - last) * 1e3)
            waiting, last = following, at
        waiting.synchronize()
        return times


class Pieces(threading.Thread):
    """Pins memory, piece by piece, beside steps."""

    def __init__(self, kind: str, *, piece_bytes: int, num_bytes: int, rest: float, seconds: float) -> None:
        super().__init__(name="pin", daemon=True)
        self.pinned: list[torch.Tensor] = []
        self.piece_ms: list[float] = []  # to pin one
        self.made_ms: list[float] = []  # before: to have its pages made
        self.error: BaseException | None = None
        self._kind, self._piece_bytes, self._rest = kind, piece_bytes, rest
        self._count, self._seconds = max(num_bytes // piece_bytes, 1), seconds

    def run(self) -> None:
        """Pin all pieces, or as many as the time allows."""
        try:
            torch.cuda.set_device(0)
            began = time.perf_counter()
            whole = None
            if self._kind != "alloc":
                whole = zeros((self._count * self._piece_bytes,), torch.uint8, torch.device("cpu"))
            for number in range(self._count):
                if time.perf_counter() - began > self._seconds:
                    break
                self._pin_one(None if whole is None else whole[number * self._piece_bytes :][: self._piece_bytes])
                time.sleep(self._rest * (self.piece_ms[-1] + self.made_ms[-1]) / 1e3)
        except BaseException as error:
            self.error = error

    def _pin_one(self, piece: torch.Tensor | None) -> None:
        began = time.perf_counter()
        if piece is not None and self._kind != "untouched":
            assert piece.data_ptr() % mmap.PAGESIZE == 0
            for advice in (_HUGE, _POPULATE_WRITE) if self._kind == "huge" else (_POPULATE_WRITE,):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(piece.nbytes), advice)
        made = time.perf_counter()
        if piece is None:
            piece = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            pin(piece)
        self.made_ms.append((made - began) * 1e3)
        self.piece_ms.append((time.perf_counter() - made) * 1e3)
        self.pinned.append(piece)

    def release(self) -> float:
        """Unpin; return the milliseconds."""
        began = time.perf_counter()
        if self._kind != "alloc":
            for piece in self.pinned:
                unpin(piece)
        self.pinned.clear()
        return (time.perf_counter() - began) * 1e3


def check(pieces: Pieces) -> None:
    """Raise AssertionError if bytes do not come back from what was pinned, the first and the last piece."""
    for piece in (pieces.pinned[0], pieces.pinned[-1]):
        sent = torch.randint(0, 256, (MIB,), dtype=torch.uint8, device="cuda")
        piece[-MIB:].copy_(sent, non_blocking=True)
        back = torch.empty_like(sent)
        back.copy_(piece[-MIB:], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(sent, back), "pinned memory came back with other bytes"
        assert torch.equal(sent.cpu(), piece[-MIB:])


def measure(steps: Steps, kind: str, *, piece_mib: int, num_bytes: int, rest: float, seconds: float) -> dict[str, Any]:
    """Run steps while memory is pinned, and without; return their times."""
    before = steps.run(_QUIET_S)
    pieces = Pieces(kind, piece_bytes=piece_mib * MIB, num_bytes=num_bytes, rest=rest, seconds=seconds)
    began = time.perf_counter()
    pieces.start()
    beside = steps.run(seconds + 5, until=lambda: not pieces.is_alive())
    elapsed_s = time.perf_counter() - began
    pieces.join()
    if pieces.error is not None:
        raise pieces.error
    check(pieces)
    num_pinned = len(pieces.pinned)
    release_ms = pieces.release()
    torch.accelerator.empty_host_cache()
    plain = statistics.mean(before + steps.run(_QUIET_S))
    busy_ms = sum(pieces.piece_ms) + sum(pieces.made_ms)
    return {
        "kind": kind,
        "piece_mib": piece_mib,
        "rest": rest,
        "pieces": num_pinned,
        "ms_made": statistics.median(pieces.made_ms),
        "ms_pinned": statistics.median(pieces.piece_ms),
        "ms_pinned_most": max(pieces.piece_ms),
        "gib_per_s": num_pinned * piece_mib / 1024 / elapsed_s,
        "gib_per_s_busy": num_pinned * piece_mib / 1024 / (busy_ms / 1e3),
        "ms_step_before": plain,
        "ms_step": statistics.mean(beside) if beside else None,
        "ms_step_most": max(beside, default=None),
        "throughput_lost": 1 - plain / statistics.mean(beside) if beside else None,
        "seconds_lost": (sum(beside) - plain * len(beside)) / 1e3,
        "ms_unpinned": release_ms,
    }


def pageable(steps: Steps) -> dict[str, Any]:
    """Return step times beside copies of 2 MiB a step to memory that is pinned, and to memory that is not."""
    source = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    stream, result = torch.cuda.Stream(), {}
    for name in ("pinned", "pageable"):
        target = torch.zeros(2 * MIB, dtype=torch.uint8)
        target = target.pin_memory() if name == "pinned" else target

        def copy(target: torch.Tensor = target) -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

        result[name] = statistics.mean(steps.run(0.5, beside=copy))
    return result


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pinning", description=__doc__)
    parser.add_argument("--gib", type=float, default=0.5, help="most memory of a run (0.5)")
    parser.add_argument("--step-ms", type=float, default=0.8, help="device time of a step (0.8)")
    parser.add_argument("--pieces", type=int, nargs="+", default=[4, 16, 64, 256], help="MiB")
    parser.add_argument("--rest", type=float, nargs="+", default=[8, 32], help="times the time of a piece")
    parser.add_argument("--seconds", type=float, default=1.2, help="the longest run")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    steps, rows = Steps(arguments.step_ms), []
    kinds = [(kind, piece, 0.0) for kind in KINDS for piece in arguments.pieces]
    kinds += [(KINDS[0], piece, rest) for piece in arguments.pieces if piece <= 16 for rest in arguments.rest]
    columns = "how,MiB,rest,pieces,ms made,pinned,most,GiB/s,step ms,beside,most,lost %,lost ms"
    table = [columns.split(",")]
    for kind, piece, rest in kinds:
        most = int(arguments.gib * 1024) * MIB
        row = measure(steps, kind, piece_mib=piece, num_bytes=most, rest=rest, seconds=arguments.seconds)
        rows.append(row)
        table.append(
            [kind, str(piece), f"{rest:g}", str(row["pieces"]), f"{row['ms_made']:.2f}", f"{row['ms_pinned']:.2f}",
             f"{row['ms_pinned_most']:.2f}", f"{row['gib_per_s']:.2f}", f"{row['ms_step_before']:.3f}",
             f"{row['ms_step'] or 0:.3f}", f"{row['ms_step_most'] or 0:.1f}",
             f"{100 * (row['throughput_lost'] or 0):.1f}", f"{1e3 * row['seconds_lost']:.0f}"]
        )  # fmt: skip
        print(*table[-1], flush=True)
    copies = pageable(steps)
    print(format_table(table))
    print(f"unpinned: {max(row['ms_unpinned'] for row in rows):.0f} ms at most")
    print("copies beside each step: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in copies.items()))
    if arguments.json:
        report = {"benchmark": "pinning", "date": now(), "host": host_facts(), "gpu": torch.cuda.get_device_name()}
        write_report(arguments.json, report | {"rows": rows, "copies": copies})
    return 0


if __name__ == "__main__":
    sys.exit(main())
