"""An fp8 pool on the device: the Triton kernels against their specifications, and the engine against its CPU self."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.startup.load import load_engine
from kernels.attention.base import AttentionSpec
from kernels.elementwise import reference as elementwise
from kernels.elementwise.reference import FP8, KVScales, write_kv
from tests.gpu.test_engine_cuda import LENGTHS, checkpoint  # noqa: F401  (a fixture)
from tests.unit.engine.test_fp8_kv import demo_tokens
from tests.unit.engine.test_real_model import make_engine, prompts, tokens
from tests.unit.kernels.triton_cases.ragged import as_fp8, make_problem, reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
    ),
]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SCALES = KVScales(k=0.5, v=0.03)
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


def _backend():
    from kernels.attention.triton_backend import TritonAttention

    return TritonAttention()


def _problem(query_lens, context_lens, *, group=2, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16):
    """q, the pool, metadata, and the caches that the pool stands for."""
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda", seed=random.randrange(1 << 30),
    )  # fmt: skip
    (keys, k_values), (values, v_values) = as_fp8(k_cache, SCALES.k), as_fp8(v_cache, SCALES.v)
    return q, (keys, values), metadata, (k_values, v_values)


def _error(query_lens, context_lens, *, is_graphed_mix=False, options=None, **shape):
    options = options or {}
    q, pool, metadata, exact = _problem(query_lens, context_lens, **shape)
    scale = q.shape[2] ** -0.5
    torch.full_like(q, float("nan"))  # the memory that the output is likely to get
    layout = replace(metadata, num_decodes=None) if is_graphed_mix else metadata
    out = _backend().forward(q, *pool, layout, scale=scale, kv_scales=SCALES, **options)
    return relative_error(out, reference(q, *exact, metadata, scale=scale, **options))


def _ragged(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    query_lens = [1] * draw.randint(1, 20) + [draw.randint(2, 300) for _ in range(draw.randint(1, 5))] + [1]
    return query_lens, [draw.choice([0, 5, 100, 700, 2500]) for _ in query_lens]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_every_group_size(group):
    assert _error(*_ragged(group), group=group) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_and_dtype(head_dim, dtype):
    assert _error(*_ragged(head_dim), head_dim=head_dim, dtype=dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_every_block_size(block_size):
    assert _error(*_ragged(block_size), block_size=block_size) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 128}, {"sliding_window": 1000},
                                     {"softcap": 20.0}, {"sliding_window": 333, "softcap": 5.0}])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_and_softcap(options, head_dim):
    assert _error(*_ragged(11), head_dim=head_dim, options=options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_decode_batches_of_every_size(rows):
    draw = random.Random(rows)
    assert _error([1] * rows, [draw.randint(0, 2000) for _ in range(rows)]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("seed", range(4))
def test_rows_whose_kind_the_device_finds(seed):
    assert _error(*_ragged(seed), is_graphed_mix=True) < TOLERANCE[torch.bfloat16]


def test_long_rows_among_short_ones():
    assert _error([1, 1, 1, 700], [30_000, 0, 17, 9_000], num_kv_heads=1, group=4) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("block_size", [16, 64])
def test_prompts_long_enough_for_the_large_tiles(block_size):
    error = _error([1, 1, 1, 2500, 701], [9, 100, 2000, 0, 1500], num_kv_heads=8, block_size=block_size)
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("head_dim", "unused"), [(128, "prefill_attention"), (256, "hopper_prefill_attention")])
def test_prefill_on_hopper_runs_its_kernel_where_heads_fit(monkeypatch, head_dim, unused):
    from kernels.attention import triton_backend

    if torch.cuda.get_device_capability()[0] != 9 or not triton_backend.HAS_GLUON:
        unused = "hopper_prefill_attention"

    def refuse(*args, **options):
        pytest.fail(f"{unused} got an fp8 pool with heads of {head_dim}")

    monkeypatch.setattr(triton_backend, unused, refuse, raising=False)
    assert _error([300], [40], head_dim=head_dim) < TOLERANCE[torch.bfloat16]


def test_one_graph_serves_all_lengths():
    q, pool, metadata, exact = _problem([1] * 4, [3000] * 4, group=4)
    backend = _backend()
    backend.forward(q, *pool, metadata, scale=0.1, kv_scales=SCALES)
    metadata.decode_pieces = None  # which the first forward cut, of one step's lengths
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, *pool, metadata, scale=0.1, kv_scales=SCALES)
    for lengths in ([1, 16, 17, 3001], [2000, 64, 65, 640], [3001, 3001, 1, 1]):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, reference(q, *exact, metadata, scale=0.1)) < TOLERANCE[torch.bfloat16]


def test_the_same_inputs_give_the_same_bits():
    q, pool, metadata, _ = _problem([1] * 3 + [90], [4000, 100, 900, 30], group=4)
    backend = _backend()
    first = backend.forward(q, *pool, metadata, scale=0.1, kv_scales=SCALES)
    for _ in range(50):
        assert torch.equal(backend.forward(q, *pool, metadata, scale=0.1, kv_scales=SCALES), first)


@pytest.mark.parametrize("rows", [1, 16])
def test_fp8_changes_attention_at_scale_by_a_few_percent(rows):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1] * rows, context_lens=[4096] * rows, num_heads=16, num_kv_heads=8, head_dim=128, block_size=16,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    pool = [as_fp8(cache, 1.0)[0] for cache in (k_cache, v_cache)]
    whole, fp8 = (_backend().forward(q, *p, metadata, scale=128**-0.5).double() for p in ((k_cache, v_cache), pool))
    assert 0.01 < relative_error(fp8, whole) < 0.06


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
    mine, theirs = ([torch.zeros(32, 16, kv_heads, head_dim, device="cuda").to(FP8) for _ in range(2)] for _ in "ab")
    norm_rope_write_kv(
        qkv, *weights, 1e-6, positions, angles, *mine, slots, num_heads=heads, kv_scales=SCALES, pdl=_has_pdl()
    )
    q, k, v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if has_norm:
        q, k = (elementwise.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    write_kv(elementwise.apply_rope(q, k, positions, angles)[1], v, *theirs, slots, SCALES)
    assert torch.equal(mine[1].view(torch.uint8), theirs[1].view(torch.uint8))
    # A sum in another order may fall on the other side of a rounding
    assert float((mine[0].float() == theirs[0].float()).float().mean()) > 0.99
    assert relative_error(mine[0].float(), theirs[0].float().double()) < 1e-2


def test_every_number_of_bf16_is_rounded_as_torch_rounds_it_and_none_becomes_nan():
    from kernels.elementwise.triton_write_kv import norm_rope_write_kv

    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    v = torch.where(every.isnan(), 0.0, every).view(512, 128)
    qkv = torch.cat((torch.zeros(512, 256, dtype=v.dtype, device="cuda"), v), dim=1)
    positions, angles = torch.zeros(512, dtype=torch.int64, device="cuda"), torch.ones(1, 128, device="cuda")
    slots = torch.randperm(512, device="cuda")
    mine, theirs = ([torch.zeros(32, 16, 1, 128, device="cuda").to(FP8) for _ in range(2)] for _ in "ab")
    for scales in (KVScales(), KVScales(k=1.0, v=0.3)):
        norm_rope_write_kv(
            qkv, None, None, 1e-6, positions, angles, *mine, slots, num_heads=1, kv_scales=scales, pdl=_has_pdl()
        )
        write_kv(torch.zeros_like(v)[:, None], v[:, None], *theirs, slots, scales)
        assert torch.equal(mine[1].view(torch.uint8), theirs[1].view(torch.uint8))
        assert mine[1].float().isfinite().all()
        assert mine[1].float().abs().max() == 448.0


def _has_pdl() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


def test_a_cuda_model_of_the_usual_shape_is_not_refused():
    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), block_size=16, kv_dtype=FP8)
    assert _backend().refuse(spec) is None


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
    checkpoint: Path,  # noqa: F811
    enforce_eager: bool,
    depth: int,
    attention_backend: str,
) -> None:
    """Nearly: what differs by 1e-7 between devices may be rounded to different numbers of fp8."""
    params = [SamplingParams(max_tokens=24, temperature=0.0)] * len(LENGTHS)
    settings = {"kv_cache_dtype": "fp8", "block_size": 16, "kv_cache_memory_bytes": 64 * 1024**2}
    engine, transport = make_engine(checkpoint, **settings)
    expected = tokens(generate(engine, transport, prompts(*LENGTHS), params))
    engine, transport = make_engine(
        checkpoint,
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


def test_the_demo_model_says_nearly_the_same() -> None:
    whole, fp8 = demo_tokens("auto", device="cuda"), demo_tokens("fp8", device="cuda")
    pairs = [pair for texts in zip(whole, fp8, strict=True) for pair in zip(*texts, strict=False)]
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.85


def test_the_pool_holds_twice_the_tokens() -> None:
    num_blocks = {}
    for kv_cache_dtype in ("auto", "fp8"):
        config = EngineConfig(
            model=str(SHAPES / "qwen3-0.6b"),
            load_format="dummy",
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=2**30,
            max_model_len=4096,
            max_num_seqs=64,
            enforce_eager=True,
        )
        num_blocks[kv_cache_dtype] = load_engine(config, lambda stage: None).scheduler_config.num_pages
        torch.cuda.empty_cache()
    assert abs(num_blocks["fp8"] - 2 * num_blocks["auto"]) <= 1
