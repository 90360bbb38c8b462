"""Seconds to bring weights from files in the page cache to a GPU: mapped files against threads with pinned buffers.

    python -m benchmarks.weight_copies --gib 4 --json out.json
Writes a file of random weights, whose tensors have the sizes of Llama-3.1-8B's, reads it once, and compares each way's
tensors with the file's before it is timed. --threads and --chunks-mib list what is tried, each with each.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.weights.checkpoint import SafetensorsReader, TensorSlice
from models.weights.staged import CHUNK_BYTES, NUM_THREADS, StagedCopies

_SHAPES = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
_DEVICE = torch.device("cuda")
_REPEATS = 2


def write_weights(folder: Path, *, num_bytes: int) -> dict[str, torch.Tensor]:
    """Write model.safetensors with at least num_bytes of bf16 weights; return them, on the CPU."""
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator(_DEVICE).manual_seed(0)
    for number, shape in enumerate(itertools.cycle(_SHAPES)):
        if sum(tensor.nbytes for tensor in tensors.values()) >= num_bytes:
            break
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=_DEVICE).normal_(0.0, 0.02, generator=generator)
        tensors[f"model.{number}.weight"] = drawn.cpu()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def read_all(folder: Path, tensors: dict[str, torch.Tensor], staged: StagedCopies | None) -> list[torch.Tensor]:
    """Read every tensor as a start does, and wait for the device. staged: None reads through mapped files."""
    reader = SafetensorsReader(folder, device=_DEVICE, dtype=torch.bfloat16)
    if reader._staged is not None:
        reader._staged.close()
    reader._staged = staged
    found = [reader.read(TensorSlice(name, tuple(each.shape), 0, 0, len(each))) for name, each in tensors.items()]
    torch.cuda.synchronize()
    return found


def measure(folder: Path, tensors: dict[str, torch.Tensor], make: Callable[[], StagedCopies | None]) -> float:
    """Return the least seconds of a few reads, with threads and pinned buffers. Raises RuntimeError if one differs."""
    fastest = float("inf")
    for _ in range(_REPEATS):
        torch.cuda.empty_cache()
        started_s = time.perf_counter()
        staged = make()
        found = read_all(folder, tensors, staged)
        if staged is not None:
            staged.close()
        fastest = min(fastest, time.perf_counter() - started_s)
        for copied, (name, each) in zip(found, tensors.items(), strict=True):
            if not torch.equal(copied.cpu(), each):
                raise RuntimeError(f"{name} differs from the file's")
        found.clear()
    return fastest


def main() -> int:
    """Measure each way, print a table and save it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_copies", description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[4, NUM_THREADS, 16])
    parser.add_argument("--chunks-mib", type=int, nargs="+", default=[1, CHUNK_BYTES // 1024**2, 16])
    parser.add_argument("--folder", default=None, help="where the file is written")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < 2 * args.gib * 1024**3:
            raise SystemExit(f"{folder} has no room for {args.gib} GiB: name another --folder")
        tensors = write_weights(folder, num_bytes=int(args.gib * 1024**3))
        load_file(folder / "model.safetensors")
        num_bytes = sum(each.nbytes for each in tensors.values())
        ways: list[tuple[str, Callable[[], StagedCopies | None]]] = [("mapped", lambda: None)]
        for num_threads, mib in itertools.product(args.threads, args.chunks_mib):
            make = partial(StagedCopies, _DEVICE, num_threads=num_threads, chunk_bytes=mib * 1024**2)
            ways.append((f"{num_threads} threads, {mib} MiB", make))
        for way, open_staged in ways:
            seconds = measure(folder, tensors, open_staged)
            rows.append({"way": way, "seconds": round(seconds, 3), "gb_per_s": round(num_bytes / seconds / 1e9, 1)})
    for row in rows:
        print(f"{row['way']:>24}  {row['seconds']:>7} s  {row['gb_per_s']:>6} GB/s")
    if args.json is not None:
        facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "gpu": torch.cuda.get_device_name()}
        args.json.write_text(json.dumps({**facts, "bytes": num_bytes, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
