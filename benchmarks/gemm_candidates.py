"""What kernels/gemm_configs.py could hold: every cut worth timing for a product of many rows."""

from __future__ import annotations

from dataclasses import asdict

import torch

from kernels.gemm_configs import MAX_SUMS, STREAMED, GemmConfig, GemmScratch, HopperGemmConfig, num_programs
from kernels.triton_gemm import gemm
from kernels.triton_gemv import GemvConfig, GemvScratch, gemv

Candidate = HopperGemmConfig | GemmConfig | GemvConfig
FAMILIES = {"gluon": HopperGemmConfig, "triton": GemmConfig, "gemv": GemvConfig}
_SHARED_BYTES = 222 * 1024  # of an H100's SM, less what a kernel takes beside its tiles


def candidates(*, num_rows: int, n: int, k: int, num_sms: int) -> list[Candidate]:
    """All families' cuts for that product, without those that leave most of the device idle."""
    sizes = {"num_rows": num_rows, "n": n, "k": k, "num_sms": num_sms}
    return [*_hopper_candidates(**sizes), *_triton_candidates(**sizes), *_gemv_candidates(**sizes)]


def run(
    candidate: Candidate,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: tuple[GemmScratch, GemvScratch],
    *,
    pdl: bool,
) -> torch.Tensor:
    """x @ w.T + bias, so cut."""
    if isinstance(candidate, GemvConfig):
        return gemv(x, w, bias, scratch[1], config=candidate, pdl=pdl)
    return gemm(x, w, bias, scratch[0], config=candidate, pdl=pdl)


def family_of(candidate: Candidate) -> str:
    """The name of its kernel."""
    return next(name for name, kind in FAMILIES.items() if isinstance(candidate, kind))


def features_of(candidate: Candidate | None) -> list[str]:
    """Kinds that it is of, the narrowest first: candidates of one kind may fail for one reason."""
    if candidate is None:
        return ["cuBLAS"]
    way = {STREAMED: "streamed", 1: "whole"}.get(candidate.splits, "split")
    kinds = [f"{family_of(candidate)} {way}", f"{family_of(candidate)} k{candidate.block_k}"]
    if isinstance(candidate, HopperGemmConfig):
        return [f"gluon {way} c{candidate.consumers} k{candidate.block_k}", *kinds, f"gluon c{candidate.consumers}"]
    return kinds


def name_of(candidate: Candidate) -> str:
    """Short, for a table."""
    facts = asdict(candidate)
    short = {"block_m": "m", "block_n": "n", "block_k": "k", "consumers": "c", "splits": "s", "num_warps": "w",
             "num_stages": "st", "prefetch": "p"}  # fmt: skip
    return " ".join([family_of(candidate)[:2], *(f"{short[field]}{facts[field]}" for field in short if field in facts)])


def _hopper_candidates(*, num_rows: int, n: int, k: int, num_sms: int) -> list[Candidate]:
    units = -(-num_rows // 64)
    found: list[Candidate] = []
    for consumers in (1, 2, 3, 4):
        if -(-units // consumers) * consumers != units or (consumers == 1 and units > 4):
            continue
        for block_n in (32, 64, 128, 256):
            if consumers * 64 * block_n > MAX_SUMS:
                continue
            for splits in (1, 2, 3, 4, 6, 8, STREAMED):
                for block_k, stages in ((64, 8), (64, 6), (64, 4), (64, 3), (128, 4), (128, 3), (128, 2)):
                    config = HopperGemmConfig(block_n, consumers, splits, stages, block_k)
                    programs = num_programs(config, num_rows=num_rows, n=n, k=k, num_sms=num_sms)
                    if programs >= min(64, num_sms // 2) and _is_worth_timing(config, programs, num_rows, n, k):
                        found.append(config)
    return found


def _is_worth_timing(config: HopperGemmConfig, programs: int, num_rows: int, n: int, k: int) -> bool:
    """Whether the ring fits, is not longer than the work, and is one of the two longest of its kind."""
    stage_bytes = (config.consumers * 64 + config.block_n) * config.block_k * 2
    tiles = -(-num_rows // (config.consumers * 64)) * -(-n // config.block_n)
    steps = tiles * (k // config.block_k) // programs
    most = min(_SHARED_BYTES // stage_bytes, max(2, steps))
    kinds = [stages for stages in ((8, 6, 4, 3) if config.block_k == 64 else (4, 3, 2)) if stages <= most]
    return config.num_stages in kinds[: 2 if config.block_k == 64 else 1]


def _triton_candidates(*, num_rows: int, n: int, k: int, num_sms: int) -> list[Candidate]:
    tiles = [(64, 64, 64, 4, 6), (64, 128, 64, 4, 5), (128, 64, 64, 4, 6), (128, 64, 128, 4, 3), (128, 128, 64, 8, 4),
             (128, 256, 64, 8, 4), (256, 64, 64, 8, 4), (256, 128, 64, 8, 4), (128, 32, 64, 4, 8), (256, 64, 128, 8, 2),
             (128, 128, 128, 8, 3)]  # fmt: skip
    found: list[Candidate] = []
    for block_m, block_n, block_k, warps, stages in tiles:
        for splits in (1, 2, 4, 8):
            config = GemmConfig(block_m, block_n, block_k, splits, warps, stages)
            programs = num_programs(config, num_rows=num_rows, n=n, k=k, num_sms=num_sms)
            wastes = block_m > 64 and -(-num_rows // block_m) * block_m >= num_rows + 64
            if not wastes and programs >= 64 and (splits == 1 or programs <= 2 * num_sms):
                found.append(config)
    return found


def _gemv_candidates(*, num_rows: int, n: int, k: int, num_sms: int) -> list[Candidate]:
    found: list[Candidate] = []
    for block_m, block_n, block_k, warps, stages in ((64, 64, 64, 4, 6), (64, 128, 64, 4, 5), (128, 64, 64, 4, 4),
                                                     (128, 128, 64, 8, 4), (256, 64, 64, 8, 4)):  # fmt: skip
        for splits in (1, 2, 4):
            programs = -(-num_rows // block_m) * (n // block_n) * splits
            fits = k % (splits * block_k) == 0 and (splits == 1 or programs <= 2 * num_sms)
            if fits and programs >= 64 and block_m < 2 * num_rows:
                found.append(GemvConfig(block_n, block_k, splits, warps, stages, block_m=block_m))
    return found
