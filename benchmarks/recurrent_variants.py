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
from benchmarks import mamba2_kernels, old_mamba2_scan
from benchmarks.recurrent_kernels import Cell, Heads, Problem, _error, _work
from kernels.delta_rule import chunks
from kernels.delta_rule import triton as delta_rule
from kernels.delta_rule.triton_chunks import ChunkConfig
from kernels.mamba2 import chunked, triton_scan
from kernels.mamba2 import triton as mamba2
from kernels.mamba2.triton_scan import ScanConfig
from kernels.precompile import Compilation, collect_kernels
from kernels.states import load_states

QWEN = Heads("35b 16/32", 16, 32, 128, 128)
KIMI = Heads("kimi 32", 32, 32, 128, 128, by_dimension=True)
OLD = ChunkConfig(4, 64, 4, 3)
OLD_32 = OLD._replace(block=32)
NEW = ChunkConfig(4, 64, 4, 3, "fp16")
PREPARE = [
    OLD,
    NEW,
    NEW._replace(max_registers=168),
    NEW._replace(max_registers=128),
    NEW._replace(heads_each=2),
    NEW._replace(inversion="tf32", max_registers=168),
    NEW._replace(inversion="bf16x3"),
    NEW._replace(prepare_warps=8),
    NEW._replace(has_values=True),
    NEW._replace(has_values=True, max_registers=168),
]
SCAN = [
    NEW._replace(block=block, scan_warps=warps, scan_stages=stages, has_values=has_values, max_registers=168)
    for has_values in (False, True)
    for block, warps, stages in ((32, 4, 3), (32, 4, 2), (64, 4, 2), (64, 8, 3), (64, 8, 2), (128, 8, 3), (128, 8, 2))
] + [OLD_32, NEW._replace(block=16, max_registers=168), NEW._replace(block=16, has_values=True, max_registers=168)]
FEW = [
    OLD, OLD_32,
    NEW._replace(max_registers=168), NEW._replace(max_registers=168, block=32),
    NEW._replace(max_registers=168, scan_stages=2), NEW._replace(max_registers=168, block=64, scan_warps=8, scan_stages=2),
    NEW._replace(max_registers=168, has_values=True, scan_stages=2),
    NEW._replace(max_registers=168, has_values=True, block=32, scan_stages=2),
]  # fmt: skip
OLD_KIMI = ChunkConfig(2, 32, 4, 2)
KIMIS = [
    OLD_KIMI,
    ChunkConfig(8, 32, 4, 2, "fp16", block_d=64),
    ChunkConfig(8, 32, 4, 2, "fp16", block_d=64, max_registers=128),
    ChunkConfig(8, 32, 4, 2, "fp16", block_d=128),
    ChunkConfig(4, 32, 4, 2, "fp16", block_d=32),
    ChunkConfig(4, 32, 4, 2, "fp16", block_d=32, max_registers=168),
    ChunkConfig(4, 32, 4, 2, "fp16", block_d=64),
    ChunkConfig(8, 64, 4, 2, "fp16", block_d=64),
    ChunkConfig(8, 32, 4, 3, "fp16", block_d=64),
    ChunkConfig(8, 64, 8, 2, "fp16", block_d=64),
]
SIZES = [(1, 16384), (8, 1024), (1, 4096), (1, 700), (30, 300), (128, 64)]
PLAN = [
    (QWEN, SIZES, PREPARE + SCAN),
    (KIMI, [(1, 2048), (1, 16384), (8, 1024), (1, 512), (30, 300)], KIMIS),
    (Heads("16/48", 16, 48, 128, 128), [(1, 4096), (8, 1024), (1, 16384)], FEW),
    (Heads("16/16", 16, 16, 128, 128), [(1, 4096), (8, 1024)], FEW),
    (Heads("16/64", 16, 64, 128, 128), [(1, 4096), (8, 1024)], FEW),
    (Heads("16/32 d64", 16, 32, 64, 64), [(1, 4096), (8, 1024)], FEW),
]


MAMBA_SHAPES = (mamba2_kernels.SHAPES[0], mamba2_kernels.SHAPES[2])
MAMBA_SIZES = [(1, 16384), (1, 4096), (8, 1024), (1, 700), (30, 300)]
MAMBAS: list[tuple[ScanConfig | None, int | None]] = [
    (None, None),  # the old file
    (ScanConfig(64, 64, 4, 2), None),
    (ScanConfig(64, 64, 4, 3), None),
    (ScanConfig(64, 64, 8, 2), None),
    *((ScanConfig(64, 64, 8, stages, is_pair=True), segment) for stages in (2, 3) for segment in (256, 512, 1024, 2048)),
    *((ScanConfig(64, 32, 4, 2, is_pair=True), segment) for segment in (256, 512, 1024, 2048)),
    *((ScanConfig(64, 64, 4, 2, is_pair=True), segment) for segment in (512, 1024)),
]  # fmt: skip


def run_mamba(problem: mamba2_kernels.Problem, config: ScanConfig | None, segment: int | None) -> torch.Tensor:
    """One launch."""
    mamba2.scan_rows = old_mamba2_scan.scan_rows if config is None else triton_scan.scan_rows
    return mamba2.mamba2(*problem.tokens, problem.view, problem.metadata, segment=segment, config=config, pdl=True)


def measure_mamba(shape: mamba2_kernels.Shape, rows: int, tokens: int, device: torch.device) -> list[Cell]:
    """Check and time each variant."""
    problem = mamba2_kernels.make_problem(shape, rows, tokens, device)
    kept = problem.view.pool.clone()
    out = chunked.mamba2(*problem.tokens, problem.view, problem.metadata)
    states = load_states(problem.view, problem.metadata).clone()
    problems = [problem, *(mamba2_kernels.make_problem(shape, rows, tokens, device) for _ in range(3))]
    cells = []
    for config, segment in MAMBAS:
        cell = Cell("mamba2", shape.name, rows, tokens, f"{'old' if config is None else '-'.join(map(str, vars(config).values()))} {segment}")
        cells.append(cell)
        try:
            problem.view.pool.copy_(kept)
            read = run_mamba(problem, config, segment)
            cell.error = max(_error(read, out), _error(load_states(problem.view, problem.metadata), states))
            assert cell.error < 2e-2, cell.error
            cell.us = time_graph([functools.partial(run_mamba, each, config, segment) for each in problems], replays=5)
        except Exception as error:
            cell.trouble = f"{type(error).__name__}: {str(error)[:200]}"
    return cells


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
            for shape in MAMBA_SHAPES:
                for rows, tokens in MAMBA_SIZES:
                    for config, segment in MAMBAS:
                        run_mamba(mamba2_kernels.make_problem(shape, rows, min(tokens, 600), device), config, segment and 256)
        Compilation(list(kernels)).wait(lambda done, total: None)
        print(f"# compiled {len(kernels)} kernels in {time.monotonic() - started_s:.0f} s", flush=True)
        work = [functools.partial(measure_delta, *case, device) for case in list_cases(PLAN[:2])]
        for shape in MAMBA_SHAPES:
            work += [functools.partial(measure_mamba, shape, rows, tokens, device) for rows, tokens in MAMBA_SIZES]
        work += [functools.partial(measure_delta, *case, device) for case in list_cases(PLAN[2:])]
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


def list_cases(plan: list[tuple[Heads, list[tuple[int, int]], list[ChunkConfig]]]) -> list[tuple[Heads, int, int, list[ChunkConfig]]]:
    """All problems, and what is tried with each."""
    return [(heads, rows, tokens, configs if rows <= 64 else FEW) for heads, sizes, configs in plan for rows, tokens in sizes]


def measure_delta(heads: Heads, rows: int, tokens: int, configs: list[ChunkConfig], device: torch.device) -> list[Cell]:
    """Make and measure one problem."""
    return measure(Problem(heads, rows=rows, tokens=tokens, device=device), configs)


def run(problem: Problem, config: ChunkConfig, layer: int) -> torch.Tensor:
    """One launch."""
    return delta_rule.gated_delta_rule(
        *problem.qkv, problem.g, problem.beta, problem.views[layer][1], problem.metadata, scale=0.1, pdl=True,
        chunk_config=config,
    )  # fmt: skip


def measure(problem: Problem, configs: list[ChunkConfig]) -> list[Cell]:
    """Check outputs and states of each variant, then time it."""
    heads, view = problem.heads, problem.views[0][1]
    kept = view.pool.clone()
    q, k, v = (part.float() for part in problem.qkv)
    out = chunks.gated_delta_rule(q, k, v, problem.g, problem.beta, view, problem.metadata, scale=0.1)
    states = load_states(view, problem.metadata).clone()
    cells = []
    for config in configs:
        cell = Cell("delta rule", heads.name, problem.rows, problem.tokens, "-".join(map(str, config)))
        cells.append(cell)
        try:
            view.pool.copy_(kept)
            read = run(problem, config, 0)
            cell.error = max(_error(read, out), _error(load_states(view, problem.metadata), states))
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
