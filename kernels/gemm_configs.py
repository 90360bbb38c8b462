"""How products of 65 and more rows are cut, where a cut of ours beat cuBLAS (`benchmarks/gemm_sweep.py`, one H100)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STREAMED = 0  # for HopperGemmConfig.splits: programs stay
MIN_ROWS = 65  # below: kernels/triton_gemv.py
MAX_ROWS = 512
MAX_SUMS = 256 * 128  # of a tile: the fp32 sums that one program can have in registers


@dataclass(frozen=True)
class HopperGemmConfig:
    """A cut of kernels/gluon_gemm.py. consumers * 64 * block_n <= MAX_SUMS."""

    block_n: int
    consumers: int  # warpgroups, of 64 rows each
    splits: int  # parts of K, or STREAMED
    num_stages: int
    block_k: int = 64


@dataclass(frozen=True)
class GemmConfig:
    """A cut of kernels/triton_gemm.py. block_m * block_n <= MAX_SUMS."""

    block_m: int
    block_n: int
    block_k: int
    splits: int  # parts of K, a multiple of block_k each
    num_warps: int
    num_stages: int
    prefetch: int = 256  # columns of each row of w that a program asks L2 for before it waits; 0: none


@dataclass(frozen=True)
class GemmScratch:
    """Where programs that share a tile meet. One per stream."""

    # [num_sms * MAX_SUMS] fp32
    partial: torch.Tensor
    # [num_sms * 4] int32: parts that have arrived; zero between launches
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device, *, num_sms: int) -> GemmScratch:
        """Allocate what every cut needs: 17 MB on an H100."""
        return cls(
            partial=torch.empty(num_sms * MAX_SUMS, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_sms * 4, dtype=torch.int32, device=device),
        )

    @property
    def num_sms(self) -> int:
        """Of the device that it was allocated for."""
        return self.arrivals.shape[0] // 4


# (N, K) → (rows up to which it holds, cut, or None where cuBLAS is as fast), in order of rows. Beyond the last: cuBLAS
_TABLE: dict[tuple[int, int], tuple[tuple[int, HopperGemmConfig | GemmConfig | None], ...]] = {}


def gemm_config(*, num_rows: int, n: int, k: int, num_sms: int) -> HopperGemmConfig | GemmConfig | None:
    """The cut of that product, or None: leave it to cuBLAS."""
    for max_rows, config in _TABLE.get((n, k), ()):
        if num_rows <= max_rows:
            fits = config is not None and num_programs(config, num_rows=num_rows, n=n, k=k, num_sms=num_sms) > 0
            return config if fits else None
    return None


def num_programs(config: HopperGemmConfig | GemmConfig, *, num_rows: int, n: int, k: int, num_sms: int) -> int:
    """Programs of a launch, or 0 if that cut does not fit: too few tiles to stream, too many to split, a short K."""
    is_hopper = isinstance(config, HopperGemmConfig)
    block_m = config.consumers * 64 if is_hopper else config.block_m
    tiles = -(-num_rows // block_m) * -(-n // config.block_n)
    if k % config.block_k != 0:
        return 0
    if config.splits == STREAMED:
        return num_sms if is_hopper and tiles > num_sms else 0
    programs = tiles * config.splits
    if is_hopper:  # programs wait for one another: all must be resident
        fits = config.splits == 1 or (programs <= num_sms and config.splits <= k // config.block_k)
    else:
        sums = programs * block_m * config.block_n
        room = tiles <= num_sms * 4 and sums <= num_sms * MAX_SUMS
        fits = config.splits == 1 or (room and k % (config.splits * config.block_k) == 0)
    return programs if fits else 0
