"""Checks, then times, variants of the chunked gated delta rule. python -m benchmarks.recurrent_variants [--json FILE]"""

from __future__ import annotations

import argparse
import functools
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.kernel_timing import machine_facts, time_graph
from benchmarks import old_chunks
from benchmarks.recurrent_kernels import Cell, Heads, Problem, _error, _work
from kernels.delta_rule import chunks
from kernels.delta_rule import triton as delta_rule
from kernels.delta_rule import triton_chunks
from kernels.delta_rule.triton_chunks import ChunkConfig
from kernels.precompile import Compilation, collect_kernels
from kernels.states import load_states

QWEN = Heads("35b 16/32", 16, 32, 128, 128)
KIMI = Heads("kimi 32", 32, 32, 128, 128, by_dimension=True)
Config = ChunkConfig | str
NEW = ChunkConfig(4, 64, 4, 3, 64, True)
QWENS: list[Config] = [
    "old",
    *(NEW._replace(block=block, is_early=is_early) for block in (32, 64) for is_early in (False, True)),
    NEW._replace(block=32, scan_stages=4), NEW._replace(scan_stages=2), NEW._replace(block=32, scan_stages=2),
    NEW._replace(prepare_warps=2), NEW._replace(block=128, scan_warps=8), NEW._replace(scan_warps=8),
    "first phase",
]  # fmt: skip
KIMI_NEW = ChunkConfig(4, 32, 4, 3, 64, True)
KIMIS: list[Config] = [
    "old", KIMI_NEW, KIMI_NEW._replace(is_early=False), KIMI_NEW._replace(scan_stages=2),
    KIMI_NEW._replace(block=64, scan_stages=2), KIMI_NEW._replace(block=64, scan_stages=2, scan_warps=8),
    KIMI_NEW._replace(block_d=128), KIMI_NEW._replace(block_d=32), "first phase",
]  # fmt: skip
FEW: list[Config] = [
    "old", *(NEW._replace(block=block) for block in (32, 64)), NEW._replace(scan_stages=2), "first phase"
]  # fmt: skip
SIZES = [(1, 16384), (8, 1024), (1, 4096), (1, 700), (30, 300), (128, 64)]
PLAN: list[tuple[Heads, list[tuple[int, int]], list[Config]]] = [
    (QWEN, SIZES, QWENS),
    (KIMI, [(1, 2048), (1, 16384), (8, 1024), (1, 512), (30, 300)], KIMIS),
    (Heads("16/48", 16, 48, 128, 128), [(1, 4096), (8, 1024), (1, 16384)], FEW),
    (Heads("16/16", 16, 16, 128, 128), [(1, 4096), (8, 1024)], FEW),
    (Heads("16/64", 16, 64, 128, 128), [(1, 4096), (8, 1024)], FEW),
    (Heads("16/32 d64", 16, 32, 64, 64), [(1, 4096), (8, 1024)], FEW),
]


class Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: object) -> object:
        """What is called with arguments."""
        return lambda *args, **kwargs: None


SCAN_KERNEL = triton_chunks._scan_kernel


def main() -> None:
    """Compile all in parallel, then check and time each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=80.0, help="begin no problem after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    device, started_s = torch.device("cuda"), time.monotonic()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    cells: list[Cell] = []
    with torch.inference_mode():
        with collect_kernels() as kernels:
            for heads, sizes, configs in PLAN:
                for rows, tokens in sizes:
                    problem = Problem(heads, rows=rows, tokens=min(tokens, 130) if rows < 16 else 64, device=device)
                    for config in configs if rows <= 64 else FEW:
                        try:
                            run(problem, config, 0)
                        except Exception as error:
                            print(heads.name, config, str(error)[:200], flush=True)
        Compilation(list(kernels)).wait(lambda done, total: None)
        print(f"# compiled {len(kernels)} kernels in {time.monotonic() - started_s:.0f} s", flush=True)
        work = [functools.partial(measure_delta, *case, device) for case in list_cases(PLAN)]
        for number, each in enumerate(work):
            if time.monotonic() - started_s > options.seconds:
                print(f"# out of time: {len(work) - number} problems left")
                break
            cells += each()
            print(f"# {time.monotonic() - started_s:.0f} s: {cells[-1].shape} {cells[-1].rows} x {cells[-1].tokens}", flush=True)
            if options.json:
                report = {"machine": machine_facts(), "results": [asdict(cell) for cell in cells]}
                options.json.write_text(json.dumps(report, indent=1))
    table(cells)


def list_cases(plan: list[tuple[Heads, list[tuple[int, int]], list[Config]]]) -> list[tuple[Heads, int, int, list[Config]]]:
    """All problems, and what is tried with each."""
    return [(heads, rows, tokens, configs if rows <= 64 else FEW) for heads, sizes, configs in plan for rows, tokens in sizes]


def measure_delta(heads: Heads, rows: int, tokens: int, configs: list[Config], device: torch.device) -> list[Cell]:
    """Make and measure one problem."""
    return measure(Problem(heads, rows=rows, tokens=tokens, device=device), configs)


def run(problem: Problem, config: Config, layer: int) -> torch.Tensor:
    """One launch."""
    delta_rule.advance_by_chunks = (old_chunks if config == "old" else triton_chunks).advance_by_chunks
    triton_chunks._scan_kernel = Nothing() if config == "first phase" else SCAN_KERNEL
    return delta_rule.gated_delta_rule(
        *problem.qkv, problem.g, problem.beta, problem.views[layer][1], problem.metadata, scale=0.1, pdl=True,
        chunk_config=None if isinstance(config, str) else config,
    )  # fmt: skip


def measure(problem: Problem, configs: list[Config]) -> list[Cell]:
    """Check outputs and states of each variant, then time it."""
    heads, view = problem.heads, problem.views[0][1]
    kept = view.pool.clone()
    q, k, v = (part.float() for part in problem.qkv)
    out = chunks.gated_delta_rule(q, k, v, problem.g, problem.beta, view, problem.metadata, scale=0.1)
    states = load_states(view, problem.metadata).clone()
    cells = []
    for config in configs:
        cell = Cell("delta rule", heads.name, problem.rows, problem.tokens, config if isinstance(config, str) else "-".join(map(str, config)))
        cells.append(cell)
        try:
            view.pool.copy_(kept)
            read = run(problem, config, 0)
            cell.error = max(_error(read, out), _error(load_states(view, problem.metadata), states))
            if config == "first phase":
                cell.error = 0.0
            assert cell.error < 2e-2, cell.error
            view.pool.copy_(kept)
            calls = [functools.partial(run, problem, config, layer) for layer in range(min(6, len(problem.views)))]
            cell.us = time_graph(calls, replays=5)
            num_bytes, num_flops = _work("delta rule", problem)
            cell.floor_percent = 100 * max(num_bytes / 3.35e12, num_flops / 989e12) * 1e6 / cell.us
        except Exception as error:
            cell.trouble = f"{type(error).__name__}: {str(error)[:200]}"
    return cells


def table(cells: list[Cell]) -> None:
    """Print a row for each configuration, a column for each size."""
    for name in dict.fromkeys(cell.shape for cell in cells):
        own = [cell for cell in cells if cell.shape == name]
        sizes = list(dict.fromkeys((cell.rows, cell.tokens) for cell in own))
        print(f"\n{name:42s}" + "".join(f"{f'{rows}x{tokens}':>10s}" for rows, tokens in sizes) + "  error")
        for config in dict.fromkeys(cell.config for cell in own):
            found = {(cell.rows, cell.tokens): cell for cell in own if cell.config == config}
            times = "".join(
                f"{found[size].us:10.1f}" if size in found and not found[size].trouble else "         -" for size in sizes
            )
            print(f"{config:42s}{times}  {max(cell.error for cell in found.values()):.1e}")
            for text in {cell.trouble for cell in found.values() if cell.trouble}:
                print("    ", text)


if __name__ == "__main__":
    main()
