"""Checks, then times, the kernels of delta-rule layers: convolution, gates, delta rule, gated norm.

python -m benchmarks.recurrent_kernels [--only step,prompt] [--seconds N] [--sweep] [--smoke] [--json FILE]

A cell is one layer's launch as a model makes it, over rows of one token (step), rows with drafts (drafts) or prompts.
Each is compared with its torch specification in float32 on the inputs that it is timed on, printed at once, and written
to the JSON file at once. % of floor: the larger of bytes over bandwidth and operations over rate, over the time.
--smoke: small shapes on the CPU, through Triton's interpreter (TRITON_INTERPRET=1), to see that all of it runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.kernel_timing import machine_facts, nominal_rates, num_copies, time_calls
from kernels.causal_conv import reference as conv_reference
from kernels.causal_conv import triton as conv
from kernels.delta_rule import chunks, gates, triton_gates
from kernels.delta_rule import triton as delta_rule
from kernels.delta_rule.triton import StepConfig
from kernels.delta_rule.triton_chunks import ChunkConfig
from kernels.precompile import Compilation, collect_kernels
from kernels.states import StateMetadata, place_states, view_states

_PIECE, _NUM_LANES = 4096, 8  # numbers of a lane's row: 16 KiB
_CHUNK, _WIDTH = 64, 4
_POOL_BYTES = 20e9
_STEPS = [StepConfig(block, warps) for block in (8, 16, 32, 64) for warps in (1, 2, 4, 8) if block >= 4 * warps]
_CHUNKS = [
    ChunkConfig(prepare, block, warps, stages)
    for prepare, block, warps, stages in (
        (4, 32, 4, 2), (2, 32, 4, 2), (8, 32, 4, 2), (4, 16, 4, 3), (4, 32, 4, 3), (4, 32, 4, 4), (4, 64, 4, 2),
        (4, 64, 4, 3), (4, 64, 8, 3), (4, 128, 8, 2), (4, 128, 8, 3),
    )
]  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """The shape of a layer."""

    name: str
    key_heads: int
    value_heads: int
    d_k: int
    d_v: int
    by_dimension: bool = False

    @property
    def channels(self) -> int:
        """The convolution's channels."""
        return 2 * self.key_heads * self.d_k + self.value_heads * self.d_v

    @property
    def state_size(self) -> int:
        """Numbers of a recurrent state."""
        return self.value_heads * self.d_v * self.d_k


SHAPES = [
    Heads("qwen3.5-35b-a3b", 16, 32, 128, 128),
    Heads("qwen3.5-27b", 16, 48, 128, 128),
    Heads("64 x 64", 16, 32, 64, 64),
    Heads("kimi-linear-48b", 32, 32, 128, 128, by_dimension=True),
]
_SMALL = [Heads("small", 1, 2, 16, 16), Heads("small by dimension", 2, 2, 16, 16, by_dimension=True)]


@dataclass
class Cell:
    """One measurement."""

    kernel: str
    shape: str
    rows: int
    tokens: int  # of each row
    config: str = "served"
    us: float = 0.0
    timing: str = ""
    error: float = 0.0
    gbytes: float = 0.0
    gflops: float = 0.0
    floor_percent: float = 0.0
    trouble: str = ""


class Problem:
    """Rows of equal length, each with a state, in so many layers that their states do not stay in the cache."""

    def __init__(self, heads: Heads, *, rows: int, tokens: int, device: torch.device) -> None:
        self.heads, self.rows, self.tokens = heads, rows, tokens
        layer_bytes = 4 * rows * (heads.state_size + heads.channels * (_WIDTH - 1))
        layers = max(1, min(num_copies(layer_bytes), int(_POOL_BYTES // layer_bytes))) if device.type == "cuda" else 1
        shapes = [[(heads.channels, _WIDTH - 1), (heads.value_heads * heads.d_v, heads.d_k)]] * layers
        num_pages = -(-place_states(shapes, piece=_PIECE)[1] // _NUM_LANES)
        pool = torch.randn(_NUM_LANES, 1 + rows * num_pages, _PIECE, device=device)
        self.views = view_states(pool, shapes)
        pages = 1 + torch.randperm(rows * num_pages, device=device)
        self.metadata = StateMetadata(
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens,
            seq_lens=torch.full((rows,), 4096 + tokens, dtype=torch.int32, device=device),
            req_index=torch.randperm(rows, device=device),
            pages=pages.view(rows, num_pages).int(),
            writes=None,
            max_query_len=tokens,
            num_decodes=rows if tokens == 1 else 0,
        )
        # Triton's interpreter has no products of bf16
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self.x = torch.randn(rows * tokens, heads.channels, dtype=dtype, device=device)
        sizes = (heads.key_heads * heads.d_k, heads.key_heads * heads.d_k, heads.value_heads * heads.d_v)
        q, k, v = self.x.split(sizes, dim=1)
        self.qkv = q.unflatten(1, (-1, heads.d_k)), k.unflatten(1, (-1, heads.d_k)), v.unflatten(1, (-1, heads.d_v))
        per_head = (heads.value_heads, *[heads.d_k] * heads.by_dimension)
        self.a = torch.randn(rows * tokens, *per_head, dtype=dtype, device=device)
        self.b = torch.randn(rows * tokens, heads.value_heads, dtype=dtype, device=device)
        self.a_log = torch.randn(heads.value_heads, device=device)
        self.dt_bias = torch.randn(per_head, device=device).flatten()
        self.g, self.beta = gates.delta_gates(self.a, self.b, self.a_log, self.dt_bias)
        self.weight = torch.randn(heads.channels, _WIDTH, dtype=dtype, device=device)
        self.norm = torch.randn(heads.d_v, dtype=dtype, device=device)


Launch = Callable[[int], tuple[torch.Tensor, ...]]  # layer → outputs
Row = tuple[Cell, Problem, Launch, Launch]  # the kernel, and its specification in float32


def main() -> None:
    """Compile each problem's kernels in parallel, then check, time and print its cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="step,drafts,prompt", help="comma-separated: step, drafts, prompt")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no problem after this time")
    parser.add_argument("--sweep", action="store_true", help="time candidate configurations, too")
    parser.add_argument("--smoke", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    device = torch.device("cpu" if options.smoke else "cuda")
    started_s = time.monotonic()
    torch.manual_seed(0)
    results: list[Cell] = []
    for problem in _problems(options.only.split(","), device, is_small=options.smoke):
        with torch.inference_mode():
            rows = list(_rows(problem, sweep=options.sweep))
            _compile(rows, device)
            for row in rows:
                results.append(_measure(*row))
                print(_line(results[-1]), flush=True)
        if options.json:
            report = {"machine": machine_facts(), "results": [asdict(result) for result in results]}
            options.json.write_text(json.dumps(report, indent=1))
        if time.monotonic() - started_s > options.seconds:
            print(f"# stopped after {options.seconds:.0f} s")
            return


def _problems(parts: list[str], device: torch.device, *, is_small: bool) -> Iterator[Problem]:
    sizes = {
        "step": [(1, 1), (8, 1), (64, 1), (256, 1)],
        "drafts": [(8, 4), (64, 4)],
        "prompt": [
            (1, 512), (1, 700), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (8, 1024), (30, 300), (128, 64),
        ],
    }  # fmt: skip
    if is_small:
        sizes = {"step": [(3, 1)], "drafts": [(2, 3)], "prompt": [(2, 70)]}
    for part in parts:
        for heads in _SMALL if is_small else SHAPES:
            for rows, tokens in sizes[part]:
                yield Problem(heads, rows=rows, tokens=tokens, device=device)


def _rows(problem: Problem, *, sweep: bool) -> Iterator[Row]:
    """The kernels of one layer, in their order; the delta rule with candidates, too."""
    cell = functools.partial(Cell, shape=problem.heads.name, rows=problem.rows, tokens=problem.tokens)
    pdl = problem.x.is_cuda
    x, metadata, out = problem.x, problem.metadata, problem.qkv[2]
    a, b, a_log, dt_bias = problem.a, problem.b, problem.a_log, problem.dt_bias

    def convolve(layer: int) -> tuple[torch.Tensor, ...]:
        return (conv.causal_conv(x, problem.weight, None, problem.views[layer][0], metadata, has_silu=True, pdl=pdl),)

    def expect_convolved(layer: int) -> tuple[torch.Tensor, ...]:
        numbers, view = (x.float(), problem.weight.float(), None), problem.views[layer][0]
        return (conv_reference.causal_conv(*numbers, view, metadata, has_silu=True),)

    yield cell("conv"), problem, convolve, expect_convolved
    yield (
        cell("gates"), problem,
        lambda layer: triton_gates.delta_gates(a, b, a_log, dt_bias, pdl=pdl),
        lambda layer: gates.delta_gates(a, b, a_log, dt_bias),
    )  # fmt: skip

    def advance(
        layer: int, step_config: StepConfig | None = None, chunk_config: ChunkConfig | None = None
    ) -> tuple[torch.Tensor, ...]:
        read = delta_rule.gated_delta_rule(
            *problem.qkv, problem.g, problem.beta, problem.views[layer][1], metadata, scale=0.1, pdl=pdl,
            step_config=step_config, chunk_config=chunk_config,
        )  # fmt: skip
        return (read,)

    def expect(layer: int) -> tuple[torch.Tensor, ...]:
        q, k, v = (part.float() for part in problem.qkv)
        view = problem.views[layer][1]
        return (chunks.gated_delta_rule(q, k, v, problem.g, problem.beta, view, metadata, scale=0.1),)

    yield cell("delta rule"), problem, advance, expect
    candidates: list[tuple[tuple[int, ...], Launch]] = []
    if sweep and problem.tokens <= delta_rule.SHORT:
        candidates = [(config, functools.partial(advance, step_config=config)) for config in _STEPS]
    elif sweep:
        candidates = [(config, functools.partial(advance, chunk_config=config)) for config in _CHUNKS]
    for config, launch in candidates:
        yield cell("delta rule", config="-".join(map(str, config))), problem, launch, expect
    yield (
        cell("gated norm"), problem,
        lambda layer: (triton_gates.gated_rms_norm(out, out, problem.norm, 1e-6, pdl=pdl),),
        lambda layer: (gates.gated_rms_norm(out.float(), out.float(), problem.norm.float(), 1e-6),),
    )  # fmt: skip


def _compile(rows: list[Row], device: torch.device) -> None:
    if device.type != "cuda":
        return
    with collect_kernels() as kernels:
        for cell, _, launch, _ in rows:
            try:
                launch(0)
            except Exception as error:  # a candidate that this shape does not allow
                cell.trouble = str(error)[:200]
    if kernels:
        Compilation(list(kernels)).wait(lambda done, total: None)


def _measure(cell: Cell, problem: Problem, launch: Launch, expect: Launch) -> Cell:
    """Fill in the cell: the error on the last layer, whose states are put back for the specification, then the time."""
    if cell.trouble:
        return cell
    try:
        pool = problem.views[-1][0].pool
        kept = pool.clone()
        outputs = launch(len(problem.views) - 1)
        pool.copy_(kept)
        del kept
        cell.error = max(_error(*pair) for pair in zip(outputs, expect(len(problem.views) - 1), strict=True))
        calls = [functools.partial(launch, layer) for layer in range(len(problem.views))]
        cell.us, cell.timing = time_calls(calls, is_capturable=True, device=problem.x.device)
    except Exception as error:  # whatever the compiler or the device says is the result
        cell.trouble = f"{type(error).__name__}: {str(error)[:200]}"
        return cell
    num_bytes, num_flops = _work(cell.kernel, problem)
    cell.gbytes, cell.gflops = num_bytes / 1e9, num_flops / 1e9
    bytes_s, flops_s = nominal_rates()
    cell.floor_percent = 100 * max(num_bytes / bytes_s, num_flops / flops_s) * 1e6 / cell.us
    return cell


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def _work(kernel: str, problem: Problem) -> tuple[float, float]:
    """Bytes that must move and operations that must be done, of one launch."""
    heads, num_tokens = problem.heads, problem.rows * problem.tokens
    values, gates_of_token = heads.value_heads * heads.d_v, problem.a[0].numel()
    if kernel == "conv":
        return 2 * num_tokens * heads.channels * 2 + 2 * problem.rows * heads.channels * (_WIDTH - 1) * 4, 0
    if kernel == "gates":
        return num_tokens * (6 * gates_of_token + 6 * heads.value_heads), 0
    if kernel == "gated norm":
        return 3 * num_tokens * values * 2, 0
    num_bytes = 8 * problem.rows * heads.state_size
    num_bytes += num_tokens * (2 * heads.channels + 2 * values + 4 * gates_of_token + 4 * heads.value_heads)
    if problem.tokens <= delta_rule.SHORT:
        return num_bytes, 0
    # Of a token and head: two rows of squares over keys, three products with a state, two with squares over values
    per_token = 2 * _CHUNK * heads.d_k + 3 * heads.d_k * heads.d_v + 2 * _CHUNK * heads.d_v
    return num_bytes, 2 * num_tokens * heads.value_heads * per_token


def _line(cell: Cell) -> str:
    name = f"{cell.kernel:10s} {cell.shape:18s} {cell.rows:4d} x {cell.tokens:5d} {cell.config:14s}"
    if cell.trouble:
        return f"{name} {cell.trouble}"
    return (
        f"{name} {cell.us:9.1f} us ({cell.timing}) {cell.gbytes / cell.us * 1e6:7.0f} GB/s"
        f" {cell.gflops / cell.us * 1e3:6.1f} TFLOP/s {cell.floor_percent:5.1f} % of floor, error {cell.error:.1e}"
    )


if __name__ == "__main__":
    main()
