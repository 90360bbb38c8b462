"""Checks, then times, steps of one token a row of recurrent layers: kernels alone, and a layer's chain of them.

python -m benchmarks.recurrent_steps [--sweep] [--seconds N] [--smoke] [--json FILE]

Each configuration is compared with the torch specification in float32 on the inputs that it is timed on. A chain is
what a layer launches, each kernel early behind the one before, in a CUDA graph of so many layers that their states do
not stay in the cache. % of floor: the states, read and written, and each input and output once, at the bandwidth that
the vendor states, over the time. --smoke: small shapes on the CPU, through Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernel_timing import machine_facts, nominal_rates, num_copies, time_calls
from benchmarks.recurrent_kernels import Heads
from benchmarks.recurrent_kernels import Problem as DeltaProblem
from kernels.causal_conv import reference as conv_reference
from kernels.causal_conv import triton as conv
from kernels.delta_rule import chunks, triton_gates
from kernels.delta_rule import triton as delta
from kernels.linear.ops import DenseLinear
from kernels.mamba2 import chunked
from kernels.mamba2 import triton as mamba2
from kernels.precompile import Compilation, collect_kernels
from kernels.states import StateMetadata, StateView, load_states, place_states, view_states

_PIECE, _NUM_LANES, _WIDTH = 4096, 8, 4
_HIDDEN = 2048
_ROWS = (1, 8, 64, 256, 16, 4, 32, 2)  # the most important first
_TOLERANCE = 6e-3
_DELTAS = (
    Heads("qwen3.5-35b-a3b", 16, 32, 128, 128),  # 4B has the same
    Heads("kimi-linear-48b", 32, 32, 128, 128, by_dimension=True),
    Heads("qwen3.5-27b", 16, 48, 128, 128),
)
_SMALL_DELTAS = (Heads("small", 1, 2, 16, 16), Heads("small by dimension", 2, 2, 16, 16, by_dimension=True))
Call = Callable[[int], torch.Tensor]  # layer → output


@dataclass(frozen=True)
class Scan:
    """The state space of a layer of Mamba-2."""

    name: str
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int

    @property
    def channels(self) -> int:
        """The convolution's channels."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size


_SCANS = (Scan("nemotron-3-nano", 64, 64, 128, 8), Scan("falcon-h1-7b", 24, 128, 256, 1))
_SMALL_SCANS = (Scan("small scan", 4, 16, 16, 2),)


@dataclass
class Cell:
    """One configuration of one kernel or chain at one shape."""

    kernel: str
    shape: str
    rows: int
    config: str
    num_bytes: float
    us: float = 0.0
    floor_percent: float = 0.0
    error: float = 0.0
    trouble: str = ""


@dataclass
class Group:
    """Calls that compute the same, with their specification."""

    kernel: str
    num_bytes: float
    views: list[tuple[StateView, ...]]  # by layer
    metadata: StateMetadata
    expect: Callable[[], torch.Tensor]  # in float32, on the last layer
    calls: dict[str, Call] = field(default_factory=dict)


class ScanProblem:
    """Rows of one token of a layer of Mamba-2, in so many layers that their states do not stay in the cache."""

    def __init__(self, shape: Scan, rows: int, device: torch.device) -> None:
        width = shape.num_heads * shape.head_dim
        layer_bytes = 4 * rows * (width * shape.state_size + shape.channels * (_WIDTH - 1))
        layers = max(1, min(num_copies(layer_bytes), int(20e9 // layer_bytes))) if device.type == "cuda" else 1
        shapes = [[(shape.channels, _WIDTH - 1), (width, shape.state_size)]] * layers
        num_pages = -(-place_states(shapes, piece=_PIECE)[1] // _NUM_LANES)
        pool = torch.randn(_NUM_LANES, 1 + rows * num_pages, _PIECE, device=device)
        self.views = view_states(pool, shapes)
        self.metadata = StateMetadata(
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.full((rows,), 4097, dtype=torch.int32, device=device),
            req_index=torch.randperm(rows, device=device),
            pages=(1 + torch.randperm(rows * num_pages, device=device)).view(rows, num_pages).int(),
            writes=None,
            max_query_len=1,
            num_decodes=rows,
        )
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self.x = torch.randn(rows, shape.channels, dtype=dtype, device=device)
        self.weight = torch.randn(shape.channels, _WIDTH, dtype=dtype, device=device)
        groups = (shape.num_groups, shape.state_size)
        x, b, c = self.x.split([width, groups[0] * groups[1], groups[0] * groups[1]], dim=1)
        self.xbc = x.unflatten(1, (-1, shape.head_dim)), b.unflatten(1, groups), c.unflatten(1, groups)
        self.dt = torch.rand(rows, shape.num_heads, device=device) * 0.1
        self.a = -torch.rand(shape.num_heads, device=device) * 8
        self.d = torch.ones(shape.num_heads, device=device)


def main() -> None:
    """Compile each shape's kernels in parallel, then check, time and print its cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75.0, help="begin no shape after this time")
    parser.add_argument("--smoke", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--sweep", action="store_true", help="time candidate configurations, too")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    device = torch.device("cpu" if options.smoke else "cuda")
    started_s = time.monotonic()
    torch.manual_seed(0)
    cells: list[Cell] = []
    with torch.inference_mode():
        if not options.smoke:
            _compile(device, sweep=options.sweep)
            print(f"# compiled in {time.monotonic() - started_s:.0f} s", flush=True)
        for shape, rows in _problems(is_small=options.smoke):
            if time.monotonic() - started_s > options.seconds:
                print(f"# stopped after {options.seconds:.0f} s")
                break
            for group in _groups(shape, rows, device, sweep=options.sweep):
                cells += _measure(group, shape.name, rows, device)
            if options.json:
                report = {"machine": machine_facts(), "results": [asdict(cell) for cell in cells]}
                options.json.write_text(json.dumps(report, indent=1))
    _print_table(cells)


def _problems(*, is_small: bool) -> Iterator[tuple[Heads | Scan, int]]:
    for rows in (3,) if is_small else _ROWS:
        for shape in (*_SMALL_DELTAS, *_SMALL_SCANS) if is_small else (*_DELTAS, *_SCANS):
            yield shape, rows


def _groups(shape: Heads | Scan, rows: int, device: torch.device, *, sweep: bool) -> Iterator[Group]:
    pdl = device.type == "cuda"
    if isinstance(shape, Scan):
        yield from _scan_groups(ScanProblem(shape, rows, device), shape, rows, sweep=sweep, pdl=pdl)
    else:
        yield from _delta_groups(DeltaProblem(shape, rows=rows, tokens=1, device=device), sweep=sweep, pdl=pdl)


def _conv_group(problem: DeltaProblem | ScanProblem, *, pdl: bool) -> Group:
    x, weight, metadata, views = problem.x, problem.weight, problem.metadata, problem.views
    num_bytes = x.numel() * (2 * x.element_size() + 8 * (_WIDTH - 1)) + weight.numel() * weight.element_size()

    def convolve(layer: int) -> torch.Tensor:
        return conv.causal_conv(x, weight, None, views[layer][0], metadata, has_silu=True, pdl=pdl)

    def expect() -> torch.Tensor:
        return conv_reference.causal_conv(x.float(), weight.float(), None, views[-1][0], metadata, has_silu=True)

    return Group("conv", num_bytes, views, metadata, expect, {"served": convolve})


_DELTA_STEPS = [
    delta.StepConfig(block, warps)
    for block, warps in ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 4), (32, 8), (64, 8))
]
_SCAN_STEPS = [
    mamba2.StepConfig(tile, warps)
    for tile, warps in (
        (512, 1), (1024, 1), (1024, 2), (2048, 1), (2048, 2), (2048, 4), (4096, 2), (4096, 4), (4096, 8), (8192, 8),
    )
]  # fmt: skip


def _named(config: tuple[int, ...]) -> str:
    return "-".join(map(str, config))


def _delta_groups(problem: DeltaProblem, *, sweep: bool, pdl: bool) -> Iterator[Group]:
    heads, metadata, views = problem.heads, problem.metadata, problem.views
    a, b, a_log, dt_bias = problem.a, problem.b, problem.a_log, problem.dt_bias
    sizes = (heads.key_heads * heads.d_k, heads.key_heads * heads.d_k, heads.value_heads * heads.d_v)
    values = sizes[2]
    convolution = _conv_group(problem, pdl=pdl)
    yield convolution

    def split(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = mixed.split(sizes, dim=1)
        return q.unflatten(1, (-1, heads.d_k)), k.unflatten(1, (-1, heads.d_k)), v.unflatten(1, (-1, heads.d_v))

    def advance(layer: int, config: delta.StepConfig | None = None) -> torch.Tensor:
        gates = problem.g, problem.beta
        return delta.gated_delta_rule(
            *problem.qkv, *gates, views[layer][1], metadata, scale=0.1, pdl=pdl, step_config=config
        )

    def step(layer: int, config: delta.StepConfig | None = None) -> torch.Tensor:
        return delta.gated_delta_step(
            *problem.qkv, a, b, a_log, dt_bias, views[layer][1], metadata, scale=0.1, pdl=pdl, step_config=config
        )

    def expect() -> torch.Tensor:
        q, k, v = (part.float() for part in problem.qkv)
        return chunks.gated_delta_rule(q, k, v, problem.g, problem.beta, views[-1][1], metadata, scale=0.1)

    num_bytes = problem.rows * (8 * heads.state_size + 2 * heads.channels + 2 * values + 2 * a[0].numel())
    calls: dict[str, Call] = {"served": step}
    if sweep:
        calls |= {_named(config): partial(advance, config=config) for config in _DELTA_STEPS}
        calls |= {f"gates {_named(config)}": partial(step, config=config) for config in _DELTA_STEPS}
    yield Group("delta rule", num_bytes, views, metadata, expect, calls)

    def expect_chain() -> torch.Tensor:
        mixed = conv_reference.causal_conv(
            problem.x.float(), problem.weight.float(), None, views[-1][0], metadata, has_silu=True
        )
        q, k, v = split(mixed.to(problem.x.dtype).float())
        return chunks.gated_delta_rule(q, k, v, problem.g, problem.beta, views[-1][1], metadata, scale=0.1)

    def chain(layer: int, *, has_gates: bool) -> torch.Tensor:
        view, state = views[layer]
        mixed = conv.causal_conv(problem.x, problem.weight, None, view, metadata, has_silu=True, pdl=pdl)
        if has_gates:
            return delta.gated_delta_step(*split(mixed), a, b, a_log, dt_bias, state, metadata, scale=0.1, pdl=pdl)
        g, beta = triton_gates.delta_gates(a, b, a_log, dt_bias, pdl=pdl)
        return delta.gated_delta_rule(*split(mixed), g, beta, state, metadata, scale=0.1, pdl=pdl)

    chains: dict[str, Call] = {
        "served": partial(chain, has_gates=True), "with gates' kernel": partial(chain, has_gates=False)
    }  # fmt: skip
    all_bytes = num_bytes + convolution.num_bytes
    yield Group("chain", all_bytes, views, metadata, expect_chain, chains)
    yield _behind_products(problem, chains, all_bytes, metadata, expect_chain)


def _behind_products(
    problem: DeltaProblem,
    chains: dict[str, Call],
    num_bytes: float,
    metadata: StateMetadata,
    expect: Callable[[], torch.Tensor],
) -> Group:
    """The chains, each behind a product of the size of the layer's projection, whose outputs are not used."""
    linear, x = DenseLinear(), problem.x
    hidden = torch.randn(len(x), _HIDDEN if x.is_cuda else 32, dtype=x.dtype, device=x.device)
    # As many as the layers have outputs, queries' to output gates'; together more than the cache
    matrices = [torch.randn(x.shape[1] + 4096, hidden.shape[1], dtype=x.dtype, device=x.device) for _ in range(4)]

    def call(layer: int, chain: Call) -> torch.Tensor:
        linear(hidden, matrices[layer % len(matrices)], None)
        return chain(layer)

    num_bytes += matrices[0].numel() * x.element_size()
    calls: dict[str, Call] = {name: partial(call, chain=chain) for name, chain in chains.items()}
    return Group("behind product", num_bytes, problem.views, metadata, expect, calls)


def _scan_groups(problem: ScanProblem, shape: Scan, rows: int, *, sweep: bool, pdl: bool) -> Iterator[Group]:
    metadata, views = problem.metadata, problem.views
    yield _conv_group(problem, pdl=pdl)
    numbers = problem.dt, problem.a, problem.d

    def advance(layer: int, config: mamba2.StepConfig | None = None) -> torch.Tensor:
        return mamba2.mamba2(*problem.xbc, *numbers, views[layer][1], metadata, pdl=pdl, step_config=config)

    def expect() -> torch.Tensor:
        x, b, c = (part.float() for part in problem.xbc)
        return chunked.mamba2(x, b, c, *numbers, views[-1][1], metadata)

    width = shape.num_heads * shape.head_dim
    num_bytes = rows * (8 * width * shape.state_size + 2 * (shape.channels + width) + 4 * shape.num_heads)
    calls: dict[str, Call] = {"served": advance}
    if sweep:
        calls |= {_named(config): partial(advance, config=config) for config in _SCAN_STEPS}
    yield Group("mamba2", num_bytes, views, metadata, expect, calls)


def _compile(device: torch.device, *, sweep: bool) -> None:
    with collect_kernels() as kernels:
        for shape in (*_DELTAS, *_SCANS):
            for rows in _ROWS:
                for group in _groups(shape, rows, device, sweep=sweep):
                    for call in group.calls.values():
                        call(0)
    Compilation(list(kernels)).wait(lambda done, total: None)


def _measure(group: Group, shape: str, rows: int, device: torch.device) -> list[Cell]:
    """Measure each call: the error of outputs and states on the last layer, whose states are put back, and the time."""
    cells, pool, last = [], group.views[0][0].pool, len(group.views) - 1
    kept = pool.clone()
    expected = [group.expect(), *_states(group)]
    for config, call in group.calls.items():
        cell = Cell(group.kernel, shape, rows, config, group.num_bytes)
        cells.append(cell)
        try:
            pool.copy_(kept)
            found = [call(last), *_states(group)]
            cell.error = max(_error(*pair) for pair in zip(found, expected, strict=True))
            assert cell.error < _TOLERANCE, f"error {cell.error:.1e}"
            pool.copy_(kept)
            calls = [partial(call, layer) for layer in range(len(group.views))]
            cell.us, _ = time_calls(calls, is_capturable=True, device=device)
            cell.floor_percent = 100 * group.num_bytes / nominal_rates()[0] * 1e6 / cell.us
        except Exception as error:  # what the compiler, the check or the device says is the result
            cell.trouble = f"{type(error).__name__}: {str(error)[:150]}"
    return cells


def _states(group: Group) -> list[torch.Tensor]:
    return [load_states(view, group.metadata) for view in group.views[-1]]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _print_table(cells: list[Cell]) -> None:
    """Print a line for each kernel, shape and number of rows: the served configuration, and the fastest others."""
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.kernel, cell.shape, cell.rows), []).append(cell)
    for (kernel, shape, rows), members in sorted(groups.items()):
        others = sorted((cell for cell in members[1:] if not cell.trouble), key=lambda cell: cell.us)
        shown = [members[0], *others[:5]]
        figures = " | ".join(f"{cell.config} {cell.us:.2f} ({cell.floor_percent:.0f} %)" for cell in shown)
        print(f"{kernel:14s} {shape:16s} {rows:3d}: {figures}")
    for cell in cells:
        if cell.trouble:
            print(f"{cell.kernel} {cell.shape} {cell.rows} {cell.config}: {cell.trouble}")


if __name__ == "__main__":
    main()
