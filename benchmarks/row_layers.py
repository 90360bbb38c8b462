"""Checks, then times, all layers of one row in one kernel beside today's: python -m benchmarks.row_layers.

[--seconds N] [--json FILE]

The work runs in a process of its own, which is killed after so many seconds: programs that wait for each other may
hang. Needs a Hopper GPU and Triton.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.kernel_timing import BF16_CUDA, machine_facts
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise import reference as elementwise
from kernels.elementwise.triton_write_kv import norm_rope_write_kv
from kernels.linear.late_norm import LateNorm
from kernels.linear.triton_row import normed_gemv, row_gemv
from kernels.precompile import Compilation, collect_kernels
from kernels.row_layers.gluon_layers import LayerShape, RowScratch, row_layers

_EPS = 1e-6
_BLOCK = 16
_MAX_LEN = 30_016
_CONTEXTS = (128, 600, 4_000, 30_000)
_CHECKED = (1, 2, 65, 66, 600, 1_025, 4_000)
_Run = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Layer:
    norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Problem:
    """Layers of Qwen3-0.6B with random weights, and one row of any length up to 30,016 tokens."""

    def __init__(self, num_layers: int) -> None:
        self.shape = LayerShape(1024, 16, 8, 128, 3072)
        shape, device = self.shape, BF16_CUDA["device"]
        blocks = _MAX_LEN // _BLOCK
        self.layers = [
            _Layer(
                _norm(shape.hidden), _matrix(shape.num_qkv, shape.hidden), _norm(128), _norm(128),
                _matrix(shape.hidden, 2048), _norm(shape.hidden), _matrix(2 * shape.intermediate, shape.hidden),
                _matrix(shape.hidden, shape.intermediate), torch.randn(blocks + 1, _BLOCK, 8, 128, **BF16_CUDA),
                torch.randn(blocks + 1, _BLOCK, 8, 128, **BF16_CUDA),
            )
            for _ in range(num_layers)
        ]  # fmt: skip
        names = ("norm", "qkv", "q_norm", "k_norm", "output", "mlp_norm", "up", "down", "keys", "values")
        rows = [[getattr(layer, name).data_ptr() for name in names] for layer in self.layers]
        self.addresses = torch.tensor(rows, dtype=torch.int64, device=device)
        angles = torch.outer(torch.arange(_MAX_LEN), 1e6 ** (-torch.arange(64) / 64))
        self.angles = torch.cat((angles.cos(), angles.sin()), 1).to(**BF16_CUDA)
        self.table = torch.randperm(blocks, device=device).to(torch.int32)[None, :] + 1
        self.seq_lens = torch.ones(1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self.slots = torch.zeros(1, dtype=torch.int64, device=device)
        self.hidden = torch.randn(1, shape.hidden, **BF16_CUDA)
        self.decode_scratch = DecodeScratch.allocate(num_heads=16, num_kv_heads=8, head_dim=128, device=device)
        self.scratch = RowScratch.allocate(shape, device)

    def set_length(self, length: int) -> None:
        """Make the row so long, its newest token included."""
        self.seq_lens.fill_(length)
        self.positions.fill_(length - 1)
        block, offset = divmod(length - 1, _BLOCK)
        self.slots.copy_(self.table[0, block].long() * _BLOCK + offset)

    def one_kernel(self, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers in one kernel."""
        return row_layers(
            self.hidden, self.addresses[:num_layers], self.shape, self.layers[0].keys, self.table, self.seq_lens,
            self.positions, self.slots, self.angles, self.scratch, scale=128**-0.5, eps=_EPS, head_eps=_EPS,
            has_head_norms=True,
        )  # fmt: skip

    def kernels(self, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers in today's kernels."""
        x, residual = self.hidden, torch.zeros_like(self.hidden)
        for layer in self.layers[:num_layers]:
            late = LateNorm(x, residual, layer.norm, _EPS, torch.empty_like(residual))
            qkv, residual = normed_gemv(late, layer.qkv, None, pdl=True), late.new_residual
            q = norm_rope_write_kv(
                qkv, layer.q_norm, layer.k_norm, _EPS, self.positions, self.angles, layer.keys, layer.values,
                self.slots, num_heads=16, pdl=True,
            )  # fmt: skip
            out = torch.empty_like(q)
            decode_attention(
                q, layer.keys, layer.values, self.table, self.seq_lens, out, self.decode_scratch, scale=128**-0.5,
                max_seq_len=_MAX_LEN, pdl=True,
            )  # fmt: skip
            late = LateNorm(
                row_gemv(out.flatten(1), layer.output, None, pdl=True), residual, layer.mlp_norm, _EPS,
                torch.empty_like(residual),
            )  # fmt: skip
            inner, residual = normed_gemv(late, layer.up, None, gate="silu", pdl=True), late.new_residual
            x = row_gemv(inner, layer.down, None, pdl=True)
        return x, residual

    def specification(self, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers in torch."""
        length = int(self.seq_lens)
        x, residual = self.hidden, torch.zeros_like(self.hidden)
        for layer in self.layers[:num_layers]:
            normed, residual = elementwise.add_rms_norm(x, residual, layer.norm, _EPS)
            q = elementwise.norm_rope_write_kv(
                functional.linear(normed, layer.qkv), layer.q_norm, layer.k_norm, _EPS, self.positions, self.angles,
                layer.keys, layer.values, self.slots, num_heads=16,
            )  # fmt: skip
            blocks = self.table[0, : -(-length // _BLOCK)].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(2, 1)
                for cache in (layer.keys, layer.values)
            )
            weights = (torch.einsum("hd,thd->ht", q[0].float(), keys) * 128**-0.5).softmax(1)
            attended = torch.einsum("ht,thd->hd", weights, values).to(q.dtype).flatten()[None, :]
            normed, residual = elementwise.add_rms_norm(
                functional.linear(attended, layer.output), residual, layer.mlp_norm, _EPS
            )
            inner = elementwise.silu_and_mul(functional.linear(normed, layer.up))
            x = functional.linear(inner, layer.down)
        return x, residual


def main() -> None:
    """Run the checks and timings in a process that is killed if it hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="kill the process after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.row_layers needs a CUDA device.")
    if not options.child:
        command = [sys.executable, "-m", "benchmarks.row_layers", "--child"]
        command += ["--json", str(options.json)] if options.json else []
        try:
            sys.exit(subprocess.run(command, timeout=options.seconds, check=False).returncode)
        except subprocess.TimeoutExpired:
            sys.exit(f"killed after {options.seconds:.0f} s")
    torch.manual_seed(time.time_ns() % 2**31)
    results: dict[str, object] = {"machine": machine_facts()}
    problem = Problem(28)
    with collect_kernels() as kernels:
        problem.kernels(2)
        problem.one_kernel(2)
    began_s = time.monotonic()
    Compilation(list(kernels)).wait(lambda done, total: None)
    print(f"compiled {len(kernels)} kernels in {time.monotonic() - began_s:.1f} s", flush=True)
    for part in (_check, _time):
        results |= part(problem)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1))


def _check(problem: Problem) -> dict[str, object]:
    """Compare one and 28 layers with the specification, today's kernels beside them; and replays with each other."""
    rows = []
    for num_layers in (2, 3):
        for length in _CHECKED:
            problem.set_length(length)
            problem.hidden.normal_()
            wanted = problem.specification(num_layers)
            last = problem.layers[num_layers - 1]
            slot = divmod(int(problem.slots), _BLOCK)
            kept = [cache[slot].clone() for cache in (last.keys, last.values)]
            errors = {}
            runs: dict[str, _Run] = {
                "today": problem.kernels,
                "one": problem.one_kernel,
            }
            for name, run in runs.items():
                for layer in problem.layers[:num_layers]:
                    layer.keys[slot], layer.values[slot] = torch.nan, torch.nan
                found = run(num_layers)
                torch.cuda.synchronize()
                caches = [cache[slot] for cache in (last.keys, last.values)]
                errors[name] = [
                    round(float((a.float() - b.float()).abs().max() / b.float().std()), 4)
                    for a, b in zip((*found, *caches), (*wanted, *kept), strict=True)
                ]
            is_good = all(
                error <= 2 * today + 0.03 for error, today in zip(errors["one"], errors["today"], strict=True)
            )
            rows.append({"layers": num_layers, "length": length, "good": is_good, **errors})
            print(rows[-1], flush=True)
    problem.set_length(600)
    first = [x.clone() for x in problem.one_kernel(28)]
    graph, outputs = _capture(partial(problem.one_kernel, 28))
    same = 0
    for _ in range(300):
        graph.replay()
        same += all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True))
    print("equal replays:", same, "of 300", flush=True)
    return {"checks": rows, "equal_replays": same}


def _time(problem: Problem) -> dict[str, object]:
    """Time 28 layers in a graph, in turns."""
    runs: dict[str, _Run] = {
        "today": problem.kernels,
        "one": problem.one_kernel,
    }
    graphs = {name: _capture(partial(run, 28))[0] for name, run in runs.items()}
    table = []
    for length in _CONTEXTS:
        problem.set_length(length)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(7):
            for name, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()
                start.record()
                for _ in range(20):
                    graph.replay()
                end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end) * 1000 / 20 / 28)
        table.append({"length": length} | {name: round(statistics.median(t), 2) for name, t in times.items()})
        print("µs a layer:", table[-1], flush=True)
    return {"layers_us": table}


def _capture(
    run: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = run()
    torch.cuda.synchronize()
    return graph, outputs


def _norm(size: int) -> torch.Tensor:
    return torch.rand(size, **BF16_CUDA) + 0.5


def _matrix(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, **BF16_CUDA) * k**-0.5


if __name__ == "__main__":
    main()
