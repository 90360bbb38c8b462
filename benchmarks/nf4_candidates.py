"""What kernels/codes_configs.py could hold: every cut worth timing, and the best table that a sweep's results allow."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from kernels.codes_configs import CodesCut, CodesGemmConfig, block_rows, is_wide
from kernels.quant_bnb import BLOCK, NF4_TABLE
from kernels.quant_codes import PLANES, CodeWeight, make_code_weight

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # Llama 3.1 8B: N, K
ROWS = (1, 8, 16, 32, 64)
_PROGRAMS = (264, 528)
# A launch with tables in shared memory beside a smaller part of it than this is refused: Triton asks the driver for
# more than 48 KB only where its own part is more
_SHARED_BYTES = (48 * 1024 + 1, (227 - 32) * 1024)
# plane → (outputs, warps, stages) of up to 16 rows, and of more
_FEW_ROWS = {
    32: ((128, 4, 4), (64, 4, 4), (64, 4, 6), (128, 4, 6), (128, 8, 4), (256, 8, 4), (128, 8, 6), (32, 4, 6)),
    64: ((128, 4, 4), (64, 4, 4), (64, 4, 3), (128, 4, 3), (128, 8, 4), (64, 4, 5), (256, 8, 3)),
}
_MANY_ROWS = {
    32: ((128, 4, 4), (64, 4, 4), (128, 8, 4), (128, 4, 3), (256, 8, 3), (64, 4, 6)),
    64: ((64, 4, 3), (128, 8, 3), (64, 4, 4), (128, 4, 3)),
}
Result = dict[str, object]


@dataclass(frozen=True)
class Candidate:
    """A way to store a matrix, and a cut for it."""

    plane: int
    is_paired: bool
    cut: CodesCut


@dataclass(frozen=True)
class Launch:
    """What is compiled once."""

    plane: int
    is_paired: bool
    config: CodesGemmConfig


def candidates(block_m: int) -> list[Candidate]:
    """The most promising first."""
    found = []
    table = _FEW_ROWS if block_m <= 16 else _MANY_ROWS
    cuts = [(plane, *cut) for plane in table for cut in table[plane]]
    cuts.sort(key=lambda cut: table[cut[0]].index(cut[1:]))
    for plane, block_n, warps, stages in cuts:
        for lookup in ("permute", "shared", "mixed"):
            if lookup != "permute" and not _fits(block_m, plane, block_n, stages):
                continue
            for programs in _PROGRAMS:
                cut = CodesCut(lookup, block_n, warps, stages, 2 if block_m <= 16 else 0, programs)
                found.append(Candidate(plane, is_paired=True, cut=cut))
    if block_m == 8:  # the same as tiles of 16 rows, the others empty
        found += [replace(one, cut=replace(one.cut, least_rows=16)) for one in found[:24]]
    first = table[32][0]
    found.insert(4, Candidate(32, is_paired=False, cut=CodesCut("permute", *first, 2 if block_m <= 16 else 0, 264)))
    return found


def launch(candidate: Candidate, *, num_rows: int, n: int, k: int) -> Launch:
    """What a candidate is for a shape."""
    num_tiles = -(-k // (PLANES * candidate.plane))
    config = candidate.cut.config(num_rows=num_rows, n=n, num_tiles=num_tiles)
    return Launch(candidate.plane, candidate.is_paired, config)


def launches() -> list[Launch]:
    """Every launch that the sweep makes, the most promising first."""
    wanted: dict[Launch, int] = {}
    for num_rows in ROWS:
        for priority, candidate in enumerate(candidates(block_rows(num_rows))):
            for n, k in SHAPES.values():
                wanted.setdefault(launch(candidate, num_rows=num_rows, n=n, k=k), priority)
    return sorted(wanted, key=lambda key: wanted[key])


def probes() -> list[Launch]:
    """One launch of each lookup in each kind of product: what faults here would take all that comes after with it."""
    return [
        Launch(32, is_paired=True, config=CodesGemmConfig(block_m, 128, 2, 4, 6 if block_m == 8 else 4, 2, lookup))
        for block_m in (8, 64)
        for lookup in ("permute", "shared", "mixed")
    ]


def compile_jobs(found: Sequence[Launch], *, until_s: float) -> list[Callable[[], object]]:
    """One tiny launch of each; past until_s, of time.monotonic(), they fail instead."""
    return [functools.partial(_run_tiny, one, until_s) for one in found]


def random_codes(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] uint8 codes, and their scales."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    return codes, torch.rand(n, k // BLOCK, device="cuda").add(0.5).mul(0.02)


def make_weight(codes: torch.Tensor, scales: torch.Tensor, *, plane: int, is_paired: bool) -> CodeWeight:
    """NF4, for x in bf16."""
    table = torch.tensor(NF4_TABLE, device=codes.device)
    return make_code_weight(codes, scales, table, torch.bfloat16, plane=plane, is_paired=is_paired)


def choose(results: Iterable[Result]) -> str:
    """The lines of kernels/codes_configs.py for each plane, with their mean distance to the best of each case."""
    timed = [result for result in results if "us" in result and result["is_paired"]]
    best: dict[tuple[object, object], float] = {}
    for result in timed:
        case = (result["shape"], result["rows"])
        best[case] = min(best.get(case, float("inf")), float(result["us"]))
    lines = []
    for plane in sorted({int(result["plane"]) for result in timed}):
        lines.append(f"PLANE = {plane}")
        for block_m in sorted({block_rows(int(result["rows"])) for result in timed}):
            for wide in (False, True):
                rows = [
                    result
                    for result in timed
                    if (result["plane"], block_rows(int(result["rows"])), is_wide(int(result["n"])))
                    == (plane, block_m, wide)
                ]
                lines += _best_line(rows, best, f"    ({block_m}, {wide})")
    return "\n".join(lines)


def as_result(candidate: Candidate) -> Result:
    """The columns that say which candidate it is."""
    return {"plane": candidate.plane, "is_paired": candidate.is_paired, "cut": asdict(candidate.cut)}


def _best_line(rows: Sequence[Result], best: dict[tuple[object, object], float], key: str) -> list[str]:
    distances: dict[CodesCut, list[float]] = {}
    cases = {(result["shape"], result["rows"]) for result in rows}
    for result in rows:
        distance = float(result["us"]) / best[result["shape"], result["rows"]]
        distances.setdefault(CodesCut(**result["cut"]), []).append(distance)
    means = {cut: sum(found) / len(found) for cut, found in distances.items() if len(found) == len(cases)}
    if not means:
        return []
    cut = min(means, key=lambda cut: means[cut])
    values = ", ".join(repr(value) for value in asdict(cut).values())
    return [f"{key}: CodesCut({values}),  # {means[cut] - 1:.1%} from each shape's best, in the mean"]


def _fits(block_m: int, plane: int, block_n: int, stages: int) -> bool:
    depth = PLANES * plane
    tile = block_n * depth // 2 + block_m * depth * 2 + 4 * block_n * depth // BLOCK
    return _SHARED_BYTES[0] <= (stages - 1) * tile <= _SHARED_BYTES[1]


def _run_tiny(one: Launch, until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError("not compiled: out of time")
    from kernels.triton_codes_gemm import allocate_scratch, codes_gemm  # here, since it needs triton

    k = 2 * one.config.splits * PLANES * one.plane
    weight = make_weight(*random_codes(2 * one.config.block_n, k), plane=one.plane, is_paired=one.is_paired)
    x = torch.randn(one.config.block_m, k, dtype=torch.bfloat16, device="cuda")
    codes_gemm(x, weight, None, allocate_scratch(x.device), config=one.config, pdl=True)
