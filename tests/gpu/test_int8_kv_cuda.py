"""An int8 pool on the device: the Triton kernels against their specifications, and the engine against its CPU self."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.interface.protocol import SamplingParams
from kernels.elementwise import reference as elementwise
from kernels.elementwise.reference import KVScales, write_kv
from tests.unit.engine.test_int8_kv import LENGTHS, save_biased_qwen2
from tests.unit.engine.test_real_model import make_engine, prompts, tokens
from tests.unit.kernels.triton_cases.ragged import (
    as_fp8,
    as_int8,
    empty_int8,
    make_problem,
    reference,
    relative_error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
NEEDS_FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)


def _backend():
    from kernels.attention.triton_backend import TritonAttention

    return TritonAttention()


def _has_pdl() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


def _problem(query_lens, context_lens, *, group=2, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16,
             v_factor=1.0, options=None):  # fmt: skip
    """q, the pool, its scales, metadata, and the caches that the pool stands for."""
    seen = {name: value for name, value in (options or {}).items() if name in ("sliding_window", "chunk")}
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda", seed=random.randrange(1 << 30), **seen,
    )  # fmt: skip
    keys, k_scales, k_values = as_int8(k_cache)
    values, v_scales, v_values = as_int8(v_cache * v_factor)
    return q, (keys, values), KVScales(k=k_scales, v=v_scales), metadata, (k_values, v_values)


def _error(query_lens, context_lens, *, is_graphed_mix=False, options=None, **shape):
    options = dict(options or {})
    q, pool, scales, metadata, exact = _problem(query_lens, context_lens, options=options, **shape)
    if options.get("sinks"):
        options["sinks"] = torch.randn(q.shape[1], device="cuda")
    scale = q.shape[2] ** -0.5
    torch.full_like(q, float("nan"))  # the memory that the output is likely to get
    layout = replace(metadata, num_decodes=None) if is_graphed_mix else metadata
    out = _backend().forward(q, *pool, layout, scale=scale, kv_scales=scales, **options)
    return relative_error(out, reference(q, *exact, metadata, scale=scale, **options))


def _ragged(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    query_lens = [1] * draw.randint(1, 20) + [draw.randint(2, 300) for _ in range(draw.randint(1, 5))] + [1]
    return query_lens, [draw.choice([0, 5, 100, 700, 2500]) for _ in query_lens]


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_every_group_size(group):
    assert _error(*_ragged(group), group=group) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_dim_and_dtype(head_dim, dtype):
    assert _error(*_ragged(head_dim), head_dim=head_dim, dtype=dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_every_block_size(block_size):
    assert _error(*_ragged(block_size), block_size=block_size) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 128, "sinks": True}, {"chunk": 256},
                                     {"softcap": 20.0}, {"sliding_window": 333, "softcap": 5.0}])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_chunks_sinks_and_softcap(options, head_dim):
    assert _error(*_ragged(11), head_dim=head_dim, options=options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("v_factor", [1e-3, 6e3])
def test_values_of_any_size_keep_half_precision(v_factor):
    assert _error(*_ragged(5), dtype=torch.float16, v_factor=v_factor) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_decode_batches_of_every_size(rows):
    draw = random.Random(rows)
    assert _error([1] * rows, [draw.randint(0, 2000) for _ in range(rows)]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("seed", range(4))
def test_rows_whose_kind_the_device_finds(seed):
    assert _error(*_ragged(seed), is_graphed_mix=True) < TOLERANCE[torch.bfloat16]


def test_long_rows_and_long_prompts():
    assert _error([1, 1, 1, 700], [30_000, 0, 17, 9_000], num_kv_heads=1, group=4) < TOLERANCE[torch.bfloat16]
    assert _error([1, 1, 1, 2500, 701], [9, 100, 2000, 0, 1500], num_kv_heads=8) < TOLERANCE[torch.bfloat16]


def test_prefill_runs_the_triton_kernel_also_on_hopper(monkeypatch):
    from kernels.attention import triton_backend

    def refuse(*args, **options):
        pytest.fail("the kernel for Hopper got an int8 pool")

    monkeypatch.setattr(triton_backend, "hopper_prefill_attention", refuse, raising=False)
    assert _error([300], [40]) < TOLERANCE[torch.bfloat16]


def test_one_graph_serves_all_lengths_with_the_same_bits():
    q, pool, scales, metadata, exact = _problem([1] * 4, [3000] * 4, group=4)
    backend = _backend()
    backend.forward(q, *pool, metadata, scale=0.1, kv_scales=scales)
    metadata.decode_pieces = None  # which the first forward cut, of one step's lengths
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, *pool, metadata, scale=0.1, kv_scales=scales)
    for lengths in ([1, 16, 17, 3001], [2000, 64, 65, 640], [3001, 3001, 1, 1]):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        found = []
        for _ in range(2):
            out.fill_(float("nan"))
            graph.replay()
            found.append(out.clone())
        assert torch.equal(*found)
        assert relative_error(out, reference(q, *exact, metadata, scale=0.1)) < TOLERANCE[torch.bfloat16]


@NEEDS_FP8
def test_scales_of_each_head_of_an_fp8_pool():
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1, 1, 90], context_lens=[4000, 100, 30], num_heads=8, num_kv_heads=2, head_dim=128, block_size=16,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    scales = KVScales(k=torch.tensor([0.5, 2.0], device="cuda"), v=torch.tensor([4.0, 0.3], device="cuda"))
    (keys, k_values), (values, v_values) = as_fp8(k_cache, scales.k), as_fp8(v_cache, scales.v)
    out = _backend().forward(q, keys, values, metadata, scale=0.1, kv_scales=scales)
    assert relative_error(out, reference(q, k_values, v_values, metadata, scale=0.1)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim", "rotary_dim", "has_norm"), [
    (1, 16, 8, 128, 128, True), (300, 16, 8, 128, 128, True), (33, 32, 8, 128, 128, False),
    (300, 7, 1, 80, 80, False), (5, 12, 4, 256, 64, True), (129, 12, 4, 96, 96, True), (7, 5, 5, 64, 64, False),
])  # fmt: skip
def test_the_fused_kernel_writes_what_its_specification_does(
    tokens, heads, kv_heads, head_dim, rotary_dim, has_norm, dtype
):
    from kernels.elementwise.triton_write_kv import norm_rope_write_kv

    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    weights = [torch.randn(head_dim, device="cuda").to(dtype) if has_norm else None for _ in range(2)]
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    angles, slots = torch.randn(5000, rotary_dim, device="cuda"), torch.randperm(32 * 16, device="cuda")[:tokens]
    mine, theirs = ([empty_int8(32, 16, kv_heads, head_dim, device="cuda") for _ in range(2)] for _ in "ab")
    scales = [KVScales(k=pools[0][1], v=pools[1][1]) for pools in (mine, theirs)]
    norm_rope_write_kv(
        qkv, *weights, 1e-6, positions, angles, mine[0][0], mine[1][0], slots, num_heads=heads, kv_scales=scales[0],
        pdl=_has_pdl(),
    )  # fmt: skip
    q, k, v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if has_norm:
        q, k = (elementwise.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    write_kv(elementwise.apply_rope(q, k, positions, angles)[1], v, theirs[0][0], theirs[1][0], slots, scales[1])
    assert torch.equal(mine[1][0], theirs[1][0])
    assert torch.equal(mine[1][1], theirs[1][1])
    # A sum in another order may fall on the other side of a rounding
    assert int((mine[0][0].int() - theirs[0][0].int()).abs().max()) <= 1
    torch.testing.assert_close(mine[0][1], theirs[0][1], rtol=1e-2, atol=0)


def test_every_number_of_bf16_is_rounded_as_torch_rounds_it_and_nan_is_kept():
    from kernels.elementwise.triton_write_kv import norm_rope_write_kv

    v = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(torch.bfloat16).view(512, 128)
    v = v[torch.randperm(512, device="cuda")]
    qkv = torch.cat((torch.zeros(512, 256, dtype=v.dtype, device="cuda"), v), dim=1)
    positions, angles = torch.zeros(512, dtype=torch.int64, device="cuda"), torch.ones(1, 128, device="cuda")
    slots = torch.randperm(512, device="cuda")
    mine, theirs = ([empty_int8(32, 16, 1, 128, device="cuda") for _ in range(2)] for _ in "ab")
    scales = [KVScales(k=pools[0][1], v=pools[1][1]) for pools in (mine, theirs)]
    norm_rope_write_kv(
        qkv, None, None, 1e-6, positions, angles, mine[0][0], mine[1][0], slots, num_heads=1, kv_scales=scales[0],
        pdl=_has_pdl(),
    )  # fmt: skip
    write_kv(torch.zeros_like(v)[:, None], v[:, None], theirs[0][0], theirs[1][0], slots, scales[1])
    assert torch.equal(mine[1][0], theirs[1][0])
    torch.testing.assert_close(mine[1][1], theirs[1][1], rtol=0, atol=0, equal_nan=True)
    assert mine[1][1].isnan().any()


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_biased_qwen2(tmp_path_factory.mktemp("biased-qwen2"))


@pytest.fixture
def no_tf32() -> Iterator[None]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("attention_backend", ["triton", "torch"])
def test_cuda_gives_nearly_the_cpus_tokens(
    biased: Path, enforce_eager: bool, depth: int, attention_backend: str
) -> None:
    """Nearly: what differs by 1e-7 between devices may be rounded to different integers."""
    params = [SamplingParams(max_tokens=24, temperature=0.0)] * len(LENGTHS)
    settings = {"kv_cache_dtype": "int8", "block_size": 16, "kv_cache_memory_bytes": 64 * 1024**2}
    engine, transport = make_engine(biased, **settings)
    expected = tokens(generate(engine, transport, prompts(*LENGTHS), params))
    engine, transport = make_engine(
        biased,
        device="cuda",
        dtype="float32",
        overlap_depth=depth,
        enforce_eager=enforce_eager,
        attention_backend=attention_backend,
        **settings,
    )
    for _ in range(2):  # the second time with prefix hits
        found = tokens(generate(engine, transport, prompts(*LENGTHS), params))
        pairs = [pair for texts in zip(found, expected, strict=True) for pair in zip(*texts, strict=True)]
        assert sum(a == b for a, b in pairs) / len(pairs) > 0.85
    assert engine.scheduler.kv.pool.num_used == 0
