"""The rehearsal before serving meets every configuration of the kernels that depend on a step's number of tokens."""

import pytest

from engine import offline
from kernels.linear import dense
from kernels.linear.planes_configs import MAX_ROWS
from kernels.linear.planes_configs import planes_config as float4_config
from kernels.linear.scaled8_configs import MAX_FEW_ROWS, MAX_SMALL_TILES, scaled8_config
from kernels.moe.configs import (
    MOST_CHUNKS,
    grouped_config,
    hopper_fp8_config,
    hopper_planes_config,
    planes_config,
    size_of_chunk,
)

MOST_TOKENS = 8192
ROWS = [size for size in offline._batch_sizes() if size <= 64]
REHEARSED = {*ROWS, *offline._PROMPT_LENS}


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "int4", "nvfp4", "nf4"])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(32, 4), (64, 6), (128, 4), (128, 8), (160, 8), (256, 8), (384, 8), (512, 10)]
)
def test_experts(kind: str, num_experts: int, top_k: int) -> None:
    def planes(num_tokens: int) -> object:
        return planes_config(kind, num_tokens=num_tokens, can_round=True, top_k=top_k, num_experts=num_experts)

    def served(num_tokens: int) -> object:
        pairs = {"num_pairs": num_tokens * top_k, "num_experts": num_experts}
        hopper = hopper_fp8_config(**pairs) if kind == "fp8" else hopper_planes_config(kind, **pairs)
        return hopper or planes(num_tokens)

    for config in (served, planes):  # the kernels for Hopper do not take all experts
        met = {config(num_tokens) for num_tokens in {*REHEARSED, *offline._EXPERTS_PROMPT_LENS}}
        assert [size for size in range(1, MOST_TOKENS + 1) if config(size) not in met] == []


@pytest.mark.parametrize("num_experts", [8, 64, 128, 256, 512])
def test_routing(num_experts: int) -> None:
    """Chunks, and whether a launch of its own sums their counts, as the layout of 16-bit experts has them."""

    def kind(num_tokens: int) -> tuple[int, bool]:
        config = grouped_config(num_pairs=8 * num_tokens, num_experts=num_experts, itemsize=2)
        tokens = size_of_chunk(num_tokens, num_experts, config.chunk_tokens)
        return tokens, -(-num_tokens // tokens) > MOST_CHUNKS

    met = {kind(num_tokens) for num_tokens in {*REHEARSED, *offline._EXPERTS_PROMPT_LENS}}
    assert [size for size in range(1, MOST_TOKENS + 1) if kind(size) not in met] == []


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("has_tma", [False, True])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1024, 2048)])
def test_products_of_8_bits(n: int, k: int, has_tma: bool, by_block: bool) -> None:
    def config(num_rows: int) -> object:
        return scaled8_config(num_rows=num_rows, n=n, k=k, block_k=128, has_tma=has_tma, by_block=by_block)

    met = {config(num_rows) for num_rows in REHEARSED}
    assert [size for size in range(1, MOST_TOKENS + 1) if config(size) not in met] == []


@pytest.mark.parametrize("k", [2880, 4096, 14336])
def test_products_of_4_bit_floats(k: int) -> None:
    """The splits of K, which are compiled in, depend on the tiles of rows and of outputs."""
    for n in range(128, 32768, 128):
        configs = {num_rows: float4_config(num_rows=num_rows, n=n, k=k) for num_rows in range(1, MAX_ROWS + 2)}
        met = {configs[min(num_rows, MAX_ROWS + 1)] for num_rows in REHEARSED}
        assert [num_rows for num_rows, config in configs.items() if config not in met] == [], n


@pytest.mark.parametrize(
    ("size", "k"),
    [(3072, 1024), (6144, 2048), (9728, 2560), (14336, 4096), (18944, 3584), (25600, 5120), (7168, 4096), (3584, 8192)],
)
def test_products_with_their_gate(size: int, k: int) -> None:
    assert any(dense.pays(num_rows=num_rows, n=2 * size, k=k, num_sms=132) for num_rows in REHEARSED)


def test_products_of_blocks_for_hopper() -> None:
    """Tiles of 64 rows have a kernel, and so has what more rows choose."""
    assert any(MAX_FEW_ROWS < size <= MAX_SMALL_TILES for size in REHEARSED)
    assert any(size > MAX_SMALL_TILES for size in REHEARSED)
