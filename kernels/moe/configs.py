"""Tile sizes of the mixture-of-experts kernels, chosen by the average number of tokens per expert.

The best of `benchmarks/moe.py --sweep` on an H100 (Qwen3-30B-A3B, Mixtral 8x7B): many loads in flight to stream
weights if an expert has few tokens, the largest tiles that tensor cores support if it has many. Those of planes: the
best of `benchmarks/packed_experts.py` on an H200, and of `benchmarks/expert_layers.py` on an H100.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

# Up to so many tokens, each (token, expert) pair may be computed as its own matrix-vector product
PAIRS_MAX_TOKENS = 4
# Tokens from which chunks of the routing are smaller, so that a device has many of them at once
_MANY_TOKENS = 1024
_MANY_CHUNK_TOKENS = 16
MOST_CHUNKS = 32  # that every chunk of the layout sums for itself


@dataclass(frozen=True)
class Tile:
    """Tile sizes of one grouped GEMM along its output features and its depth."""

    block_n: int  # output features; gate and up have so many each
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tiles of rows that run side by side over the same tile of weights


@dataclass(frozen=True)
class GroupedConfig:
    """Settings of both grouped GEMMs of a step. They share block_m, since rows are laid out once."""

    block_m: int  # (token, expert) pairs of one expert
    up: Tile
    down: Tile
    swaps: bool = False  # weights are the wide side of the product: for fewer rows than tensor cores need
    # tokens that one program routes; more in large steps, since each program reads the counts of all chunks
    chunk_tokens: int = 16


@dataclass(frozen=True)
class PairTile:
    """Tile sizes of a matrix-vector product."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PairsConfig:
    """Settings of both products of the path for few tokens."""

    up: PairTile
    down: PairTile


# (largest average of pairs per expert, config). Counts vary: a tile has room for more pairs than the average
_GROUPED: tuple[tuple[float, GroupedConfig], ...] = (
    (8, GroupedConfig(16, Tile(64, 128, 4, 5, group_m=1), Tile(128, 128, 4, 5, group_m=1), swaps=True)),
    (24, GroupedConfig(32, Tile(64, 128, 4, 5, group_m=1), Tile(256, 128, 4, 3, group_m=1), swaps=True)),
    (128, GroupedConfig(64, Tile(128, 64, 4, 4), Tile(256, 64, 4, 5), chunk_tokens=64)),
    (float("inf"), GroupedConfig(128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4), chunk_tokens=64)),
)
# fp32 is used in tests: small tiles, exact products
_GROUPED_FP32 = GroupedConfig(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))


def uses_pairs(*, num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Return True for steps so small that few experts are chosen twice: grouping pairs then saves nothing."""
    return num_tokens == 1 or (num_tokens <= PAIRS_MAX_TOKENS and 4 * num_tokens * top_k <= num_experts)


def size_of_chunk(num_tokens: int, num_experts: int, chunk_tokens: int) -> int:
    """Return the tokens of a chunk of the routing: fewer in steps of many, and where there are many experts."""
    if num_tokens >= _MANY_TOKENS:
        chunk_tokens = min(chunk_tokens, _MANY_CHUNK_TOKENS)
    return max(1, chunk_tokens * 128 // max(1 << (num_experts - 1).bit_length(), 128))


def grouped_config(*, num_pairs: int, num_experts: int, itemsize: int) -> GroupedConfig:
    """Return the config for num_pairs (token, expert) pairs. itemsize: bytes of one value."""
    if itemsize == 4:
        return _GROUPED_FP32
    return next(config for bound, config in _GROUPED if num_pairs <= bound * num_experts)


def fitting(config: GroupedConfig, *, shared_bytes: int) -> GroupedConfig:
    """Reduce the stages of a config for 16-bit values until it fits a GPU's shared memory; an H100 needs no reduction.

    shared_bytes: the limit of a block. Before Hopper, tiles in flight are one fewer than stages.
    """

    def fit(tile: Tile, *, num_matrices: int) -> Tile:
        tile_bytes = 2 * (config.block_m + num_matrices * tile.block_n) * tile.block_k
        return dataclasses.replace(tile, num_stages=min(tile.num_stages, shared_bytes // tile_bytes + 1))

    return dataclasses.replace(config, up=fit(config.up, num_matrices=2), down=fit(config.down, num_matrices=1))


def for_packed(config: GroupedConfig) -> GroupedConfig:
    """Reduce the tiles of weights for packed experts, whose values are in registers: larger ones spill.

    Not measured: from the registers that the compiler reports.
    """

    def reduce(tile: Tile) -> Tile:
        # 64 values a thread, of one matrix
        return dataclasses.replace(tile, block_n=max(min(tile.block_n, 64 * 32 * tile.num_warps // tile.block_k), 16))

    return dataclasses.replace(config, up=reduce(config.up), down=reduce(config.down))


def grouped_configs() -> list[GroupedConfig]:
    """Return every config for 16-bit values."""
    return [config for _, config in _GROUPED]


def pairs_config(*, intermediate_size: int) -> PairsConfig:
    """Return the config for few tokens. intermediate_size: of this rank's part of an expert."""
    if intermediate_size >= 2048:
        deep = PairTile(block_n=4, block_k=1024, num_warps=8, num_stages=3)
        return PairsConfig(up=deep, down=deep)
    if intermediate_size <= 512:
        return PairsConfig(up=PairTile(16, 128, 2, 5), down=PairTile(4, 512, 2, 1))
    return PairsConfig(up=PairTile(4, 512, 4, 1), down=PairTile(4, 1024, 4, 1))


@dataclass(frozen=True)
class PlanesTile:
    """Tile sizes of one product along its output features; gate and up have so many each."""

    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 1  # tiles of rows that run side by side over the same tile of weights


@dataclass(frozen=True)
class PlanesConfig:
    """Settings of both products of a step."""

    block_m: int  # (token, expert) pairs of one expert
    up: PlanesTile
    down: PlanesTile
    chunk_tokens: int | None = 16  # as of GroupedConfig; None: each pair is a tile of its own


# (largest average of pairs per expert, config), of all kinds but those in _PLANES_OF. The best of those tried for
# gpt-oss-20b and Qwen3-30B-A3B
_PLANES: tuple[tuple[float, PlanesConfig], ...] = (
    (8, PlanesConfig(16, PlanesTile(64, 4, 3), PlanesTile(128, 4, 3))),
    (48, PlanesConfig(32, PlanesTile(128, 4, 3), PlanesTile(128, 8, 3))),
    (160, PlanesConfig(64, PlanesTile(64, 4, 3, 8), PlanesTile(128, 4, 3, 8), chunk_tokens=64)),
)
_PLANES_16, _PLANES_32, _PLANES_64 = (config for _, config in _PLANES)
# A layer of gpt-oss takes 172 us instead of 179 with 64 tokens
_PLANES_16_MXFP4 = PlanesConfig(16, PlanesTile(64, 4, 3), PlanesTile(64, 4, 4))
# The best of those tried for Qwen3-30B-A3B. A layer of 4,096 tokens in NVFP4 takes 918 us with 64 rows and 1,052 with
# 128; the sums of 64 inputs that tables have take registers beside the values, so that 128 rows spill
_PLANES_TABLES = ((8, _PLANES_16), (48, _PLANES_32), (float("inf"), _PLANES_64))
_PLANES_OF: dict[str, tuple[tuple[float, PlanesConfig], ...]] = {
    "mxfp4": ((8, _PLANES_16_MXFP4), *_PLANES[1:]),
    "nvfp4": ((16, _PLANES_16), (48, _PLANES_32), (float("inf"), _PLANES_64)),
    "nf4": _PLANES_TABLES,
    "fp4": _PLANES_TABLES,
}
_PLANES_MANY_IN_SUMS = PlanesConfig(128, PlanesTile(128, 8, 3, 8), PlanesTile(128, 8, 3, 8), chunk_tokens=64)
_PLANES_MANY = {
    "mxfp4": PlanesConfig(128, PlanesTile(64, 4, 3, 8), PlanesTile(128, 8, 2, 8), chunk_tokens=64),
    "fp8": _PLANES_MANY_IN_SUMS,
    "int4": _PLANES_MANY_IN_SUMS,  # of no sweep: its groups are summed apart as those of fp8
}
_PLANES_FEW = PlanesConfig(16, PlanesTile(64, 4, 3), PlanesTile(64, 4, 3), chunk_tokens=None)
# Up to so many tokens of MXFP4 have more loads in flight: a layer of gpt-oss takes 108 us instead of 118 with 2 tokens
# and 136 instead of 148 with 4. One of Qwen3-30B-A3B in FP8 takes 77 instead of 73, and 110 instead of 95. More tokens
# were not tried
_PLANES_DEEP_TOKENS = 4
_PLANES_DEEP = PlanesTile(64, 4, 6)


# With more programs that route, a layer of Qwen3-30B-A3B in AWQ takes 66 us instead of 72 with 8 tokens, 131 instead of
# 137 with 64. Not with more experts, of whose counts each program would read too many
_FEW_CHUNK_TOKENS = 4


def registers_config(kind: str, *, num_pairs: int, num_experts: int, is_few: bool) -> PlanesConfig:
    """Return the config of products that unpack to registers. is_few: no two pairs share a tile."""
    if is_few:
        return _PLANES_FEW
    configs = _PLANES_OF.get(kind, _PLANES)
    found = next((config for bound, config in configs if num_pairs <= bound * num_experts), None)
    if found is not None and found.block_m == 16 and num_experts <= 128:
        return dataclasses.replace(found, chunk_tokens=_FEW_CHUNK_TOKENS)
    return found or _PLANES_MANY[kind]


@dataclass(frozen=True)
class PlanesPairTile:
    """Tile sizes of a matrix-vector product of experts in planes."""

    block_n: int  # at least 8 a warp, or its threads load less than 16 bytes at once
    num_warps: int
    unroll: int  # groups whose loads are in flight at once, of each split
    splits: int = 1  # of the inputs, within a program


@dataclass(frozen=True)
class PlanesPairsConfig:
    """Settings of both matrix-vector products of a step with experts in planes."""

    up: PlanesPairTile
    down: PlanesPairTile  # of which each program has block_n outputs of all of a token's experts


# (outputs, warps, groups at once, splits of the inputs): the fastest of thirteen on an H100. One token of gpt-oss takes
# 37 us a layer, in registers 49; with 2 tokens it takes 65, in registers with more loads in flight 60
_PLANES_PAIRS = PlanesPairsConfig(PlanesPairTile(8, 4, 3, splits=4), PlanesPairTile(4, 8, 3, splits=4))
# A layer of Qwen3-30B-A3B takes 16.4 us for one token in 4-bit integers (in registers 24.5), 27.1 for two (32.0), in
# NVFP4 17.4 (24.9) and 29.3 (32.3), for two in FP8 37.5 (41.2)
_PLANES_PAIRS_SPLIT = PlanesPairsConfig(PlanesPairTile(8, 4, 2, splits=4), PlanesPairTile(8, 8, 3, splits=2))
# In NF4 20.0 us for one token (28.8) and 35.1 for two (41.2), for one in FP8 22.7 (29.4)
_PLANES_PAIRS_DEEP = PlanesPairsConfig(PlanesPairTile(8, 2, 4, splits=2), PlanesPairTile(8, 8, 2, splits=2))
_PAIRS_OF = {  # by kind and tokens, if each pair may be computed by itself
    ("mxfp4", 1): _PLANES_PAIRS,
    **{(kind, tokens): _PLANES_PAIRS_SPLIT for kind in ("int4", "nvfp4") for tokens in (1, 2)},
    **{(kind, tokens): _PLANES_PAIRS_DEEP for kind in ("nf4", "fp4") for tokens in (1, 2)},
    ("fp8", 1): _PLANES_PAIRS_DEEP,
    ("fp8", 2): _PLANES_PAIRS_SPLIT,
}


@dataclass(frozen=True)
class Fp8Tile:
    """Tile sizes of one product of activations in FP8."""

    width: int  # columns of the product: output features, of gate and up both; 128 or 256
    num_warps: int
    num_stages: int
    group_m: int = 8  # tiles of rows that run side by side over the same tile of weights


@dataclass(frozen=True)
class Fp8Config:
    """Settings of both products of a step whose activations are rounded to FP8."""

    block_m: int  # (token, expert) pairs of one expert
    up: Fp8Tile
    down: Fp8Tile
    chunk_tokens: int = 64  # as of GroupedConfig


@dataclass(frozen=True)
class HopperFp8Config:
    """Settings of both products of a step in FP8 by the kernels for Hopper."""

    block_m: int = 128  # (token, expert) pairs of one expert
    num_stages: int = 6  # groups of inputs in shared memory
    group_m: int = 8  # tiles of rows that run side by side over the same tile of weights
    chunk_tokens: int = 64  # as of GroupedConfig


@dataclass(frozen=True)
class HopperPlanesConfig:
    """Settings of both products of a step with experts of 4 bits by the kernels for Hopper."""

    block_m: int  # (token, expert) pairs of one expert; 64 or 128
    num_stages: int  # groups of inputs in shared memory
    group_m: int = 8  # tiles of rows that run side by side over the same tile of weights
    chunk_tokens: int = 64  # as of GroupedConfig


HOPPER_PLANES_KINDS = ("mxfp4", "nvfp4", "int4", "nf4", "fp4")
# Pairs per expert, in the mean, from which the kernels for Hopper multiply experts of 4 bits. gpt-oss in MXFP4 takes
# 254 us instead of 223 with 24, 258 instead of 293 with 32; Qwen3-30B-A3B in AWQ 255 instead of 233 with 32, and 510
# instead of 623 with 128
_HOPPER_PLANES_LEAST = {"mxfp4": 32}
_HOPPER_PLANES_LEAST_OTHERS = 48
# (largest average of pairs per expert, config). 64 rows take 280 us and 128 rows 381 with 48 pairs per expert of
# gpt-oss, both 388 with 64, and with 128 of Qwen3-30B-A3B 555 and 510. Four stages of 128 rows lose with many tokens
_HOPPER_PLANES = ((64, HopperPlanesConfig(64, 4)), (float("inf"), HopperPlanesConfig(128, 3)))


def hopper_planes_config(kind: str, *, num_pairs: int, num_experts: int) -> HopperPlanesConfig | None:
    """Return the config of the kernels for Hopper; None: they do not serve so many pairs, or that kind."""
    least = _HOPPER_PLANES_LEAST.get(kind, _HOPPER_PLANES_LEAST_OTHERS)
    if kind not in HOPPER_PLANES_KINDS or num_pairs < least * num_experts:
        return None
    return next(config for bound, config in _HOPPER_PLANES if num_pairs <= bound * num_experts)


def hopper_planes_configs() -> list[HopperPlanesConfig]:
    """Return every config that is served."""
    return [config for _, config in _HOPPER_PLANES]


# Pairs per expert, in the mean, from which activations are rounded to FP8. Fewer are bound by reading the weights,
# which products in bfloat16 read in as many bytes. A layer of Qwen3-30B-A3B on an H100 takes 304 us in registers and
# 329 in FP8 with 32 pairs per expert, 528 and 391 with 64, 2,488 and 1,398 with 512
FP8_LEAST_PAIRS = 64
# (largest average of pairs per expert, config). The best of five for that layer: at 64 pairs per expert the wider tile
# takes 391 us and the other 423, at 128 both 556, at 256 926 and 842. 128 rows are slower everywhere
_FP8: tuple[tuple[float, Fp8Config], ...] = (
    (128, Fp8Config(64, Fp8Tile(256, 8, 3), Fp8Tile(256, 8, 3))),
    (float("inf"), Fp8Config(64, Fp8Tile(128, 4, 4), Fp8Tile(128, 4, 4))),
)


def fp8_config(*, num_pairs: int, num_experts: int) -> Fp8Config | None:
    """Return the config for num_pairs (token, expert) pairs; None: activations are not rounded."""
    if num_pairs < FP8_LEAST_PAIRS * num_experts:
        return None
    return next(config for bound, config in _FP8 if num_pairs <= bound * num_experts)


# Pairs per expert, in the mean, from which the kernels for Hopper compute it. That layer takes 334 us instead of 386
# with 64 pairs per expert, 590 instead of 859 with 256, 1,020 instead of 1,421 with 512; 309 with 32, 305 in registers.
# Five stages, and groups of 16 tiles, are within 2.5 %
HOPPER_FP8_LEAST_PAIRS = 64
HOPPER_FP8 = HopperFp8Config()


def hopper_fp8_config(*, num_pairs: int, num_experts: int) -> HopperFp8Config | None:
    """Return the config of the kernels for Hopper; None: they do not serve so many pairs."""
    return HOPPER_FP8 if num_pairs >= HOPPER_FP8_LEAST_PAIRS * num_experts else None


def fp8_configs() -> list[Fp8Config]:
    """Return every config that is served."""
    return [config for _, config in _FP8]


def planes_config(
    kind: str, *, num_tokens: int, top_k: int, num_experts: int, can_round: bool
) -> PlanesPairsConfig | PlanesConfig | Fp8Config:
    """Return the config that serves so many tokens with experts in planes.

    can_round: activations may be rounded to FP8, for experts of FP8.
    """
    sizes = {"num_pairs": num_tokens * top_k, "num_experts": num_experts}
    is_few = uses_pairs(num_tokens=num_tokens, top_k=top_k, num_experts=num_experts)
    if is_few and (kind, num_tokens) in _PAIRS_OF:
        return _PAIRS_OF[kind, num_tokens]
    rounded = fp8_config(**sizes) if kind == "fp8" and can_round else None
    if rounded is not None:
        return rounded
    config = registers_config(kind, is_few=is_few, **sizes)
    if kind == "mxfp4" and num_tokens <= _PLANES_DEEP_TOKENS:
        return dataclasses.replace(config, up=_PLANES_DEEP, down=_PLANES_DEEP)
    return config


def planes_configs() -> list[PlanesConfig]:
    """Return every config that is served."""
    some = [config for configs in (_PLANES, *_PLANES_OF.values()) for _, config in configs]
    deep = [dataclasses.replace(config, up=_PLANES_DEEP, down=_PLANES_DEEP) for config in (_PLANES_FEW, _PLANES_16)]
    return [*dict.fromkeys((*deep, _PLANES_FEW, *some, *_PLANES_MANY.values()))]
