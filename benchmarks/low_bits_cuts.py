"""The cases of benchmarks/low_bits.py: random layers of 4-bit floats and tables, their cuts and specifications."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from benchmarks.expert_layers import Layer, make_layer
from benchmarks.kernel_timing import BF16_CUDA, num_copies
from benchmarks.moe_problem import SHAPES, MoeWeights, count_hit, make_inputs, make_weights
from kernels.linear import ops
from kernels.linear.float4 import float4_weight_bytes, make_float4_weight
from kernels.linear.planes import Float4Planes, dequantize_planes, make_float4_planes
from kernels.linear.planes_configs import PlanesConfig, PlanesTile, config_of
from kernels.linear.reference import BLOCK, FP8, NF4_TABLE, IntWeight, Lut4Weight, make_int_weight, make_lut4_weight
from kernels.moe import reference as moe
from kernels.moe.configs import PlanesConfig as ExpertsConfig
from kernels.moe.configs import PlanesPairsConfig, PlanesPairTile
from kernels.moe.configs import PlanesTile as ExpertsTile
from kernels.moe.planes import to_planes
from kernels.moe.triton import Config

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # N, K
Calls = Sequence[Callable[[], torch.Tensor]]
_GROUP_SIZE = 128  # of int4
_FEW_EXPERTS_TOKENS = 4
_CHECKED_ROWS = 64  # the first and the last of a step, since the specification goes expert by expert
# Outputs, warps, stages, programs, groups ahead; for each number of rows of a tile
_FEW = (
    (128, 4, 4, 264, 2),
    (128, 4, 6, 264, 2),
    (64, 4, 5, 264, 2),
    (64, 4, 6, 528, 2),
    (128, 4, 4, 528, 2),
    (64, 2, 6, 528, 2),
)
_SOME = (
    (128, 4, 4, 264, 0),
    (64, 4, 4, 264, 0),
    (64, 4, 6, 264, 0),
    (64, 4, 4, 528, 0),
    (64, 2, 5, 528, 0),
    (128, 8, 4, 264, 0),
)
_CUTS = {8: _FEW, 16: _FEW, 32: _SOME, 64: _SOME}
# (outputs, warps, stages) of both products of experts, for each number of rows of a tile
_EXPERT_CUTS: dict[int, tuple[tuple[tuple[int, int, int], tuple[int, int, int]], ...]] = {
    16: (((64, 4, 3), (128, 4, 3)), ((64, 4, 4), (64, 4, 4)), ((32, 4, 4), (64, 4, 4)), ((32, 2, 4), (64, 2, 4))),
    32: (((128, 4, 3), (128, 8, 3)), ((64, 4, 3), (128, 4, 3)), ((64, 4, 3), (64, 4, 4))),
    64: (((64, 4, 3), (128, 4, 3)), ((128, 8, 3), (128, 8, 3))),
    128: (((64, 4, 3), (128, 8, 2)), ((128, 8, 3), (128, 8, 3)), ((64, 8, 3), (128, 8, 3)), ((64, 4, 3), (64, 4, 3))),
}
_PAIR_TILES = (((16, 2, 2), (8, 4, 2)), ((16, 2, 4), (16, 4, 2)))


@dataclass(frozen=True)
class Case:
    """One layer with so many rows. A cut is the calls that are timed one after the other; the first is checked."""

    kind: str
    layer: str
    num_rows: int
    num_bytes: float
    cuts: dict[str, Calls]
    specify: Callable[[], torch.Tensor]  # the output of the first call, float32 or float64, of the `checked` rows
    tolerance: float
    checked: slice | torch.Tensor = field(default_factory=lambda: slice(None))
    others: Sequence[str] = ("bf16", "int4", "nf4")  # cuts of other weights

    def error_of(self, name: str, out: torch.Tensor) -> float | None:
        """Return the relative error of a cut's output; None: it has other weights."""
        if name in self.others:
            return None
        expected = self.specify()
        return float((out[self.checked].to(expected.dtype) - expected).norm() / expected.norm())


def dense_cases(rows: Sequence[int]) -> Iterator[list[Case]]:
    """Yield the cases of each layer of Llama 3.1 8B. MXFP4 has no candidates of its own."""
    for layer, (n, k) in LAYERS.items():
        bf16 = [torch.randn(n, k, **BF16_CUDA) * k**-0.5 for _ in range(num_copies(2 * n * k))]
        count = num_copies(float4_weight_bytes(n, k, 16))
        int4 = [_random_int4(n, k) for _ in range(count)]
        nf4 = [_random_nf4(n, k) for _ in range(count)]
        found = []
        for kind, block in (("nvfp4", 16), ("mxfp4", 32)):
            stored = [_random_float4(n, k, block) for _ in range(count)]
            tables = [make_float4_weight(*each, torch.bfloat16) for each in stored]
            planes = [make_float4_planes(*each) for each in stored]
            del stored
            exact = dequantize_planes(planes[0], torch.float32).double()
            dense = ops.DenseLinear()
            for num_rows in rows:
                x = torch.randn(num_rows, k, **BF16_CUDA)
                linear, integers, looked_up = ops.Float4Linear(), ops.IntLinear(), ops.Linear4Bit()
                cuts: dict[str, Calls] = {
                    "bf16": [functools.partial(dense, x, w, None) for w in bf16],
                    "int4": [functools.partial(integers, x, w, None) for w in int4],
                    "nf4": [functools.partial(looked_up, x, w, None) for w in nf4],
                    "tables": [functools.partial(linear, x, w, None) for w in tables],
                    "served": [functools.partial(linear, x, w, None) for w in planes],
                }
                if kind == "nvfp4":
                    cuts |= _candidates(x, planes, n=n, k=k)
                found.append(Case(
                    kind, layer, num_rows, float4_weight_bytes(n, k, block), cuts,
                    functools.cache(functools.partial(_multiply, x, exact)), tolerance=6e-3,
                ))  # fmt: skip
        yield found


def expert_cases(rows: Sequence[int]) -> Iterator[list[Case]]:
    """Yield the cases of Qwen3-30B-A3B's experts in NVFP4 and in NF4."""
    sixteen = make_layer(SHAPES["qwen3-30b-a3b"])
    awq = make_layer(SHAPES["qwen3-30b-a3b-awq"])
    for kind in ("nvfp4", "nf4"):
        shape = SHAPES[f"qwen3-30b-a3b-{kind}"]
        stored = make_weights(shape, **BF16_CUDA, is_arranged=False)
        as_rows = Layer(shape, stored, moe.SILU, None)
        planes = replace(as_rows, weights=MoeWeights(to_planes(stored.gate_up), to_planes(stored.down)))
        found = []
        for num_tokens in rows:
            steps = [make_inputs(shape, num_tokens, **BF16_CUDA) for _ in range(8 if num_tokens < 1024 else 2)]
            places = torch.arange(num_tokens, device="cuda")
            checked = torch.cat((places[:_CHECKED_ROWS], places[max(_CHECKED_ROWS, num_tokens - _CHECKED_ROWS) :]))
            layers: dict[str, tuple[Layer, Config | None]] = {
                "bf16": (sixteen, None), "int4": (awq, None), "rows": (as_rows, None), "served": (planes, None),
            }  # fmt: skip
            configs = _expert_candidates(num_tokens, shape.top_k / shape.num_experts)
            layers |= {name: (planes, config) for name, config in configs.items()}
            num_hit = sum(count_hit(shape, step) for step in steps) / len(steps)
            num_bytes = shape.bytes_per_weight * num_hit * 3 * shape.hidden_size * shape.intermediate_size
            found.append(Case(
                kind, "experts", num_tokens, num_bytes,
                {
                    name: [functools.partial(layer.run, step, config) for step in steps]
                    for name, (layer, config) in layers.items()
                },
                functools.cache(functools.partial(as_rows.specify, steps[0], checked, is_rounded=False)),
                tolerance=1e-2, checked=checked,
            ))  # fmt: skip
        yield found


def _multiply(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return x.double() @ exact.T


def _candidates(x: torch.Tensor, planes: Sequence[Float4Planes], *, n: int, k: int) -> dict[str, Calls]:
    """Return cuts of products in registers, and the dense one."""
    from kernels.linear import triton_planes
    from kernels.linear.splits import SplitKScratch

    num_rows = x.shape[0]

    def run(weight: Float4Planes, config: PlanesConfig | None) -> torch.Tensor:
        if config is None:
            return functional.linear(x, triton_planes.dequantize(weight, x.dtype))
        return triton_planes.planes_gemm(x, weight, None, scratch, config=config, pdl=True)

    scratch = SplitKScratch.allocate(x.device)
    found: dict[str, PlanesConfig | None] = {}
    if num_rows <= 512:
        block_m = min(64, max(8, 1 << (num_rows - 1).bit_length()))
        for cut in _CUTS[block_m]:
            config = config_of(PlanesTile(*cut), block_m=block_m, num_rows=num_rows, n=n, k=k)
            found[f"{block_m}x{cut[0]} {cut[1]}w {cut[2]}s {config.splits}k {cut[3]}p"] = config
    if num_rows >= 64:
        found["dense"] = None
    return {name: [functools.partial(run, w, config) for w in planes] for name, config in found.items()}


def _expert_candidates(num_tokens: int, share: float) -> dict[str, Config]:
    """Return cuts for so many tokens. share: of the experts that a token chooses."""
    found: dict[str, Config] = {}
    if num_tokens <= _FEW_EXPERTS_TOKENS:
        for up, down in _PAIR_TILES:
            found[f"pairs {up} {down}"] = PlanesPairsConfig(PlanesPairTile(*up), PlanesPairTile(*down))
    average = num_tokens * share
    for block_m, cuts in _EXPERT_CUTS.items():
        if block_m < min(average, 64) or block_m > max(16, 4 * average):
            continue
        for up_cut, down_cut in cuts:
            group = 8 if block_m >= 64 else 1
            tiles = ExpertsTile(*up_cut, group), ExpertsTile(*down_cut, group)
            chunk = 64 if block_m >= 64 else 16
            found[f"{block_m} {up_cut} {down_cut}"] = ExpertsConfig(block_m, *tiles, chunk_tokens=chunk)
            if num_tokens <= _FEW_EXPERTS_TOKENS and block_m == 16:
                found[f"each {up_cut} {down_cut}"] = ExpertsConfig(16, *tiles, chunk_tokens=None)
    return found


def _random_float4(n: int, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    if block == 32:
        scales = torch.randint(116, 121, (n, k // block), dtype=torch.uint8, device="cuda")
    else:  # all but NaN, those below the normal ones and 0 among them
        scales = torch.randint(0, 127, (n, k // block), dtype=torch.uint8, device="cuda").view(FP8)
    return packed, scales, torch.rand(n, device="cuda").add(0.5)


def _random_int4(n: int, k: int) -> IntWeight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(k // _GROUP_SIZE, n, device="cuda") + 0.5).mul(0.01).half()
    zeros = torch.randint(0, 16, (k // _GROUP_SIZE, n), dtype=torch.uint8, device="cuda")
    return make_int_weight(codes, scales, zeros, bits=4)


def _random_nf4(n: int, k: int) -> Lut4Weight:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(n, k // BLOCK, device="cuda").add(0.5).mul(0.02)
    return make_lut4_weight(packed, scales, torch.tensor(NF4_TABLE, device="cuda"), torch.bfloat16)
