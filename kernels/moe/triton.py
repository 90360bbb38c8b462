"""Triton twin of kernels/moe/reference.py. Never syncs: grids depend only on the number of tokens, as graphs require.

Few tokens: route, then two matrix-vector products per pair. Otherwise: route, lay out (in one launch for few tokens),
gate and up joined, down, and the weighted sum over each token's experts in their order, so that results are equal in
every run. Experts arranged in planes have kernels of their own for both products: of few tokens, and of many in FP8.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kernels.dispatch import is_hopper
from kernels.linear.triton_gemv import shared_bytes_of
from kernels.moe.configs import (
    Fp8Config,
    GroupedConfig,
    HopperFp8Config,
    HopperPlanesConfig,
    PairsConfig,
    PlanesConfig,
    PlanesPairsConfig,
    fitting,
    for_packed,
    grouped_config,
    hopper_fp8_config,
    hopper_planes_config,
    pairs_config,
    planes_config,
    uses_pairs,
)
from kernels.moe.few_configs import CHUNK_TOKENS, FewConfig, few_config
from kernels.moe.planes import PlanesMatrix
from kernels.moe.reference import SILU, Choice, ExpertBiases, ExpertSum, Gate
from kernels.moe.storage import ExpertMatrix
from kernels.moe.triton_fp8 import fp8_down, fp8_up, quantize_planes
from kernels.moe.triton_grouped import grouped_gemm, pairs_down, pairs_gate_up
from kernels.moe.triton_planes import planes_gemm
from kernels.moe.triton_planes_pairs import planes_pairs_down, planes_pairs_up
from kernels.moe.triton_route import Routing, RowTiles, lay_out, route
from kernels.moe.triton_route_few import route_few, routes_once
from kernels.moe.triton_sums import sum_experts

try:
    from kernels.moe import gluon_few, gluon_fp8, gluon_planes

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

if TYPE_CHECKING:
    from kernels.moe.gluon_few_route import LateRouting

Config = (
    GroupedConfig
    | PairsConfig
    | PlanesConfig
    | PlanesPairsConfig
    | FewConfig
    | Fp8Config
    | HopperFp8Config
    | HopperPlanesConfig
)


def fused_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    *,
    top_k: int,
    renormalize: bool,
    round_weights: bool,
    shared: torch.Tensor | None = None,
    gate: Gate = SILU,
    biases: ExpertBiases | None = None,
    expert_scales: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
    floor: float = 0.0,
    added: float = 0.0,
    factor: float = 1.0,
    first_expert: int = 0,
    choice: Choice | None = None,
    is_late: bool = False,
    config: Config | None = None,
    pdl: bool = False,
) -> torch.Tensor | ExpertSum:
    """Equal kernels.moe.reference.fused_moe, with an Fp8Config or HopperFp8Config that of round_to_fp8.

    All tensors have a dense last dimension; gate_up, down are contiguous.
    """
    num_experts, num_here = logits.shape[1] - (shared is not None), gate_up.shape[0]
    num_pairs = x.shape[0] * top_k
    shared_gate = None if shared is None else logits[:, -1]
    up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    if config is None:
        config = choose(x, gate_up, down, top_k=top_k, num_experts=num_experts, gate=gate)
    is_softmax = given is None and choice is None and expert_scales is None
    if isinstance(config, FewConfig) and config.chooses and is_softmax and num_here == num_experts:
        dtype = x.dtype if round_weights else torch.float32
        choosing = gluon_few.LateRouting(logits, num_experts, top_k, renormalize, dtype, floor, added, factor)
        return _multiply_few(x, gate_up, down, choosing, config, gate, biases, shared, shared_gate, pdl=pdl)
    options: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "renormalize": renormalize,
        "given": given,
        "floor": floor,
        "added": added,
        "factor": factor,
        "weights_dtype": x.dtype if round_weights else torch.float32,
        "expert_scales": expert_scales,
        "choice": choice,
        "here": range(first_expert, first_expert + num_here),
        "pdl": pdl,
    }
    routing, tiles = _route(logits, config, options)
    if isinstance(config, PairsConfig):
        inner = pairs_gate_up(x, gate_up, routing, config.up, gate=gate, bias=up_bias, pdl=pdl)
        return pairs_down(
            inner, down, routing, config.down, bias=down_bias, shared=shared, shared_gate=shared_gate, pdl=pdl
        )  # fmt: skip
    if isinstance(config, PlanesPairsConfig):
        assert isinstance(gate_up, PlanesMatrix)
        assert isinstance(down, PlanesMatrix)
        inner = planes_pairs_up(x, gate_up, routing, config.up, gate=gate, bias=up_bias, pdl=pdl)
        return planes_pairs_down(
            inner, down, routing, config.down, bias=down_bias, shared=shared, shared_gate=shared_gate, pdl=pdl
        )  # fmt: skip
    if isinstance(config, FewConfig) and config.block_m == 1:
        return _multiply_few(x, gate_up, down, routing, config, gate, biases, shared, shared_gate, pdl=pdl)
    outputs = multiply(
        x, gate_up, down, tiles or routing, config,
        num_pairs=num_pairs, gate=gate, up_bias=up_bias, down_bias=down_bias, pdl=pdl,
    )  # fmt: skip
    late = ExpertSum(outputs, routing.weights, routing.experts, routing.has_absent, shared, shared_gate)
    return late if is_late else sum_experts(late, pdl=pdl)


def _route(logits: torch.Tensor, config: Config, options: Mapping[str, Any]) -> tuple[Routing, RowTiles | None]:
    """Choose the experts and lay out their pairs; None: the products of a config take each pair by itself.

    options: of kernels.moe.triton_route.route.
    """
    if isinstance(config, PairsConfig | PlanesPairsConfig):
        return route(logits, chunk_tokens=None, **options), None
    if isinstance(config, FewConfig):
        chunk_tokens = None if config.block_m == 1 else CHUNK_TOKENS
    else:
        chunk_tokens = config.chunk_tokens
    if chunk_tokens is None:
        return route(logits, chunk_tokens=None, **options), None
    num_experts, top_k, pdl = options["num_experts"], options["top_k"], options["pdl"]
    has_positions = isinstance(config, HopperFp8Config)
    if not has_positions and routes_once(num_tokens=logits.shape[0], top_k=top_k, num_experts=num_experts):
        return route_few(logits, block_m=config.block_m, **options)
    routing = route(logits, chunk_tokens=chunk_tokens, **options)
    num_here = len(options["here"])
    return routing, lay_out(routing, num_experts=num_here, block_m=config.block_m, has_positions=has_positions, pdl=pdl)


def _multiply_few(
    x: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    routing: Routing | LateRouting,
    config: FewConfig,
    gate: Gate,
    biases: ExpertBiases | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    *,
    pdl: bool,
) -> torch.Tensor:
    """Return both products and the sum over the experts, each pair by itself: [T, H]."""
    assert isinstance(gate_up, PlanesMatrix)
    assert isinstance(down, PlanesMatrix)
    assert gluon_few.takes(x, gate_up, down, gate)
    top_k = routing.top_k if isinstance(routing, gluon_few.LateRouting) else routing.experts.shape[1]
    up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    inner = gluon_few.few_product(
        x, gate_up, routing, config.up, block_m=1, num_pairs=x.shape[0] * top_k, gate=gate, bias=up_bias, pdl=pdl
    )  # fmt: skip
    return gluon_few.few_sum(
        inner, down, routing, config.down, bias=down_bias, shared=shared, shared_gate=shared_gate, pdl=pdl
    )  # fmt: skip


def multiply(
    x: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    tiles: RowTiles | Routing,
    config: GroupedConfig | PlanesConfig | FewConfig | Fp8Config | HopperFp8Config | HopperPlanesConfig,
    *,
    num_pairs: int,
    gate: Gate,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    """Return both products of each pair, [num_pairs, H]. The rows of pairs that are in no tile are undefined."""
    if isinstance(config, GroupedConfig):
        assert isinstance(tiles, RowTiles)
        product = functools.partial(grouped_gemm, num_pairs=num_pairs, swaps=config.swaps, pdl=pdl)
        inner = product(x, gate_up, tiles, config.up, gate=gate, bias=up_bias)
        return product(inner, down, tiles, config.down, gate=None, bias=down_bias)
    assert isinstance(gate_up, PlanesMatrix)
    assert isinstance(down, PlanesMatrix)
    if isinstance(config, PlanesConfig):
        sizes = {"block_m": config.block_m, "num_pairs": num_pairs}
        inner = planes_gemm(x, gate_up, tiles, config.up, gate=gate, bias=up_bias, pdl=pdl, **sizes)
        return planes_gemm(inner, down, tiles, config.down, gate=None, bias=down_bias, pdl=pdl, **sizes)
    assert isinstance(tiles, RowTiles)
    if isinstance(config, FewConfig):
        assert gluon_few.takes(x, gate_up, down, gate)
        product = functools.partial(
            gluon_few.few_product, routed=tiles, block_m=config.block_m, num_pairs=num_pairs, pdl=pdl
        )  # fmt: skip
        inner = product(x, gate_up, tile=config.up, gate=gate, bias=up_bias)
        return product(inner, down, tile=config.down, gate=None, bias=down_bias)
    if isinstance(config, HopperFp8Config):
        assert gluon_fp8.takes(x, gate_up, down, gate)
        return gluon_fp8.multiply(x, gate_up, down, tiles, config, biases=(up_bias, down_bias), pdl=pdl)
    if isinstance(config, HopperPlanesConfig):
        assert gluon_planes.takes(x, gate_up, down, gate)
        return gluon_planes.multiply(
            x, gate_up, down, tiles, config, num_pairs=num_pairs, gate=gate, biases=(up_bias, down_bias), pdl=pdl
        )  # fmt: skip
    rounded = fp8_up(
        quantize_planes(x, pdl=pdl), gate_up, tiles, config.up,
        num_pairs=num_pairs, gate=gate, dtype=x.dtype, bias=up_bias, pdl=pdl,
    )  # fmt: skip
    return fp8_down(rounded, down, tiles, config.down, dtype=x.dtype, bias=down_bias, pdl=pdl)


def choose(
    x: torch.Tensor, gate_up: ExpertMatrix, down: ExpertMatrix, *, top_k: int, num_experts: int, gate: Gate = SILU
) -> Config:
    """Return the config for experts of which a part may be here: an expert has as many pairs on each rank."""
    num_tokens, intermediate_size = x.shape[0], down.shape[2]
    sizes = {"num_tokens": num_tokens, "top_k": top_k, "num_experts": num_experts}
    if isinstance(gate_up, PlanesMatrix):
        assert isinstance(down, PlanesMatrix)
        can_round = x.dtype == torch.bfloat16
        has_kernels = HAS_GLUON and x.dtype in (torch.bfloat16, torch.float16) and is_hopper(x.device)
        if can_round and gate_up.kind == "fp8" and has_kernels and gluon_fp8.takes(x, gate_up, down, gate):
            hopper_fp8 = hopper_fp8_config(num_pairs=num_tokens * top_k, num_experts=num_experts)
            if hopper_fp8 is not None:
                return hopper_fp8
        if has_kernels and gluon_planes.takes(x, gate_up, down, gate):
            hopper = hopper_planes_config(gate_up.kind, num_pairs=num_tokens * top_k, num_experts=num_experts)
            if hopper is not None:
                return hopper
        if has_kernels and gluon_few.takes(x, gate_up, down, gate):
            num_here, hidden_size, _ = down.shape
            few = few_config(
                gate_up.kind, num_here=num_here, hidden_size=hidden_size, intermediate_size=gate_up.shape[1] // 2,
                expert_bytes=gate_up.expert_bytes + down.expert_bytes, **sizes,
            )  # fmt: skip
            if few is not None:
                return few
        return planes_config(gate_up.kind, can_round=can_round, **sizes)
    if uses_pairs(**sizes):
        return pairs_config(intermediate_size=intermediate_size)
    config = grouped_config(num_pairs=num_tokens * top_k, num_experts=num_experts, itemsize=x.itemsize)
    config = config if isinstance(down, torch.Tensor) else for_packed(config)
    return fitting(config, shared_bytes=shared_bytes_of(x.device)) if x.is_cuda else config
