"""The cuts that benchmarks/expert_layers.py compares: what is served, and candidates for kernels/moe/configs.py."""

from __future__ import annotations

import dataclasses

from benchmarks.moe_problem import MoeShape, MoeWeights
from kernels.moe.configs import (
    HOPPER_PLANES_KINDS,
    Fp8Config,
    Fp8Tile,
    HopperFp8Config,
    HopperPlanesConfig,
    PlanesConfig,
    PlanesPairsConfig,
    PlanesPairTile,
    PlanesTile,
    registers_config,
    uses_pairs,
)
from kernels.moe.planes import PlanesMatrix
from kernels.moe.triton import Config

# (rows of a tile, columns, warps, stages) of both products
_FP8_TILES = (
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 256, 8, 3),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
)
# (outputs, warps, groups at once, splits of the inputs) of the first and of the second product
_PAIR_TILES = (
    ((16, 2, 4, 1), (16, 4, 2, 1)),
    ((16, 2, 2, 1), (8, 4, 2, 1)),
    ((8, 4, 2, 4), (8, 8, 2, 2)),
    ((8, 4, 2, 4), (8, 8, 3, 2)),
    ((16, 8, 2, 4), (8, 8, 1, 2)),
    ((16, 4, 4, 2), (8, 8, 3, 2)),
    ((8, 4, 4, 4), (8, 8, 2, 2)),
    ((8, 8, 2, 8), (8, 8, 2, 2)),
    ((8, 4, 3, 4), (4, 8, 3, 4)),
    ((4, 4, 2, 8), (4, 4, 3, 2)),
    ((8, 2, 4, 2), (8, 8, 2, 2)),
    ((8, 4, 2, 4), (4, 4, 2, 2)),
    ((8, 4, 2, 4), (4, 8, 2, 4)),
)
# (outputs, warps, stages) of one product in registers with few tokens; the other stays as it is
_REGISTER_TILES = ((64, 4, 2), (64, 4, 4), (64, 4, 5), (64, 2, 4), (64, 8, 4), (32, 4, 4), (128, 4, 2))
_MOST_REGISTERS_TOKENS = 64
# (rows of a tile, stages, tiles of rows side by side) of the kernels for Hopper with 4-bit weights
_HOPPER_PLANES_CUTS = ((64, 4, 8), (128, 3, 8), (128, 4, 8))
# (stages, tiles of rows side by side) of the kernels for Hopper in FP8
_HOPPER_FP8_CUTS = ((5, 8), (6, 8), (6, 16))
_MOST_PAIRS_TOKENS = 16  # more choose so many experts twice that reading them anew for each pair cannot pay


def cuts_of(weights: MoeWeights, shape: MoeShape, num_tokens: int) -> dict[str, Config | None]:
    """Return the cuts for so many tokens by name; "served" is None."""
    cuts: dict[str, Config | None] = {"served": None}
    num_pairs, num_experts = num_tokens * shape.top_k, shape.num_experts
    if not isinstance(weights.gate_up, PlanesMatrix):
        return cuts
    is_few = uses_pairs(num_tokens=num_tokens, top_k=shape.top_k, num_experts=num_experts)
    kind = weights.gate_up.kind
    cuts["registers"] = registers_config(kind, num_pairs=num_pairs, num_experts=num_experts, is_few=is_few)
    if num_tokens <= _MOST_PAIRS_TOKENS:
        for up, down in _PAIR_TILES:
            name = f"pairs {up[0]} and {down[0]}, {up[1]} and {down[1]} warps, {up[2]} and {down[2]} at once"
            if max(up[3], down[3]) > 1:
                name += f", {up[3]} and {down[3]} splits"
            cuts[name] = PlanesPairsConfig(PlanesPairTile(*up), PlanesPairTile(*down))
    base = cuts["registers"]
    if isinstance(base, PlanesConfig) and num_tokens <= _MOST_REGISTERS_TOKENS and kind != "fp8":
        for block_n, num_warps, num_stages in _REGISTER_TILES:
            few = PlanesTile(block_n, num_warps, num_stages)
            name = f"{base.block_m}x{block_n}, {num_warps} warps, {num_stages} stages"
            cuts[f"up {name}"] = dataclasses.replace(base, up=few)
            cuts[f"down {name}"] = dataclasses.replace(base, down=few)
    if isinstance(base, PlanesConfig) and base.chunk_tokens is not None and num_tokens <= _MOST_REGISTERS_TOKENS:
        for chunk_tokens in (1, 2, 4, 8):
            cuts[f"chunks of {chunk_tokens}"] = dataclasses.replace(base, chunk_tokens=chunk_tokens)
    if kind == "fp8" and num_pairs >= 16 * num_experts:
        for block_m, width, num_warps, num_stages in _FP8_TILES:
            if block_m > 4 * num_pairs / num_experts:
                continue
            tile = Fp8Tile(width, num_warps, num_stages)
            cuts[f"fp8 {block_m}x{width}, {num_warps} warps, {num_stages} stages"] = Fp8Config(block_m, tile, tile)
        for num_stages, group_m in _HOPPER_FP8_CUTS:
            cuts[f"hopper {num_stages} stages, groups of {group_m}"] = HopperFp8Config(128, num_stages, group_m)
    if kind in HOPPER_PLANES_KINDS and not is_few:
        cuts |= _hopper_planes(num_pairs / num_experts)
    return cuts


def _hopper_planes(pairs_per_expert: float) -> dict[str, Config | None]:
    """Return the cuts whose tiles are not much taller, and not much lower, than an expert has pairs."""
    return {
        f"hopper {block_m} rows, {num_stages} stages, groups of {group_m}": HopperPlanesConfig(
            block_m, num_stages, group_m
        )
        for block_m, num_stages, group_m in _HOPPER_PLANES_CUTS
        if pairs_per_expert / 8 <= block_m <= max(32, 4 * pairs_per_expert)
    }
