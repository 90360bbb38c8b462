"""The rehearsal before serving meets every configuration of the kernels that depend on a step's number of tokens."""

from pathlib import Path

import pytest

from engine import offline
from engine.core.step import StepPlan
from engine.device.input_batch import RowColumns
from engine.interface.config import EngineConfig
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
from tests.support.tiny_llama import save_tiny_llama

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


@pytest.mark.parametrize("num_heads", [8, 16, 32, 48, 64])
def test_scans_of_prompts_for_hopper(num_heads: int) -> None:
    """One or two warpgroups, by the prompts of a step, of which there are at most as many as requests at once."""
    scan = pytest.importorskip("kernels.gluon_scan", reason="needs triton 3.6", exc_type=ImportError)

    def consumers(num_rows: int) -> int:
        return scan.choose_consumers(2 * num_heads * num_rows, d_v=128, num_sms=132)

    for max_num_seqs in range(1, 140):
        _, of_prompts = offline._rehearsed_sizes(max_num_seqs)
        met = {consumers(num_rows) for num_rows in of_prompts}
        assert [size for size in range(1, max_num_seqs + 1) if consumers(size) not in met] == [], max_num_seqs


@pytest.mark.parametrize(
    ("max_num_seqs", "of_batches", "of_prompts"),
    [
        (1, [1], [1]),
        (3, [1, 2, 3], [1, 3]),
        (11, [1, 2, 3, 4, 6, 8, 11], [1, 4, 11]),
        (64, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64], [1, 4, 12, 32, 64]),
    ],
)
def test_the_largest_batch_is_rehearsed(max_num_seqs: int, of_batches: list[int], of_prompts: list[int]) -> None:
    assert offline._rehearsed_sizes(max_num_seqs) == (of_batches, of_prompts)


def test_limits_beyond_all_sizes_add_none() -> None:
    assert offline._rehearsed_sizes(16_384)[0] == offline._batch_sizes()


def test_steps_have_all_tokens_of_their_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None are in the prefix cache, and steps of few tokens are those of one prompt where there are no such batches."""
    config = EngineConfig(
        model=str(save_tiny_llama(tmp_path)), device="cpu", max_num_seqs=2, max_num_batched_tokens=2048
    )
    engine = offline.OfflineEngine.load(config)
    longest = engine.engine.scheduler.max_num_tokens - 2
    met: set[tuple[int, int]] = set()
    read = RowColumns.of

    def of(plan: StepPlan) -> RowColumns:
        rows = read(plan)
        met.add((len(rows.req_index), int(rows.num_tokens.sum())))
        return rows

    monkeypatch.setattr(RowColumns, "of", of)
    engine.run_workload()
    assert met >= {(1, size) for size in (*ROWS[2:], *offline._PROMPT_LENS) if size <= longest}
    assert met >= {(2, size // 2 * 2) for size in offline._PROMPT_LENS if size // 2 <= longest}
