"""Checks, then times, Mamba-2's state space at published shapes: decode rows and prompts.

python -m benchmarks.mamba2_kernels [--device cpu] [--smoke] [--only decode,drafts,prompt,sweep] [--json FILE]

Each case is checked against the chunked form in torch on the inputs it is timed on. % of floor: the larger of bytes
over bandwidth and operations over rate, both as the vendor states them, over the time. Bytes: states, read and
written, and each input and output once. Operations: of chunks of 64 tokens, of which the masked half is not counted.
The part `sweep` times prompts with candidate tiles and segments, on a GPU. --smoke: tiny shapes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.kernel_timing import machine_facts, nominal_rates, num_copies, time_calls
from kernels import ops
from kernels.mamba2 import chunked
from kernels.states import StateMetadata, StateView

_TOLERANCE = 1e-2
_CHUNK = 64
_NUM_LANES, _PIECE_ROWS = 8, 32
Choice = tuple[tuple[int, int, int, int], int]  # of TILES and SEGMENTS
_Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The state space of one layer."""

    name: str
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int

    @property
    def width(self) -> int:
        """Return the channels of x."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the channels of x, b and c together."""
        return self.width + 2 * self.num_groups * self.state_size


SHAPES = (
    Shape("nemotron-3-nano", 64, 64, 128, 8),
    Shape("granite-4-h-small", 128, 64, 128, 1),
    Shape("falcon-h1-7b", 24, 128, 256, 1),
)
SMOKE = (Shape("smoke", 4, 16, 16, 2),)
ROWS = (1, 8, 64, 256)
DRAFTS = ((8, 4), (64, 4))  # rows, tokens of each
PROMPTS = (512, 2048, 8192, 16384)
SWEPT_PROMPTS = (2048, 16384)
# chunk, block_p, num_warps, num_stages; those that do not fit an SM are said and skipped
TILES = (
    (64, 64, 4, 2),
    (64, 64, 4, 1),
    (64, 64, 4, 3),
    (64, 64, 8, 2),
    (64, 32, 4, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 1),
)
SEGMENTS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    part: str  # decode | drafts | prompt | sweep
    shape: str
    rows: int
    tokens: int  # of each row
    us: float
    clock: str
    gb_s: float
    tflop_s: float
    floor_percent: float
    error: float
    config: str


@dataclass(frozen=True)
class Problem:
    """The inputs of one launch."""

    tokens: _Tokens  # x, b, c, dt, a, d
    view: StateView
    metadata: StateMetadata

    def run(self, choice: Choice | None) -> torch.Tensor:
        """Compute y as a model does, or by the Triton kernels with a choice of tiles and segment."""
        if choice is None:
            return ops.mamba2(*self.tokens, self.view, self.metadata)
        from kernels.mamba2.triton import ScanConfig, mamba2

        tiles, segment = choice
        config = ScanConfig(*tiles)
        return mamba2(
            *self.tokens, self.view, self.metadata, segment=segment, config=config, pdl=self.view.pool.is_cuda
        )


def make_problem(shape: Shape, rows: int, tokens: int, device: torch.device) -> Problem:
    """Make rows of so many tokens, each with a state before it on scattered pages."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    total, groups = rows * tokens, (shape.num_groups, shape.state_size)
    channels = torch.randn(total, shape.channels, device=device, dtype=dtype)
    x, b, c = channels.split([shape.width, groups[0] * groups[1], groups[0] * groups[1]], dim=1)
    dt = torch.rand(total, shape.num_heads, device=device) * 0.1
    a, d = -torch.rand(shape.num_heads, device=device) * 8, torch.ones(shape.num_heads, device=device)
    pages_each = -(-shape.width // (_PIECE_ROWS * _NUM_LANES))
    pool = torch.randn(_NUM_LANES, 1 + rows * pages_each, _PIECE_ROWS * shape.state_size, device=device)
    pages = 1 + torch.randperm(rows * pages_each, device=device).view(rows, pages_each).int()
    metadata = StateMetadata(
        query_start_loc=torch.arange(rows + 1, device=device, dtype=torch.int32) * tokens,
        seq_lens=torch.full((rows,), 1000 + tokens, device=device, dtype=torch.int32),
        req_index=torch.randperm(rows, device=device),
        pages=pages,
        writes=None,
        max_query_len=tokens,
        num_decodes=rows if tokens == 1 else 0,
    )
    x, b, c = x.unflatten(1, (-1, shape.head_dim)), b.unflatten(1, groups), c.unflatten(1, groups)
    return Problem((x, b, c, dt, a, d), StateView(pool, 0, shape.width, shape.state_size), metadata)


def work(shape: Shape, rows: int, tokens: int, itemsize: int) -> tuple[float, float]:
    """Return the least bytes and operations of a launch."""
    per_token = (shape.channels + shape.width) * itemsize + shape.num_heads * 4
    num_bytes = rows * (tokens * per_token + 2 * shape.width * shape.state_size * 4)
    seen = (min(tokens, _CHUNK) + 1) / 2  # tokens of its chunk that a token sees
    each = 4 * shape.width * shape.state_size + 2 * seen * (shape.width + shape.num_groups * shape.state_size)
    return num_bytes, rows * tokens * each


def measure(part: str, shape: Shape, rows: int, tokens: int, choice: Choice | None, device: torch.device) -> Cell:
    """Check one case against the chunked form, then time it over rotated inputs."""
    problem = make_problem(shape, rows, tokens, device)
    itemsize = problem.tokens[0].element_size()
    num_bytes, num_flops = work(shape, rows, tokens, itemsize)
    before = problem.view.pool.clone()
    expected = chunked.mamba2(*problem.tokens, problem.view, problem.metadata).double()
    problem.view.pool.copy_(before)
    del before
    error = float((problem.run(choice).double() - expected).norm() / expected.norm())
    assert error < _TOLERANCE, (part, shape, rows, tokens, error)
    copies = num_copies(int(num_bytes)) if device.type == "cuda" else 1
    problems = [problem, *(make_problem(shape, rows, tokens, device) for _ in range(copies - 1))]
    us, clock = time_calls(
        [functools.partial(each.run, choice) for each in problems], is_capturable=True, device=device
    )
    bytes_s, flops_s = nominal_rates()
    floor_us = max(num_bytes / bytes_s, num_flops / flops_s) * 1e6
    rates = (num_bytes / us / 1e3, num_flops / us / 1e6, 100 * floor_us / us)
    return Cell(part, shape.name, rows, tokens, us, clock, *rates, error, "served" if choice is None else str(choice))


def cases(parts: list[str], *, is_smoke: bool) -> Iterator[tuple[str, Shape, int, int, Choice | None]]:
    """Yield (part, shape, rows, tokens of each, tiles and segment)."""
    for shape in SMOKE if is_smoke else SHAPES:
        if "decode" in parts:
            yield from (("decode", shape, rows, 1, None) for rows in (ROWS[:2] if is_smoke else ROWS))
        if "drafts" in parts:
            yield from (("drafts", shape, rows, tokens, None) for rows, tokens in DRAFTS[: 1 if is_smoke else None])
        if "prompt" in parts:
            yield from (("prompt", shape, 1, tokens, None) for tokens in ((130,) if is_smoke else PROMPTS))
        if "sweep" in parts:
            choices = (
                itertools.product((130,), TILES[:2], SEGMENTS[:1])
                if is_smoke
                else itertools.product(SWEPT_PROMPTS, TILES, SEGMENTS)
            )
            yield from (("sweep", shape, 1, tokens, (tiles, segment)) for tokens, tiles, segment in choices)


def compile_kernels(parts: list[str], device: torch.device) -> None:
    """Compile what the cases launch, in parallel. A prompt's kernel does not depend on its length."""
    from kernels.precompile import Compilation, collect_kernels

    with collect_kernels() as kernels, torch.inference_mode():
        for shape in SHAPES:
            for rows, tokens in ((8, 1), (8, 4), (1, 2100)):
                make_problem(shape, rows, tokens, device).run(None)
            for tiles in TILES if "sweep" in parts else ():
                make_problem(shape, 1, 200, device).run((tiles, 64))
    Compilation(list(kernels)).wait(lambda done, total: None)


def triton_error() -> type[Exception]:
    """Return what Triton raises for tiles that do not fit; without Triton nothing raises it."""
    try:
        from triton.runtime.errors import OutOfResources
    except ImportError:
        return NotImplementedError
    return OutOfResources


def main() -> None:
    """Measure the chosen parts; print and save each as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", type=torch.device, help="cuda or cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--only", default="decode,drafts,prompt", help="comma-separated parts")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if "sweep" in options.only.split(",") and options.device.type != "cuda":
        parser.error(f"--only sweep needs Triton's kernels, so --device cuda, not {options.device}")
    torch.manual_seed(0)
    results: list[Cell] = []
    if options.device.type == "cuda":
        compile_kernels(options.only.split(","), options.device)
    with torch.inference_mode():
        for case in cases(options.only.split(","), is_smoke=options.smoke):
            try:
                results.append(cell := measure(*case, options.device))
            except triton_error() as error:
                print(*case, f"{type(error).__name__}: {str(error)[:120]}", flush=True)
                continue
            rates = f"{cell.gb_s:8.1f} GB/s {cell.tflop_s:8.2f} TFLOP/s {cell.floor_percent:5.1f} % of floor"
            print(
                f"{cell.part:7s} {cell.shape:18s} {cell.rows:4d} x {cell.tokens:5d} {cell.us:10.1f} us {rates}",
                flush=True,
            )
            if options.json:
                report = {"machine": machine_facts(), "results": [asdict(result) for result in results]}
                options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
