"""Decode attention of rows that share a prefix: python -m benchmarks.shared_prefix [--sweep] [--smoke] [--json FILE].

Grouped against one by one, as the backend launches them in a CUDA graph: per layer, without the kernels that prepare a
step, which have a column of their own. All rows share `shared` tokens and have between 128 and 1,024 of their own. Each
case is checked against float64, both ways. ideal: the bytes that grouped attention reads, each once, at the nominal
rate. From these figures follow the rates of engine/startup/limits.py. --sweep: candidate
tiles of the shared pass instead, each with the decode attention behind it. --smoke: tiny cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.kernel_timing import machine_facts, nominal_rates, num_copies, time_graph
from kernels.attention.base import AttentionMetadata, GroupedRows, SharedRows
from kernels.attention.triton_backend import TritonAttention

if TYPE_CHECKING:  # it needs Triton
    from kernels.attention.triton_shared import SharedConfig, SharedParts

HEADS = {"8b": (32, 8, 128), "0.6b": (16, 8, 128)}  # query heads, KV heads, head size
CASES = [(rows, shared) for rows in (16, 64, 256) for shared in (512, 2048, 8192)]
SMOKE = [(4, 128), (16, 512)]
SWEPT = [(16, 8192), (64, 2048), (256, 2048)]
# Queries, keys, warps, stages, programs that share an SM
TILES = [
    (64, 64, 4, 3, 1), (64, 64, 4, 3, 2), (64, 128, 4, 2, 1), (64, 32, 4, 4, 2), (64, 128, 8, 3, 1), (128, 64, 8, 3, 1),
    (128, 64, 8, 2, 2), (128, 128, 8, 2, 1), (128, 32, 8, 4, 1), (128, 64, 4, 3, 1),
]  # fmt: skip
_BLOCK = 16  # tokens
_TOLERANCE = 6e-3
_NUM_CHECKED = 4  # rows
_MOST_BYTES = 24 << 30  # of one case's caches


@dataclass(frozen=True)
class Cell:
    """One case, in µs per layer, and of a step's preparation."""

    heads: str
    rows: int
    shared: int
    ungrouped_us: float
    grouped_us: float
    ideal_us: float
    prepare_us: float
    ungrouped_prepare_us: float
    error: float
    ungrouped_error: float


@dataclass(frozen=True)
class Problem:
    """Rows over a paged cache with layers of random keys and values."""

    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    metadata: AttentionMetadata

    def ungrouped(self) -> AttentionMetadata:
        """Return the metadata of the same rows one by one."""
        return dataclasses.replace(self.metadata, shared=None, grouped_rows=None, decode_pieces=None)

    def grouped(self) -> AttentionMetadata:
        """Return fresh metadata with the group."""
        return dataclasses.replace(self.metadata, grouped_rows=None, decode_pieces=None)


def make_problem(heads: tuple[int, int, int], rows: int, shared: int) -> Problem:
    """Draw a case on the GPU: as many layers as keep successive calls from finding their inputs in L2."""
    num_heads, num_kv_heads, head_dim = heads
    draw = random.Random(rows * shared)
    own = [draw.randint(128, 1024) for _ in range(rows)]
    columns = [-(-count // _BLOCK) for count in own]
    first = shared // _BLOCK
    num_blocks = first + sum(columns)
    width = (first + max(columns) + 15) // 16 * 16
    order = torch.randperm(num_blocks, dtype=torch.int32)
    table = torch.zeros(rows, width, dtype=torch.int32)
    table[:, :first] = order[:first]
    begin = first
    for row, count in enumerate(columns):
        table[row, first : first + count] = order[begin : begin + count]
        begin += count
    shape = (num_blocks, _BLOCK, num_kv_heads, head_dim)
    num_bytes = 4 * num_blocks * _BLOCK * num_kv_heads * head_dim
    copies = min(num_copies(num_bytes), max(2, _MOST_BYTES // num_bytes))

    def cache() -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    shares = torch.tensor([[1, shared]] * rows, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([shared + count for count in own], dtype=torch.int32, device="cuda"),
        block_table=table.cuda(),
        slot_mapping=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        max_query_len=1,
        max_seq_len=shared + 1024,
        num_decodes=rows,
        shared=SharedRows(torch.arange(rows, device="cuda"), shares, max_groups=32),
    )
    q = torch.randn(rows, num_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    return Problem(q, [(cache(), cache()) for _ in range(copies)], metadata)


def measure(name: str, rows: int, shared: int) -> Cell:
    """Check and time one case."""
    problem = make_problem(HEADS[name], rows, shared)
    plain_us, plain_prepare_us, plain_error = _measure(problem, problem.ungrouped)
    grouped_us, prepare_us, error = _measure(problem, problem.grouped)
    _, num_kv_heads, head_dim = HEADS[name]
    num_keys = int(problem.metadata.seq_lens.sum()) - (rows - 1) * shared
    ideal_us = num_keys * num_kv_heads * head_dim * 4 / nominal_rates()[0] * 1e6
    return Cell(name, rows, shared, plain_us, grouped_us, ideal_us, prepare_us, plain_prepare_us, error, plain_error)


def sweep(name: str, rows: int, shared: int) -> Iterator[dict[str, object]]:
    """Check and time one case with each of TILES."""
    from kernels.attention.triton_cut_rows import cut_rows
    from kernels.attention.triton_decode import decode_attention
    from kernels.attention.triton_group_rows import group_rows
    from kernels.attention.triton_shared import SharedConfig, shared_attention
    from kernels.attention.triton_splits import DecodeScratch

    num_heads, num_kv_heads, head_dim = HEADS[name]
    problem = make_problem(HEADS[name], rows, shared)
    q, metadata = problem.q, problem.metadata
    assert metadata.shared is not None
    scratch = DecodeScratch.allocate(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=q.device)
    out = torch.empty_like(q)
    for tile in TILES:
        config = SharedConfig(*tile)
        num_pieces = max(1, config.per_sm * scratch.num_sms // num_kv_heads)
        tile_rows = config.block_m * num_kv_heads // num_heads
        grouped = group_rows(metadata.shared, metadata.seq_lens, tile_rows=tile_rows, num_pieces=num_pieces)
        own = scratch.num_pieces(num_rows=rows, num_kv_heads=num_kv_heads)
        pieces = cut_rows(metadata.seq_lens, num_pieces=own, shared_rows=grouped.rows)

        def shared_pass(layer: int, grouped: GroupedRows = grouped, config: SharedConfig = config) -> SharedParts:
            caches = problem.caches[layer]
            return shared_attention(q, *caches, metadata.block_table, grouped, config, scale=head_dim**-0.5, pdl=True)

        def attend(layer: int, run: Callable[[int], SharedParts] = shared_pass, own: torch.Tensor = pieces) -> None:
            decode_attention(
                q, *problem.caches[layer], metadata.block_table, metadata.seq_lens, out, scratch,
                scale=head_dim**-0.5, pieces=own, shared=run(layer), pdl=True,
            )  # fmt: skip

        layers = range(len(problem.caches))
        us = time_graph([partial(attend, layer) for layer in layers])
        shared_us = time_graph([partial(shared_pass, layer) for layer in layers])
        attend(-1)
        yield {"heads": name, "rows": rows, "shared": shared, "tile": tile, "us": us, "shared_us": shared_us} | {
            "error": _error(problem, out)
        }


def _measure(problem: Problem, metadata_of: Callable[[], AttentionMetadata]) -> tuple[float, float, float]:
    """Return µs of a layer and of a step's preparation, and the error of the last layer."""
    backend, scale = TritonAttention(), problem.q.shape[2] ** -0.5

    def attend(layer: int, metadata: AttentionMetadata) -> torch.Tensor:
        keys, values = problem.caches[layer]
        return backend.forward(problem.q, keys, values, metadata, scale=scale)

    attend(0, metadata_of())
    metadata = metadata_of()
    backend.prepare(metadata)
    us = time_graph([partial(attend, layer, metadata) for layer in range(len(problem.caches))])
    prepare_us = time_graph([lambda: backend.prepare(metadata_of())] * 8)
    return us, prepare_us, _error(problem, attend(-1, metadata))


def _error(problem: Problem, out: torch.Tensor) -> float:
    """Return the largest relative error of some rows against float64; inf if any output is not finite."""
    if not bool(out.isfinite().all()):
        return float("inf")
    worst, num_rows = 0.0, len(out)
    keys, values = problem.caches[-1]
    for row in sorted({num_rows * i // _NUM_CHECKED for i in range(_NUM_CHECKED)} | {num_rows - 1}):
        length = int(problem.metadata.seq_lens[row])
        blocks = problem.metadata.block_table[row, : -(-length // _BLOCK)].long()
        k, v = (cache[blocks].flatten(0, 1)[:length].double() for cache in (keys, values))
        q = problem.q[row].double().unflatten(0, (k.shape[1], -1))
        weights = (torch.einsum("kgd,skd->kgs", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        expected = torch.einsum("kgs,skd->kgd", weights, v).flatten(0, 1)
        worst = max(worst, float((out[row].double() - expected).norm() / expected.norm()))
    return worst


def _line(cell: Cell) -> str:
    times = f"{cell.ungrouped_us:10.1f}{cell.grouped_us:10.1f}{cell.ungrouped_us / cell.grouped_us:8.2f}x"
    prepared = f"{cell.ideal_us:9.1f}{cell.ungrouped_prepare_us:9.1f}{cell.prepare_us:9.1f}"
    return f"{cell.heads:>5}{cell.rows:6}{cell.shared:8}{times}{prepared}{cell.error:10.1e}{cell.ungrouped_error:10.1e}"


def _main_sweep(json_path: Path | None) -> int:
    tried = []
    for name in HEADS:
        for rows, shared in SWEPT:
            for each in sweep(name, rows, shared):
                tried.append(each)
                print(*(f"{value:.3g}" if isinstance(value, float) else value for value in each.values()), flush=True)
    if json_path:
        json_path.write_text(json.dumps({"facts": machine_facts(), "tried": tried}, indent=1) + "\n")
    return 0


def main() -> int:
    """Run from the command line; return the exit code: 1 if a case differs from float64."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.sweep:
        return _main_sweep(arguments.json)
    print("heads  rows  shared  one by one   grouped  factor    ideal  prepare, before/after     errors", flush=True)
    cells = []
    for name in HEADS:
        for rows, shared in SMOKE if arguments.smoke else CASES:
            cells.append(measure(name, rows, shared))
            print(_line(cells[-1]), flush=True)
    if arguments.json:
        report = {"facts": machine_facts(), "unit": "µs per layer", "cells": [asdict(cell) for cell in cells]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(max(max(cell.error, cell.ungrouped_error) for cell in cells) > _TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
