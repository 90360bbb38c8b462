"""KINDS of quantised products for benchmarks/quantized_linear_sweep.py: random weights, float64 results, candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from kernels.linear import eight_bits, lut4_configs, ops, scaled8_configs, w8a8
from kernels.linear.few_rows_configs import (
    MAX_ROWS,
    MAX_ROWS_BY_BLOCK,
    FewRowsConfig,
    Row8Config,
    few_rows_config,
    row8_config,
)
from kernels.linear.float4 import Float4Weight, dequantize_float4, float4_weight_bytes, make_float4_weight
from kernels.linear.lut4_configs import Lut4GemmConfig, float4_gemm_config
from kernels.linear.reference import FP8, LUT_TILE, dequantize_blocks, quantize_groups, quantize_rows
from kernels.linear.scaled8_configs import BlocksConfig, Scaled8Config, scaled8_config
from kernels.linear.splits import num_splits

BLOCK = 128  # of fp8: rows and columns
# Outputs, warps, stages
_FLOAT4_CUTS = ((64, 4, 5), (64, 4, 8), (128, 4, 3), (128, 4, 4), (128, 4, 5), (128, 4, 6), (128, 4, 7), (256, 8, 4))
_FEW_CUTS = ((32, 4, 6), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 6), (128, 8, 4))
# Rows, outputs, warps, stages
_TILED_CUTS = (
    (64, 128, 4, 4),
    (64, 256, 8, 4),
    (128, 128, 4, 4),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 256, 8, 3),
    (256, 128, 8, 3),
)
_PROGRAMS = (132, 264, 528)
_MOST_DENSE_ROWS = 256  # above, only the dense product of 4-bit floats is a candidate
_EXACT_ROWS = 256  # see kernels/linear/eight_bits.py
_NUM_SMS = 132  # of the Hopper GPUs with SXM
# Of few rows of 8 bits: outputs, boxes of 128 inputs, warps
_FEW_ROWS_CUTS = ((64, 4, 4), (64, 2, 4), (64, 1, 4), (128, 2, 8), (128, 1, 8), (128, 2, 4))
_FEW_ROWS_BYTES = 200 * 1024  # of shared memory, for tiles


@dataclass(frozen=True)
class Product:
    """A product without tile sizes of its own: "stream" (rows_linear of triton_fp8.py), or "torch"."""

    name: str


# None: dequantise, and cuBLAS
Config = Lut4GemmConfig | Scaled8Config | BlocksConfig | Row8Config | FewRowsConfig | Product | None
Scaled = tuple[torch.Tensor, torch.Tensor]  # values and scales


@dataclass(frozen=True)
class Kind:
    """One way to store and multiply a matrix. A weight is what make() returns."""

    name: str
    make: Callable[[int, int, torch.dtype, torch.device], Any]  # of n, k, dtype, device
    num_bytes: Callable[[int, int], int]  # of n, k
    exact: Callable[[torch.Tensor, Any], torch.Tensor]  # of x, weight: float64, of x rounded as the product rounds it
    # Of num_rows, n, k; is_interpreted: those that Triton's interpreter runs. The served first
    candidates: Callable[..., Sequence[Config]]
    run: Callable[..., torch.Tensor]  # of x, weight, config, scratch
    served: Callable[[], Callable[[torch.Tensor, Any], torch.Tensor]]
    scratch: Callable[[torch.device], Any]


def _float4(name: str, block: int) -> Kind:
    def make(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Float4Weight:
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        if block == 32:
            scales = torch.randint(116, 121, (n, k // block), dtype=torch.uint8, device=device)
        else:
            scales = torch.rand(n, k // block, device=device).add(0.5).to(FP8)
        return make_float4_weight(packed, scales, torch.rand(n, device=device).add(0.5), dtype)

    def candidates(num_rows: int, n: int, k: int, *, is_interpreted: bool = False) -> list[Config]:
        is_shared = not is_interpreted
        found: list[Config] = [float4_gemm_config(num_rows=num_rows, n=n, k=k, block=block, is_shared=is_shared)]
        if num_rows <= _MOST_DENSE_ROWS:
            block_m = min(64, max(8, 1 << (num_rows - 1).bit_length()))
            for block_n, warps, stages in _FLOAT4_CUTS:
                for programs in _PROGRAMS[1:]:
                    splits = num_splits(
                        num_rows=num_rows, n=n, num_steps=-(-k // LUT_TILE), block_m=block_m, block_n=block_n,
                        programs=programs, least_steps=lut4_configs.LEAST_STEPS,
                    )  # fmt: skip
                    prefetch = 2 if block_m <= 16 else 0
                    found.append(Lut4GemmConfig(block_m, block_n, splits, warps, stages, prefetch, is_shared))
        return list(dict.fromkeys([*found, None]))

    def run(x: torch.Tensor, weight: Float4Weight, config: Lut4GemmConfig | None, scratch: Any) -> torch.Tensor:
        from kernels.linear import triton_float4

        if config is None:
            return functional.linear(x, triton_float4.dequantize(weight, x.dtype))
        return triton_float4.float4_gemm(x, weight, None, scratch, config=config, pdl=x.is_cuda)

    def scratch(device: torch.device) -> Any:
        from kernels.linear.splits import SplitKScratch

        return SplitKScratch.allocate(device)

    def served() -> Callable[[torch.Tensor, Any], torch.Tensor]:
        linear = ops.Float4Linear()
        return lambda x, weight: linear(x, weight, None)

    return Kind(
        name,
        make,
        lambda n, k: float4_weight_bytes(n, k, block),
        lambda x, weight: x.double() @ dequantize_float4(weight, torch.float32).double().T,
        candidates,
        run,
        served,
        scratch,
    )


def constant_of(config: Config, *, num_rows: int, k: int) -> int | None:
    """Return what the kernel of a config is compiled for beside it: K, or the rows of a tile."""
    if isinstance(config, Row8Config):
        return k
    return _tile_rows(num_rows) if isinstance(config, FewRowsConfig | Product) else None


def _tile_rows(num_rows: int) -> int:
    return max(8, 1 << (num_rows - 1).bit_length())


def _few_rows_candidates(
    num_rows: int, n: int, k: int, *, dtype: torch.dtype, by_block: bool, is_interpreted: bool
) -> list[Config]:
    """Return those of triton_row8.py and gluon_few_rows.py. The interpreter has neither Gluon nor dp4a."""
    found: list[Config] = []
    if num_rows == 1 and not (is_interpreted and dtype == torch.int8):
        found.append(row8_config(n=n, k=k, dtype=dtype, by_block=by_block))
        for block_n in (2, 4, 8):
            for block_k in (512, 1024, 2048, 4096):
                for warps in (1, 2, 4):
                    if block_k < 2 * k and 16 <= block_n * block_k // (32 * warps) <= 64:
                        found += [Row8Config(block_n, block_k, warps, prefetch) for prefetch in (0, 1024)]
    if num_rows <= MAX_ROWS and not is_interpreted:
        served = few_rows_config(num_rows=num_rows, n=n, k=k, by_block=by_block, num_sms=_NUM_SMS)
        found.append(served)
        for block_n, boxes, warps in _FEW_ROWS_CUTS:
            most = _FEW_ROWS_BYTES // (boxes * 128 * (block_n + _tile_rows(num_rows)))
            for stages in {min(most, 3), min(most, 5), min(most, 8)}:
                for is_whole in (True, False):
                    found.append(FewRowsConfig(block_n, boxes, stages, warps, served.max_registers, is_whole))
    return found


def _scaled8_candidates(num_rows: int, n: int, k: int) -> list[Config]:
    found: list[Config] = [scaled8_config(num_rows=num_rows, n=n, k=k, block_k=BLOCK)]
    if num_rows <= scaled8_configs.MAX_FEW_ROWS:
        most = max(8, 1 << (num_rows - 1).bit_length())
        for block_m in {min(64, most), min(128, most)}:
            for block_n, warps, stages in _FEW_CUTS:
                for programs in _PROGRAMS:
                    splits = num_splits(
                        num_rows=num_rows, n=n, num_steps=-(-k // BLOCK), block_m=block_m, block_n=block_n,
                        programs=programs, least_steps=scaled8_configs.LEAST_STEPS,
                    )  # fmt: skip
                    found.append(Scaled8Config(block_m, block_n, BLOCK, warps, stages, splits))
    if num_rows >= 64:
        for block_m, block_n, warps, stages in _TILED_CUTS:
            for group, has_tma in ((8, False), (8, True), (32, True)):
                config = Scaled8Config(block_m, block_n, BLOCK, warps, stages, is_few=False, group=group)
                found.append(replace(config, has_tma=has_tma))
    return list(dict.fromkeys(found))


def _integer_candidates(num_rows: int, n: int, k: int, *, is_interpreted: bool = False) -> list[Config]:
    few = _few_rows_candidates(num_rows, n, k, dtype=torch.int8, by_block=False, is_interpreted=is_interpreted)
    return list(dict.fromkeys([*few, *_scaled8_candidates(num_rows, n, k)]))


def _row_candidates(num_rows: int, n: int, k: int, *, is_interpreted: bool = False) -> list[Config]:
    found = _few_rows_candidates(num_rows, n, k, dtype=FP8, by_block=False, is_interpreted=is_interpreted)
    if not is_interpreted:
        found.append(Product("torch"))
    if num_rows <= MAX_ROWS:
        found.append(Product("stream"))
    return list(dict.fromkeys([*found, None]))


def _blocks_candidates(num_rows: int, n: int, k: int, *, is_interpreted: bool = False) -> list[Config]:
    found = _scaled8_candidates(num_rows, n, k)
    few = _few_rows_candidates(num_rows, n, k, dtype=FP8, by_block=True, is_interpreted=is_interpreted)
    found = [*few, *found] if num_rows <= MAX_ROWS_BY_BLOCK else [*found, *few]
    if num_rows > scaled8_configs.MAX_FEW_ROWS:
        found += [BlocksConfig(num_stages=stages, group=group) for stages in (4, 5) for group in (8, 16)]
        found.append(BlocksConfig(part=BLOCK // 2, parts=2))
    return list(dict.fromkeys(found))


def _scaled8_scratch(device: torch.device) -> Any:
    from kernels.linear.splits import SplitKScratch

    return SplitKScratch.allocate(device)


def _blocks() -> Kind:
    def make(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Scaled:
        values = torch.randn(n, k, device=device).mul(100).clamp(-448, 448).to(FP8)
        return values, torch.rand(-(-n // BLOCK), -(-k // BLOCK), device=device).add(0.5).mul(1e-3)

    def exact(x: torch.Tensor, weight: Scaled) -> torch.Tensor:
        values, scales = eight_bits.quantize_groups(x, BLOCK) if x.is_cuda else quantize_groups(x, BLOCK)
        wide = values.double() * scales.double().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        return wide @ dequantize_blocks(*weight, BLOCK, BLOCK).double().T

    def run(x: torch.Tensor, weight: Scaled, config: Config, scratch: Any) -> torch.Tensor:
        from kernels.linear import triton_fp8, triton_scaled8

        rounded = triton_fp8.quantize_groups(x, BLOCK, pdl=x.is_cuda)
        if isinstance(config, Row8Config | FewRowsConfig):
            return _multiply_few(x, rounded, weight, config, scratch, rows_per_scale=BLOCK)
        if isinstance(config, BlocksConfig):
            from kernels.linear import gluon_blocks

            return gluon_blocks.blocks_linear(*rounded, *weight, None, dtype=x.dtype, config=config, pdl=x.is_cuda)
        assert isinstance(config, Scaled8Config)
        return triton_scaled8.blocks_linear(
            *rounded, *weight, None, scratch,
            rows=BLOCK, columns=BLOCK, dtype=x.dtype, config=config, pdl=x.is_cuda,
        )  # fmt: skip

    def served() -> Callable[[torch.Tensor, Any], torch.Tensor]:
        linear = eight_bits.Fp8BlockLinear()
        return lambda x, weight: linear(x, weight[0], weight[1], None, rows=BLOCK, columns=BLOCK)

    return Kind("fp8-blocks", make, lambda n, k: n * k, exact, _blocks_candidates, run, served, _scaled8_scratch)


def _integers() -> Kind:
    def make(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Scaled:
        values = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        return values, torch.rand(n, device=device).add(0.5).mul(1e-3)

    def exact(x: torch.Tensor, weight: Scaled) -> torch.Tensor:
        rounded, scales = eight_bits.quantize_rows_int8(x) if x.is_cuda else w8a8.quantize_rows_int8(x)
        values, w_scales = weight
        return (rounded.double() * scales[:, None].double()) @ (values.double() * w_scales[:, None].double()).T

    def run(x: torch.Tensor, weight: Scaled, config: Config, scratch: Any) -> torch.Tensor:
        from kernels.linear import triton_scaled8

        rounded = triton_scaled8.quantize_rows_int8(x, pdl=x.is_cuda)
        if isinstance(config, Row8Config | FewRowsConfig):
            return _multiply_few(x, rounded, weight, config, scratch)
        assert isinstance(config, Scaled8Config)
        return triton_scaled8.int8_linear(*rounded, *weight, None, scratch, dtype=x.dtype, config=config, pdl=x.is_cuda)

    def served() -> Callable[[torch.Tensor, Any], torch.Tensor]:
        linear = eight_bits.Int8Linear()
        return lambda x, weight: linear(x, weight[0], weight[1], None, input_scale=None)

    return Kind("w8a8", make, lambda n, k: n * k, exact, _integer_candidates, run, served, _scaled8_scratch)


def _rows() -> Kind:
    def make(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Scaled:
        values = torch.randn(n, k, device=device).mul(100).clamp(-448, 448).to(FP8)
        return values, torch.rand(n, device=device).add(0.5).mul(1e-3)

    def exact(x: torch.Tensor, weight: Scaled) -> torch.Tensor:
        rounded, scales = eight_bits.quantize_rows(x) if x.is_cuda else quantize_rows(x)
        values, w_scales = weight
        return (rounded.double() * scales[:, None].double()) @ (values.double() * w_scales[:, None].double()).T

    def run(x: torch.Tensor, weight: Scaled, config: Config, scratch: Any) -> torch.Tensor:
        from kernels.linear import triton_fp8

        rounded = triton_fp8.quantize_rows(x, pdl=x.is_cuda)
        if isinstance(config, Row8Config | FewRowsConfig):
            return _multiply_few(x, rounded, weight, config, scratch)
        if config == Product("stream"):
            return triton_fp8.rows_linear(*rounded, *weight, None, x.dtype, pdl=x.is_cuda)
        if config == Product("torch"):
            return torch._scaled_mm(
                rounded[0], weight[0].t(), scale_a=rounded[1][:, None], scale_b=weight[1][None, :],
                out_dtype=torch.bfloat16, use_fast_accum=x.shape[0] > _EXACT_ROWS,
            ).to(x.dtype)  # fmt: skip
        dense = weight[0].to(x.dtype) * weight[1][:, None].to(x.dtype)
        return (functional.linear(rounded[0].to(x.dtype), dense) * rounded[1][:, None]).to(x.dtype)

    def served() -> Callable[[torch.Tensor, Any], torch.Tensor]:
        def product(x: torch.Tensor, weight: Scaled) -> torch.Tensor:
            return eight_bits.rows_linear(*eight_bits.quantize_rows(x), *weight, None, x.dtype)

        return product

    return Kind("fp8", make, lambda n, k: n * k, exact, _row_candidates, run, served, _scaled8_scratch)


def _multiply_few(
    x: torch.Tensor,
    rounded: Scaled,
    weight: Scaled,
    config: Row8Config | FewRowsConfig,
    scratch: Any,
    *,
    rows_per_scale: int = 0,
) -> torch.Tensor:
    if isinstance(config, Row8Config):
        from kernels.linear.triton_row8 import row8_linear

        return row8_linear(
            *rounded, *weight, None, dtype=x.dtype, config=config, rows_per_scale=rows_per_scale, pdl=x.is_cuda
        )
    from kernels.linear.gluon_few_rows import few_rows_linear

    return few_rows_linear(
        *rounded, *weight, None, config, dtype=x.dtype, rows_per_scale=rows_per_scale, scratch=scratch, pdl=x.is_cuda
    )


KINDS = {kind.name: kind for kind in (_float4("mxfp4", 32), _float4("nvfp4", 16), _integers(), _rows(), _blocks())}
