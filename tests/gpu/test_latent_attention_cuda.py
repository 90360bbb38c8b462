"""Latent attention on the device against float64: heads, ranks, drafts, prompts in both forms, fp8, graphs, engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from kernels.attention import latent
from kernels.attention.latent import LatentHeads, latent_attention
from kernels.elementwise.reference import UNSCALED, KVScales
from tests.support.checkpoints import make_config
from tests.support.reference import save_checkpoint
from tests.unit.kernels.triton_cases.ragged import as_fp8, make_problem, reference, relative_error

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
WIDTHS = [(512, 64), (256, 64)]  # rank and rope_dim of DeepSeek and of Mistral 4


def _backend():
    from kernels.attention.triton_backend import TritonAttention

    return TritonAttention()


def _problem(query_lens, context_lens, *, num_heads=16, rank=512, rope_dim=64, dtype=torch.bfloat16, **options):
    q, cache, _, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=1,
        head_dim=rank + rope_dim, dtype=dtype, device="cuda", seed=random.randrange(1 << 30),
        **{"block_size": 16} | options,
    )  # fmt: skip
    return q, cache, cache[..., :rank], metadata


def _error(query_lens, context_lens, *, is_mixed=False, rank=512, rope_dim=64, **options):
    """Of the kernels over latents."""
    q, cache, values, metadata = _problem(query_lens, context_lens, rank=rank, rope_dim=rope_dim, **options)
    if is_mixed:
        metadata.num_decodes = None
    scale = (rank + rope_dim) ** -0.5
    torch.full_like(q, float("nan"))  # the allocator hands this memory, still NaN, to the output
    out = _backend().forward(q, cache, values, metadata, scale=scale)
    return relative_error(out, reference(q, cache, values, metadata, scale=scale))


def _ragged(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    query_lens = [1] * draw.randint(1, 9) + [draw.choice([2, 3, 5, 8, 9, 70]) for _ in range(draw.randint(1, 5))] + [1]
    return query_lens, [draw.choice([0, 5, 100, 700, 2500]) for _ in query_lens]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_heads", [4, 8, 16, 20, 32, 40, 64, 96, 128])
def test_every_number_of_heads(num_heads, width):
    rank, rope_dim = width
    shape = {"num_heads": num_heads, "rank": rank, "rope_dim": rope_dim}
    assert _error(*_ragged(num_heads), is_mixed=True, **shape) < TOLERANCE[torch.bfloat16]
    assert _error([1] * 5, [3000, 0, 40, 700, 64], **shape) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [*WIDTHS, (96, 32), (128, 24)])
def test_every_dtype_and_widths_that_are_no_powers_of_two(width, dtype):
    rank, rope_dim = width
    assert _error(*_ragged(7), is_mixed=True, rank=rank, rope_dim=rope_dim, dtype=dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_heads", [16, 20, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_decode_batches_of_every_size(rows, num_heads):
    draw = random.Random(rows)
    lens = [draw.randint(0, 2000) for _ in range(rows)]
    assert _error([1] * rows, lens, num_heads=num_heads) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_heads", [16, 128])
def test_long_rows_among_short_ones(num_heads):
    assert _error([1, 1, 1], [60_000, 0, 17], num_heads=num_heads) < TOLERANCE[torch.bfloat16]
    assert _error([1, 2, 1, 500], [30_000, 20_000, 17, 9_000], num_heads=num_heads, is_mixed=True) < 8e-3


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("masked", [float("nan"), float("inf")])
def test_blocks_of_every_size_and_slots_that_no_query_sees(block_size, masked):
    assert _error(*_ragged(block_size), is_mixed=True, block_size=block_size, masked=masked, padding=64) < 8e-3


def test_pools_of_more_than_2_to_the_31_elements():
    num_blocks = 2**31 // (64 * 576) + 100
    assert _error(*_ragged(14), is_mixed=True, block_size=64, least_blocks=num_blocks) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_heads", [16, 20, 128])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_one_graph_serves_all_lengths(num_heads, is_mixed):
    """The buffers of a captured step are refilled: other lengths, other numbers of rows with tokens."""
    query_lens = [3, 1, 40, 1, 8] if is_mixed else [1] * 6
    q, cache, values, metadata = _problem(query_lens, [2000] * len(query_lens), num_heads=num_heads)
    metadata.max_query_len, metadata.num_decodes = max(query_lens), None if is_mixed else len(query_lens)
    backend = _backend()

    def run() -> torch.Tensor:
        metadata.decode_pieces = None
        backend.prepare(metadata)
        return backend.forward(q, cache, values, metadata, scale=0.04)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for context in (0, 1, 63, 700, 2000):
        metadata.seq_lens.copy_(torch.tensor([n + context for n in query_lens], dtype=torch.int32))
        if context == 63:
            metadata.seq_lens[0] = 0  # a padding row
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(q, cache, values, metadata, scale=0.04)
        assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


def test_the_same_input_gives_the_same_bits():
    q, cache, values, metadata = _problem([1] * 20, [random.Random(3).randint(0, 5000) for _ in range(20)])
    backend = _backend()
    first = backend.forward(q, cache, values, metadata, scale=0.04)
    assert all(torch.equal(first, backend.forward(q, cache, values, metadata, scale=0.04)) for _ in range(20))


def _whole_error(
    query_lens, context_lens, *, num_heads=16, nope_dim=128, v_head_dim=128, dtype=torch.bfloat16, knows_lens=True,
    k_scale=None,
):  # fmt: skip
    """Of whole latent attention."""
    q, cache, _, metadata = _problem(query_lens, context_lens, num_heads=num_heads, dtype=dtype)
    metadata.num_decodes = None
    if knows_lens:
        metadata.row_lens = [(n, n + context) for n, context in zip(query_lens, context_lens, strict=True)]
    like = {"dtype": dtype, "device": "cuda"}
    q_nope, q_rope = torch.randn(q.shape[0], num_heads, nope_dim, **like), q[..., 512:].contiguous()
    to_keys = torch.randn(num_heads, nope_dim, 512, **like) * 512**-0.5
    to_values = torch.randn(num_heads, v_head_dim, 512, **like).transpose(1, 2) * 512**-0.5
    scales, stands_for = UNSCALED, cache
    if k_scale is not None:
        scales = KVScales(k_scale, k_scale)
        cache, stands_for = as_fp8(cache, k_scale)
    heads = LatentHeads(to_keys, to_values)
    scale = (nope_dim + 64) ** -0.5
    out = latent_attention(_backend(), q_nope, q_rope, cache, heads, metadata, scale=scale, kv_scales=scales)
    latents = stands_for[:, :, 0].double()
    keys = torch.einsum("bsr,hnr->bshn", latents[..., :512], to_keys.double())
    keys = torch.cat((keys, latents[:, :, None, 512:].expand(*keys.shape[:3], -1)), -1)
    values = torch.einsum("bsr,hrv->bshv", latents[..., :512], to_values.double())
    return relative_error(out, reference(torch.cat((q_nope, q_rope), -1), keys, values, metadata, scale=scale))


MIX = ([300, 2, 700, 1, 1], [50, 900, 0, 700, 2])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_heads", "nope_dim", "v_head_dim"), [(16, 128, 128), (20, 192, 256), (5, 64, 128)])
def test_both_forms_equal_float64(num_heads, nope_dim, v_head_dim, dtype, monkeypatch):
    """Of the third, Mistral 4's heads, keys are as wide as values."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(latent, "LEAST_SPARED", 0.0)
    shape = {"num_heads": num_heads, "nope_dim": nope_dim, "v_head_dim": v_head_dim, "dtype": dtype}
    tolerance = 2 * TOLERANCE[dtype]  # keys, or queries, are rounded on the way
    assert _whole_error(*MIX, **shape) < tolerance
    assert _whole_error(*MIX, **shape, knows_lens=False) < tolerance


@pytest.mark.parametrize("piece", [2 << 20, 40 << 20])
def test_heads_and_rows_are_expanded_in_pieces(piece, monkeypatch):
    monkeypatch.setattr(latent, "LEAST_SPARED", 0.0)
    monkeypatch.setattr(latent, "PIECE_BYTES", piece)
    assert _whole_error([900, 500, 3000, 1], [0, 700, 4000, 50]) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("knows_lens", [True, False])
def test_an_fp8_pool_in_both_forms(knows_lens, monkeypatch):
    monkeypatch.setattr(latent, "LEAST_SPARED", 0.0)
    assert _whole_error(*MIX, k_scale=0.5, knows_lens=knows_lens) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", ["deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_engine_gives_the_cpus_tokens_whatever_the_form(kind, drafts, tmp_path: Path, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = False
    config = make_config(kind)
    config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim = 64, 48, 16, 32
    config.qk_head_dim, config.head_dim = 64, 16  # derived when a config is made
    save_checkpoint(tmp_path, config)
    prompts = [[(7 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate((5, 33, 120, 50))]
    params = [SamplingParams(max_tokens=20, temperature=0.0)] * len(prompts)

    def texts(**changes: object) -> list[list[int]]:
        settings = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4, "dtype": "float32"} | changes
        if drafts:
            settings["speculative"] = SpeculativeConfig(num_tokens=drafts)
        offline = OfflineEngine.load(EngineConfig(model=str(tmp_path), **settings))
        return [generation.token_ids for generation in offline.generate(prompts, params)]

    expected = texts(device="cpu")
    pool = {"device": "cuda", "kv_cache_memory_bytes": 64 * 1024**2}
    for least in (0.0, float("inf")):
        monkeypatch.setattr(latent, "LEAST_SPARED", least)
        assert texts(**pool) == expected
