"""Checks, then times, latent attention at published shapes: decode rows, drafts, and prompts in both forms.

python -m benchmarks.latent_attention [--sweep] [--device cpu] [--smoke] [--only decode,drafts,prompt] [--json FILE]

decode and drafts time the kernels over latents as the backend launches them; prompt times all of latent attention
behind its projections, expanded and absorbed. Each case is checked against float64 on the inputs it is timed on.
% of floor: the larger of bytes over bandwidth and operations over rate of an H200 (nominal), over the time; of a
prompt, the operations of the form that has fewer. --sweep: also candidate tiles, warps and stages of each kernel, and
heads padded to 256 for the Hopper kernel. --smoke: tiny shapes, for the CPU too, whose backend is torch's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from benchmarks.kernel_timing import TensorOptions, machine_facts, num_copies, time_calls
from benchmarks.latent_problem import (
    SHAPES,
    SMOKE,
    LatentProblem,
    Shape,
    make_problem,
    work_of_latents,
    work_of_whole,
)
from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.attention.latent import latent_attention
from kernels.attention.torch_ref import TorchAttention

if TYPE_CHECKING:  # it needs Triton
    from kernels.attention.triton_latent_splits import LatentConfig

_BYTES_S, _FLOPS_S = 4.8e12, 989e12  # an H200's, nominal
_TOLERANCE = 2e-2
_PAGE = 64  # tokens of a block of expanded keys
DECODES = [(rows, 1, keys) for keys in (1024, 8192, 32768) for rows in (1, 8, 64)]
DRAFTS = [(8, 2, 8192), (8, 4, 8192), (1, 8, 32768)]  # rows, tokens of each, keys
PROMPTS = [(4, 4096, 4096), (1, 2048, 32768), (1, 128, 8192)]
SWEPT_SHORT = [(1, 1, 8192), (8, 1, 8192), (64, 1, 8192), (8, 2, 8192)]
SWEPT_LONG, SWEPT_PROMPT = (1, 1024, 8192), (4, 4096, 4096)
# Query tokens x heads, latents, warps, stages, programs that share an SM; those that do not fit one are said
SHORT_TILES = [
    (16, 32, 4, 5, 2), (16, 32, 4, 5, 1), (16, 32, 4, 4, 3), (16, 32, 8, 5, 2), (16, 64, 4, 4, 2), (16, 64, 8, 5, 1),
    (32, 32, 4, 4, 2), (32, 32, 8, 5, 1), (32, 64, 8, 4, 1), (32, 64, 8, 5, 1),
    (64, 32, 8, 2, 1), (64, 32, 8, 4, 1), (64, 32, 8, 5, 1), (64, 64, 8, 2, 1), (64, 64, 8, 4, 1), (64, 16, 8, 5, 1),
]  # fmt: skip
LONG_TILES = [(64, 64, 8, 2), (64, 64, 8, 4), (64, 32, 8, 2), (64, 32, 8, 5), (32, 64, 8, 4), (32, 32, 4, 4)]
# Query rows, keys, warps, stages of the prefill kernel on expanded heads
EXPANDED_TILES = [
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
    (64, 128, 4, 2), (64, 32, 4, 3),
]  # fmt: skip
_Run = Callable[[int], torch.Tensor]  # of one layer


@dataclass(frozen=True)
class Cell:
    """One case, and its measurement."""

    part: str  # decode | drafts | prompt | sweep
    shape: str
    rows: int
    tokens: int  # of each row
    keys: int
    config: str
    us: float = 0.0
    clock: str = ""
    tb_s: float = 0.0
    tflop_s: float = 0.0
    floor_percent: float = 0.0
    error: float = 0.0
    trouble: str = ""


@dataclass(frozen=True)
class Candidate:
    """A way to compute a problem: what is called for a layer, and how its output is checked."""

    config: str
    run: _Run
    error: Callable[[torch.Tensor], float]


def has_triton(device: torch.device) -> bool:
    """Return True if the kernels run: on a GPU, or interpreted."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _backend(device: torch.device) -> AttentionBackend:
    if not has_triton(device):
        return TorchAttention()
    from kernels.attention.triton_backend import TritonAttention

    return TritonAttention()


def over_latents(problem: LatentProblem, device: torch.device) -> Iterator[Candidate]:
    """Yield the attention over latents as the backend launches it."""
    backend, metadata = _backend(device), problem.fresh_metadata(has_lens=False)
    queries, rank = problem.absorbed_queries(), problem.shape.sizes.rank

    def run(layer: int) -> torch.Tensor:
        cache = problem.caches[layer]
        return backend.forward(queries, cache, cache[..., :rank], metadata, scale=problem.shape.scale)

    yield Candidate("served", run, functools.partial(problem.error_of_latents, queries))


def both_forms(problem: LatentProblem, device: torch.device) -> Iterator[Candidate]:
    """Yield latent attention with expanded keys and values, then absorbed."""
    for config in ("expanded", "absorbed"):
        backend = _backend(device)
        metadata = problem.fresh_metadata(has_lens=config == "expanded")

        def run(
            layer: int, backend: AttentionBackend = backend, metadata: AttentionMetadata = metadata
        ) -> torch.Tensor:
            return latent_attention(
                backend, problem.q_nope, problem.q_rope, problem.caches[layer], problem.heads, metadata,
                scale=problem.shape.scale,
            )  # fmt: skip

        yield Candidate(config, run, problem.error)


def short_candidates(problem: LatentProblem, device: torch.device) -> Iterator[Candidate]:
    """Yield tiles of the kernel of short rows, pieces cut for as many programs as they allow."""
    from kernels.attention.triton_latent_splits import LatentConfig

    num_heads = problem.shape.sizes.num_heads
    for tiles in SHORT_TILES:
        if tiles[0] <= 16 or tiles[0] <= 4 * num_heads:
            yield _tiled(problem, LatentConfig(*tiles), device)


def long_candidates(problem: LatentProblem, device: torch.device) -> Iterator[Candidate]:
    """Yield tiles of the kernel of long rows."""
    from kernels.attention.triton_latent_splits import LatentConfig

    for tiles in LONG_TILES:
        yield _tiled(problem, LatentConfig(*tiles), device)


def _tiled(problem: LatentProblem, config: LatentConfig, device: torch.device) -> Candidate:
    from kernels.attention.triton_latent import latent_attention as attend
    from kernels.attention.triton_latent_splits import LatentScratch, short_tokens

    metadata, sizes = problem.fresh_metadata(has_lens=False), problem.shape.sizes
    queries = problem.absorbed_queries()
    scratch = LatentScratch.allocate(
        num_heads=sizes.num_heads, rank=sizes.rank, dtype=queries.dtype, device=device, config=config
    )
    pieces = scratch.cut(metadata)
    is_short = problem.tokens <= short_tokens(sizes.num_heads)

    def run(layer: int) -> torch.Tensor:
        out = torch.empty(*queries.shape[:2], sizes.rank, dtype=queries.dtype, device=device)
        attend(
            queries, problem.caches[layer], metadata, out, scratch, pieces, scale=problem.shape.scale,
            short=config if is_short else None, long=None if is_short else config, pdl=device.type == "cuda",
        )  # fmt: skip
        return out

    name = f"{'short' if is_short else 'long'} " + "-".join(str(value) for value in asdict(config).values())
    return Candidate(name, run, functools.partial(problem.error_of_latents, queries))


def expanded_candidates(problem: LatentProblem, device: torch.device) -> Iterator[Candidate]:
    """Yield tiles of attention on expanded keys and values, without the expansion; then the Hopper kernel, padded."""
    from kernels.attention.triton_prefill import PrefillConfig, prefill_attention

    sizes, metadata = problem.shape.sizes, problem.metadata
    queries = torch.cat((problem.q_nope, problem.q_rope), dim=-1)
    page = _PAGE if problem.keys % _PAGE == 0 else problem.caches[0].shape[1]
    num_blocks = problem.keys // problem.caches[0].shape[1]
    blocks = metadata.block_table[:, :num_blocks].flatten()
    pools = [
        _expand(problem, cache.index_select(0, blocks).view(-1, page, 1, cache.shape[3])) for cache in problem.caches
    ]
    table = torch.arange(pools[0][0].shape[0], dtype=torch.int32, device=device).view(problem.rows, -1)
    rows = (functional.pad(table, (0, -table.shape[1] % 16)), metadata.query_start_loc, metadata.seq_lens)

    def check(out: torch.Tensor) -> float:
        return problem.error(out[..., : sizes.v_head_dim])

    for tiles in EXPANDED_TILES:
        config = PrefillConfig(*tiles)

        def run(layer: int, config: PrefillConfig = config) -> torch.Tensor:
            out = torch.empty(*queries.shape[:2], sizes.v_head_dim, dtype=queries.dtype, device=device)
            prefill_attention(
                queries, *pools[layer], *rows, out, scale=problem.shape.scale, max_query_len=problem.tokens,
                config=config, pdl=device.type == "cuda",
            )  # fmt: skip
            return out

        yield Candidate("expanded " + "-".join(map(str, tiles)), run, check)
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return
    from kernels.attention.gluon_prefill import hopper_prefill_attention, new_tickets

    padded_q = _pad(queries)
    padded = [(_pad(keys), _pad(values)) for keys, values in pools]
    tickets = new_tickets(device)

    def run_padded(layer: int) -> torch.Tensor:
        out = torch.empty_like(padded_q)
        hopper_prefill_attention(
            padded_q, *padded[layer], *rows, out, tickets, scale=problem.shape.scale, max_seq_len=problem.keys, pdl=True
        )
        return out

    yield Candidate("expanded gluon 256", run_padded, check)


def _pad(heads: torch.Tensor) -> torch.Tensor:
    """Return heads of 256 numbers, with zeros behind their own."""
    return functional.pad(heads, (0, 256 - heads.shape[-1]))


def _expand(problem: LatentProblem, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all heads, [num_blocks, block_size, H, nope_dim + rope_dim] and [..., v_head_dim]."""
    rank = problem.shape.sizes.rank
    compressed, k_rope = cache[:, :, 0, :rank], cache[..., rank:]
    keys = functional.linear(compressed, problem.heads.to_keys.flatten(0, 1))
    keys = keys.unflatten(-1, (-1, problem.shape.sizes.nope_dim))
    values = functional.linear(compressed, problem.heads.to_values.transpose(1, 2).flatten(0, 1))
    keys = torch.cat((keys, k_rope.expand(*keys.shape[:3], -1)), dim=-1)
    return keys, values.unflatten(-1, (-1, problem.shape.sizes.v_head_dim))


_Candidates = Callable[[LatentProblem, torch.device], Iterator[Candidate]]


def cases(
    parts: list[str], *, is_smoke: bool, is_sweep: bool
) -> Iterator[tuple[str, Shape, tuple[int, int, int], _Candidates]]:
    """Yield (part, shape, (rows, tokens of each, keys), candidates)."""
    for shape in SMOKE if is_smoke else SHAPES:
        if "decode" in parts:
            yield from (("decode", shape, size, over_latents) for size in ([(2, 1, 70)] if is_smoke else DECODES))
        if "drafts" in parts:
            yield from (("drafts", shape, size, over_latents) for size in ([(2, 3, 70)] if is_smoke else DRAFTS))
        if "prompt" in parts:
            yield from (("prompt", shape, size, both_forms) for size in ([(2, 48, 64)] if is_smoke else PROMPTS))
        if is_sweep:
            sizes = [(2, 1, 130), (2, 2, 130)] if is_smoke else SWEPT_SHORT
            yield from (("sweep", shape, size, short_candidates) for size in sizes)
            yield "sweep", shape, ((1, 40, 64) if is_smoke else SWEPT_LONG), long_candidates
            yield "sweep", shape, ((2, 48, 48) if is_smoke else SWEPT_PROMPT), expanded_candidates


def measure(cell: Cell, candidate: Candidate, problem: LatentProblem, device: torch.device) -> Cell:
    """Check one candidate against float64, then time it over rotated inputs."""
    try:
        error = candidate.error(candidate.run(-1))
        if not error <= _TOLERANCE:
            return replace(cell, error=error, trouble=f"wrong: {error:.1e}")
        calls = [functools.partial(candidate.run, layer) for layer in range(len(problem.caches))]
        us, clock = time_calls(calls, is_capturable=True, device=device)
    except Exception as trouble:  # a candidate that does not fit the device is a result
        return replace(cell, trouble=f"{type(trouble).__name__}: {str(trouble)[:90]}")
    work = work_of_whole if cell.part == "prompt" or cell.config.startswith("expanded") else work_of_latents
    num_bytes, num_flops = work(problem.shape, cell.rows, cell.tokens, cell.keys, problem.q_nope.element_size())
    floor_us = max(num_bytes / _BYTES_S, num_flops / _FLOPS_S) * 1e6
    return replace(
        cell, us=us, clock=clock, error=error, tb_s=num_bytes / us / 1e6, tflop_s=num_flops / us / 1e6,
        floor_percent=100 * floor_us / us,
    )  # fmt: skip


def line(cell: Cell) -> str:
    """Return a cell as a line of the table."""
    figures = (
        f"{cell.us:10.1f} us {cell.floor_percent:5.1f} % of floor {cell.tb_s:6.2f} TB/s {cell.tflop_s:7.1f} TFLOP/s"
    )
    case = f"{cell.part:7s} {cell.shape:14s} {cell.rows:3d} x {cell.tokens:5d} of {cell.keys:6d} {cell.config:22s}"
    return f"{case} {cell.trouble or figures}"


def best_of_sweep(results: list[Cell]) -> list[Cell]:
    """Return the fastest candidate of each kernel and case, in the order of the sweep."""
    best: dict[tuple[object, ...], Cell] = {}
    for cell in results:
        if cell.part != "sweep" or cell.trouble:
            continue
        case = (cell.shape, cell.rows, cell.tokens, cell.keys, cell.config.split()[0])
        if case not in best or cell.us < best[case].us:
            best[case] = cell
    return list(best.values())


def compile_kernels(problem: LatentProblem, candidates: _Candidates, device: torch.device) -> int:
    """Compile what the candidates launch, in parallel; return the number of kernels."""
    from kernels.precompile import Compilation, collect_kernels

    with collect_kernels() as kernels:
        for candidate in candidates(problem, device):
            candidate.run(0)
    if kernels:
        Compilation(list(kernels)).wait(lambda done, total: None)
    return len(kernels)


def main() -> None:
    """Measure the chosen parts; print and save each as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also time candidate tiles of each kernel")
    parser.add_argument("--device", default="cuda", type=torch.device, help="cuda or cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--only", default="decode,drafts,prompt", help="comma-separated parts; none of them: -")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    device: torch.device = options.device
    if options.sweep and device.type != "cuda":
        parser.error(f"--sweep needs Triton's kernels, so --device cuda, not {device}")
    torch.manual_seed(0)
    like: TensorOptions = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
    results: list[Cell] = []
    compiled: set[tuple[str, str, bool]] = set()
    for part, shape, (rows, tokens, keys), candidates in cases(
        options.only.split(","), is_smoke=options.smoke, is_sweep=options.sweep
    ):
        num_bytes = work_of_latents(shape, rows, tokens, keys, like["dtype"].itemsize)[0]
        num_layers = 1 if device.type != "cuda" or tokens > 8 else num_copies(int(num_bytes))
        with torch.inference_mode():
            problem = make_problem(shape, rows=rows, tokens=tokens, keys=keys, num_layers=num_layers, like=like)
            kind = (candidates.__name__, shape.name, tokens > 1)
            if device.type == "cuda" and kind not in compiled:
                compiled.add(kind)
                print(f"# {compile_kernels(problem, candidates, device)} kernels compiled", flush=True)
            for candidate in candidates(problem, device):
                cell = Cell(part, shape.name, rows, tokens, keys, candidate.config)
                results.append(measure(cell, candidate, problem, device))
                print(line(results[-1]), flush=True)
                if options.json:
                    report = {"machine": machine_facts(), "results": [asdict(result) for result in results]}
                    options.json.write_text(json.dumps(report, indent=1))
        del problem
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for cell in best_of_sweep(results):
        print(f"best {line(cell)}", flush=True)


if __name__ == "__main__":
    main()
