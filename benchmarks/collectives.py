"""Sums over the GPUs of this host, one kernel (kernels/one_shot.py) beside NCCL: checked first, then timed in graphs.

    python -m benchmarks.collectives [--ranks 2] [--json FILE]
Each time is of one sum among 50 in a graph, the slowest rank's, median of 15 replays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernel_timing import machine_facts, time_graph
from engine.process_group import join_ranks
from models.parallel import TensorParallel

# rows × hidden size of Qwen3-0.6B (1024), Llama-3.1-8B (4096) and 70B (8192)
_SHAPES = [(rows, hidden) for hidden in (1024, 4096, 8192) for rows in (1, 8, 32, 64, 128, 256, 512, 2048)]
_NUM_SUMS = 50


def main() -> int:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _run_rank(arguments.rank, arguments.ranks, arguments.store, arguments.json)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        more = [] if arguments.json is None else ["--json", str(arguments.json)]
        command = [sys.executable, "-m", "benchmarks.collectives", "--ranks", str(arguments.ranks), *more]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--store", f"{folder}/store"])
            for rank in range(arguments.ranks)
        ]
        return max(abs(rank.wait()) for rank in ranks)


def _run_rank(rank: int, size: int, store: str, path: Path | None) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    tp = join_ranks(rank=rank, size=size, rendezvous=store, device=device)
    nccl = TensorParallel(rank, size, tp.group)
    rows = []
    for shape in _SHAPES:
        x = torch.randn(shape, device=device).to(torch.bfloat16)
        row = {"rows": shape[0], "hidden_size": shape[1], "kib": x.nbytes / 1024}
        for name, ranks in (("one_shot_us", tp), ("nccl_us", nccl)):
            if name == "one_shot_us" and (tp.one_shot is None or not tp.one_shot.takes(x)):
                continue
            parts = nccl.all_gather(x[None], 0).float().sum(0)
            torch.testing.assert_close(ranks.all_reduce(x.clone()).float(), parts, atol=5e-2, rtol=2e-2)
            us = time_graph([partial(ranks.all_reduce, x)] * _NUM_SUMS)
            row[name] = -nccl.least(-round(us * 1000), device) / 1000
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    if rank == 0 and path is not None:
        path.write_text(json.dumps({"machine": machine_facts(), "ranks": size, "sums": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
