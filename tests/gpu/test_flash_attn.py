"""FlashAttention over the installed flash-attn against float64, then under the whole engine.

Needs flash-attn built with bf16 and head_dim 64 and 128; any generation of it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.core.local_client import generate
from engine.interface.protocol import SamplingParams
from kernels.attention.base import AttentionSpec
from kernels.attention.flash import FlashAttention
from models.config.model_config import ModelConfig
from models.weights.checkpoint import SafetensorsReader
from tests.gpu.teacher_forcing import Reference, Upcast
from tests.unit.engine.test_real_model import make_engine, prompts, tokens
from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = 6e-3  # of bf16


@pytest.fixture(autouse=True)
def _skip_without_flash_attn():
    reason = FlashAttention.refuse(AttentionSpec(16, 8, 128, torch.bfloat16, CUDA))
    if reason is not None:
        pytest.skip(reason)


def _problem(query_lens, context_lens, *, group=2, num_kv_heads=2, head_dim=128):
    return make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=FlashAttention().block_size_multiple, dtype=torch.bfloat16, device="cuda",
        seed=random.randrange(1 << 30),
    )  # fmt: skip


def _check(problem, **options):
    q = problem[0]
    scale = q.shape[-1] ** -0.5
    torch.full_like(q, float("nan"))  # the allocator hands this memory to the library's output
    out = FlashAttention().forward(*problem, scale=scale, **options)
    assert relative_error(out, reference(*problem, scale=scale, **options)) < TOLERANCE


def _ragged(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    query_lens = [1] * draw.randint(1, 20) + [draw.randint(2, 300) for _ in range(draw.randint(1, 5))] + [1]
    return query_lens, [draw.choice([0, 5, 100, 255, 700, 2500]) for _ in query_lens]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_group_size(group, head_dim):
    _check(_problem(*_ragged(group), group=group, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 128}, {"sliding_window": 5000},
                                     {"softcap": 20.0}, {"sliding_window": 333, "softcap": 5.0}])  # fmt: skip
def test_windows_and_softcap(options, head_dim):
    _check(_problem(*_ragged(11), head_dim=head_dim), **options)
    _check(_problem([1] * 9, list(range(0, 2700, 300)), head_dim=head_dim), **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 128}, {"softcap": 20.0}])
def test_sinks(options):
    sinks = torch.tensor([0.5, -3.0, 6.0, 0.0], device=CUDA)
    _check(_problem(*_ragged(12)), sinks=sinks, **options)
    _check(_problem([1] * 9, list(range(0, 2700, 300))), sinks=sinks, **options)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_decode_batches_of_every_size(rows):
    draw = random.Random(rows)
    _check(_problem([1] * rows, [draw.randint(0, 2000) for _ in range(rows)]))


def test_chunks_of_one_token():
    *tensors, metadata = _problem([1, 1, 1], [30, 256, 2000])
    metadata.num_decodes = 1
    _check((*tensors, metadata))


def test_a_strided_query_view_of_merged_projections():
    q, *caches, metadata = _problem(*_ragged(3))
    merged = torch.cat((q, torch.full_like(q, float("nan"))), dim=1)
    _check((merged[:, : q.shape[1]], *caches, metadata))


def test_one_graph_serves_all_lengths_of_decode_rows():
    q, k_cache, v_cache, metadata = _problem([1] * 4, [3000] * 4, group=4)
    backend = FlashAttention()
    backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    for lengths in ([1, 16, 17, 3001], [2000, 64, 0, 640], [3001, 3001, 1, 257]):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(q, k_cache, v_cache, metadata, scale=0.1)
        assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("max_query_len", [256, 100_000])  # bounds close and far
def test_one_graph_serves_mixed_steps_with_padding(max_query_len):
    q, k_cache, v_cache, metadata = _problem([40, 1, 200, 15, 0, 0], [30, 900, 0, 0, 300, 5], group=4)
    metadata.num_decodes, metadata.max_query_len, metadata.max_seq_len = None, max_query_len, 4096
    backend = FlashAttention()
    backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    # (first query of each row, its tokens): as built; fewer rows; padding whose length is 0 or counts itself
    for starts, lengths in (
        ([0, 40, 41, 241, 256, 256, 256], [70, 901, 200, 15, 300, 5]),
        ([0, 1, 11, 256, 256, 256, 256], [70, 300, 0, 15, 300, 5]),
        ([0, 2, 3, 130, 256, 256, 256], [2, 3, 129, 0, 0, 0]),
    ):
        metadata.query_start_loc.copy_(torch.tensor(starts))
        metadata.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(q, k_cache, v_cache, metadata, scale=0.1)
        real = slice(0, next(start for start, length in zip(starts, [*lengths, 0], strict=True) if length == 0))
        assert relative_error(out[real], expected[real]) < TOLERANCE
        assert out.isfinite().all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3 with heads of 64."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, initializer_range=0.12,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("flash-qwen3")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_the_engines_greedy_tokens_are_the_references(checkpoint, enforce_eager):
    inputs = prompts(5, 17, 300, 61, 12, 513, 23, 35)
    params = [SamplingParams(max_tokens=40, temperature=0.0)] * len(inputs)
    runs = []
    for depth in (1, 2):
        engine, transport = make_engine(
            checkpoint, device="cuda", dtype="bfloat16", attention_backend="flash-attn", block_size=None,
            overlap_depth=depth,
            enforce_eager=enforce_eager, max_num_batched_tokens=200, kv_cache_memory_bytes=64 * 1024**2,
        )  # fmt: skip
        for _ in range(2):  # the second time with prefix hits
            runs.append(generate(engine, transport, inputs, params))
        assert engine.scheduler.config.block_size == max(16, FlashAttention().block_size_multiple)
        assert engine.scheduler.kv.pool.num_used == 0
    assert tokens(runs[0]) == tokens(runs[2])
    assert tokens(runs[1]) == tokens(runs[3])
    torch_path = Reference(
        ModelConfig.from_folder(checkpoint),
        Upcast(SafetensorsReader(checkpoint, device=CUDA, dtype=torch.bfloat16), torch.float32),
    )
    for run in runs[:2]:
        scores = torch_path.score(inputs, run)
        relative = scores.gaps / scores.spreads
        print(f"gap max {relative.max():.4f}, equal {(relative == 0).float().mean():.3f}")
        assert relative.max() < 0.2
        assert (relative == 0).float().mean() > 0.9
