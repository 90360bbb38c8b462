"""Decode rows that share keys on the device: against float64 and the same rows one by one, in graphs, in an engine."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
import torch

from engine.interface.config import EngineConfig, SharingRates
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from server.config.model_source import DEMO_FOLDER
from tests.unit.kernels.triton_cases.ragged import as_fp8, as_int8, make_problem, reference, relative_error
from tests.unit.kernels.triton_cases.shared_problem import share_blocks

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
RAGGED = ([*range(40), 60], 1536), ([40, 41, 42], 512), ([43, 50], 256)  # rows, and their shared tokens


def _backend():
    from kernels.attention.triton_backend import TritonAttention

    return TritonAttention()


def _problem(query_lens, groups, *, num_heads, num_kv_heads, head_dim, dtype=torch.bfloat16, seed=0):
    draw = random.Random(seed)
    shared = {row: tokens for rows, tokens in groups for row in rows}
    contexts = [shared.get(row, 0) + draw.choice([0, 1, 63, 64, 300, 900]) for row in range(len(query_lens))]
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=contexts, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=16, dtype=dtype, device="cuda", seed=seed,
    )  # fmt: skip
    return q, k_cache, v_cache, share_blocks(k_cache, v_cache, metadata, groups)


def _error(problem, true=None, **options):
    q, k_cache, v_cache, metadata = problem
    scale = q.shape[2] ** -0.5
    torch.full_like(q, float("nan"))  # the allocator hands this memory, still NaN, to the outputs
    out = _backend().forward(q, k_cache, v_cache, metadata, scale=scale, **options)
    options.pop("kv_scales", None)
    return relative_error(out, reference(q, *(true or (k_cache, v_cache)), metadata, scale=scale, **options))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (16, 8), (8, 8), (16, 1), (28, 4)])
def test_ragged_groups(num_heads, num_kv_heads, head_dim, dtype):
    problem = _problem([1] * 64, RAGGED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    assert _error(problem) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_rows", [2, 16, 256, 700])
def test_one_group_of_all_rows(num_rows):
    groups = [(list(range(num_rows)), 2048)]
    assert _error(_problem([1] * num_rows, groups, num_heads=32, num_kv_heads=8, head_dim=128)) < 6e-3


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"sinks": torch.randn(16)}, {"sliding_window": 512}])
def test_every_kind_of_layer(options):
    options = {name: value.cuda() if name == "sinks" else value for name, value in options.items()}
    assert _error(_problem([1] * 64, RAGGED, num_heads=16, num_kv_heads=8, head_dim=128), **options) < 6e-3


@pytest.mark.parametrize("pool", ["fp8", "int8"])
def test_pools_of_one_byte(pool):
    from kernels.elementwise.reference import KVScales

    q, k_cache, v_cache, metadata = _problem([1] * 64, RAGGED, num_heads=32, num_kv_heads=8, head_dim=128)
    if pool == "fp8":
        (k_pool, k_true), (v_pool, v_true), scales = as_fp8(k_cache, 0.5), as_fp8(v_cache, 2.0), KVScales(0.5, 2.0)
    else:
        (k_pool, k_scales, k_true), (v_pool, v_scales, v_true) = as_int8(k_cache), as_int8(v_cache)
        scales = KVScales(k_scales, v_scales)
    assert _error((q, k_pool, v_pool, metadata), (k_true, v_true), kv_scales=scales) < 6e-3


def test_decode_rows_beside_prompts():
    problem = _problem([1] * 61 + [5, 200, 1], RAGGED, num_heads=32, num_kv_heads=8, head_dim=128)
    assert _error(problem) < 6e-3
    *tensors, metadata = problem
    metadata = dataclasses.replace(metadata, num_decodes=None, grouped_rows=None, decode_pieces=None)
    assert _error((*tensors, metadata)) < 6e-3


def test_a_graph_serves_any_groups():
    q, k_cache, v_cache, metadata = _problem([1] * 64, RAGGED, num_heads=32, num_kv_heads=8, head_dim=128)
    backend, scale = _backend(), 128**-0.5
    shares = metadata.shared.shares.clone()
    own = metadata.block_table.clone()
    metadata.shared.shares.zero_()

    def run():
        metadata.grouped_rows = metadata.decode_pieces = None
        backend.prepare(metadata)
        return backend.forward(q, k_cache, v_cache, metadata, scale=scale)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    expected = reference(q, k_cache, v_cache, metadata, scale=scale)
    for share in (shares, torch.zeros_like(shares), torch.where(shares[:, :1] == 1, shares, 0), shares):
        metadata.shared.shares.copy_(share)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert relative_error(out, expected) < 6e-3
    assert torch.equal(own, metadata.block_table)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_gives_the_texts_of_rows_one_by_one(depth, enforce_eager):
    draw = random.Random(depth)
    document = [draw.randrange(3000) for _ in range(700)]
    prompts = [document[: draw.choice([300, 700])] + [draw.randrange(3000) for _ in range(20)] for _ in range(40)]
    params = [SamplingParams(max_tokens=draw.randint(4, 40), temperature=0.0) for _ in prompts]
    config = EngineConfig(
        model=str(DEMO_FOLDER), device="cuda", dtype="float32", max_num_seqs=24, max_model_len=1024,
        overlap_depth=depth, enforce_eager=enforce_eager,
    )  # fmt: skip
    loaded = OfflineEngine.load(config).loaded
    forward, grouped = loaded.runner.forward, []

    def watch(plan):
        grouped.append(plan.is_grouped)
        return forward(plan)

    loaded.runner.forward = watch
    texts = []
    for sharing in (None, SharingRates(chunk_tokens=64)):
        limits = msgspec.structs.replace(loaded.scheduler_config, sharing=sharing)
        engine = OfflineEngine(dataclasses.replace(loaded, scheduler_config=limits))
        grouped.clear()
        engine.generate(prompts[:1], params[:1])
        generations = engine.generate(prompts, params)
        assert any(grouped) == (sharing is not None)
        texts.append([generation.token_ids for generation in generations])
    loaded.close()
    assert texts[0] == texts[1]
