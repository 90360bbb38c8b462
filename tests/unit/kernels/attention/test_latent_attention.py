"""Latent attention over the torch backend: both forms equal float64, the rule between them, pieces of bounded size."""

import pytest
import torch

from kernels.attention import latent
from kernels.attention.latent import LatentHeads, LatentSizes, latent_attention
from kernels.attention.torch_ref import TorchAttention
from kernels.elementwise.reference import KVScales
from tests.unit.kernels.triton_cases.ragged import as_fp8, make_problem, reference, relative_error

NUM_HEADS, RANK, NOPE, ROPE, VALUE = 6, 32, 12, 8, 10
SCALE = 0.2
V3 = LatentSizes(num_heads=128, rank=512, rope_dim=64, nope_dim=128, v_head_dim=128)


class Recorder(TorchAttention):
    """Notes the shapes of its calls: queries, and keys."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, q, k_cache, v_cache, metadata, **options):
        self.calls.append((tuple(q.shape), tuple(k_cache.shape)))
        return super().forward(q, k_cache, v_cache, metadata, **options)


def _problem(query_lens, context_lens, *, block_size=16, **options):
    """q_nope, q_rope, cache, matrices and metadata with the lengths on the host."""
    q, cache, _, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=NUM_HEADS, num_kv_heads=1, head_dim=RANK + ROPE,
        block_size=block_size, dtype=torch.float32, device="cpu", **options,
    )  # fmt: skip
    torch.manual_seed(1)
    q_nope = torch.randn(q.shape[0], NUM_HEADS, NOPE)
    heads = LatentHeads(torch.randn(NUM_HEADS, NOPE, RANK) / 5, torch.randn(NUM_HEADS, RANK, VALUE) / 5)
    metadata.num_decodes, metadata.max_prefills = None, None
    metadata.row_lens = [(n, n + context) for n, context in zip(query_lens, context_lens, strict=True)]
    return q_nope, q[..., RANK:].contiguous(), cache, heads, metadata


def _expected(q_nope, q_rope, cache, heads, metadata):
    """Keys and values of every head in float64, and attention over them."""
    latents = cache[:, :, 0].double()
    keys = torch.einsum("bsr,hnr->bshn", latents[..., :RANK], heads.to_keys.double())
    keys = torch.cat((keys, latents[:, :, None, RANK:].expand(*keys.shape[:3], -1)), -1)
    values = torch.einsum("bsr,hrv->bshv", latents[..., :RANK], heads.to_values.double())
    return reference(torch.cat((q_nope, q_rope), -1), keys, values, metadata, scale=SCALE)


def _error(problem, backend=None):
    out = latent_attention(backend or TorchAttention(), *problem, scale=SCALE)
    return relative_error(out, _expected(*problem))


MIXES = [
    ([1, 1, 1], [40, 3, 0]),
    ([30], [0]),
    ([50, 40, 7], [0, 33, 0]),
    ([20, 2, 60, 1, 1], [5, 90, 0, 70, 2]),
    ([2, 1, 3], [90, 70, 80]),
]


@pytest.mark.parametrize("block_size", [4, 16, 64, 48])
@pytest.mark.parametrize(("query_lens", "context_lens"), MIXES)
def test_equals_float64_whatever_the_mix_of_rows(query_lens, context_lens, block_size):
    problem = _problem(query_lens, context_lens, block_size=block_size)
    assert _error(problem) < 2e-6
    problem[-1].row_lens = problem[-1].latent_parts = None  # as in a graph: all rows absorbed
    backend = Recorder()
    assert _error(problem, backend) < 2e-6
    assert [keys[3] for _, keys in backend.calls] == [RANK + ROPE]


def test_prompts_are_expanded_and_rows_of_few_tokens_over_a_long_context_are_not():
    backend = Recorder()
    assert _error(_problem([20, 2, 60, 1, 1], [5, 90, 0, 70, 2]), backend) < 2e-6
    absorbed, expanded = RANK + ROPE, NOPE + ROPE
    assert [(q[0], q[2]) for q, _ in backend.calls] == [(20, expanded), (2, absorbed), (60, expanded), (2, absorbed)]


@pytest.mark.parametrize("heads_of_a_piece", [1, 4, 6])
def test_heads_are_expanded_in_pieces_of_bounded_size(heads_of_a_piece, monkeypatch):
    head_bytes = (2 * NOPE + ROPE + VALUE) * 4
    monkeypatch.setattr(latent, "PIECE_BYTES", heads_of_a_piece * 128 * head_bytes)
    backend = Recorder()
    assert _error(_problem([70], [40]), backend) < 2e-6
    sizes = {1: [1] * 6, 4: [3, 3], 6: [6]}[heads_of_a_piece]
    assert [keys for _, keys in backend.calls] == [(2, 64, size, NOPE + ROPE) for size in sizes]


def test_rows_are_expanded_in_groups_of_bounded_size(monkeypatch):
    head_bytes = (2 * NOPE + ROPE + VALUE) * 4
    monkeypatch.setattr(latent, "PIECE_BYTES", NUM_HEADS * 130 * head_bytes)
    backend = Recorder()
    assert _error(_problem([60, 60, 60, 150, 5], [0, 4, 0, 0, 0]), backend) < 2e-6
    tokens = [keys[0] * keys[1] for _, keys in backend.calls]
    assert all(size * keys[2] <= NUM_HEADS * 192 for size, (_, keys) in zip(tokens, backend.calls, strict=True))
    assert len({q[0] for q, _ in backend.calls}) > 1


@pytest.mark.parametrize("query_lens", [[40, 20], [3, 2]])
def test_padding_rows_yield_zeros(query_lens):
    problem = _problem([*query_lens, 6], [30, 10, 0])
    metadata = problem[-1]
    metadata.seq_lens[2] = 0
    metadata.row_lens[2] = (6, 0)
    out = latent_attention(TorchAttention(), *problem, scale=SCALE)
    assert not out[-6:].any()
    assert relative_error(out, _expected(*problem)) < 2e-6


def test_rows_without_tokens_are_passed_over():
    problem = _problem([30, 5], [0, 70])
    metadata = problem[-1]
    metadata.query_start_loc = torch.cat((torch.zeros(1, dtype=torch.int32), metadata.query_start_loc))
    metadata.seq_lens = torch.cat((torch.zeros(1, dtype=torch.int32), metadata.seq_lens))
    metadata.block_table = torch.cat((metadata.block_table[:1], metadata.block_table))
    metadata.row_lens = [(0, 0), *metadata.row_lens]
    assert _error(problem) < 2e-6


@pytest.mark.parametrize("context_lens", [[40, 0], [90, 80]])
def test_an_fp8_pool_is_scaled_in_both_forms(context_lens):
    q_nope, q_rope, cache, heads, metadata = _problem([30, 2], context_lens)
    pool, stands_for = as_fp8(cache, 0.5)
    out = latent_attention(
        TorchAttention(), q_nope, q_rope, pool, heads, metadata, scale=SCALE, kv_scales=KVScales(0.5, 0.5)
    )
    assert relative_error(out, _expected(q_nope, q_rope, stands_for, heads, metadata)) < 2e-6


def test_layers_of_a_step_share_the_choice():
    problem = _problem([40, 1], [0, 30])
    latent_attention(TorchAttention(), *problem, scale=SCALE)
    parts = problem[-1].latent_parts
    latent_attention(TorchAttention(), *problem, scale=SCALE)
    assert problem[-1].latent_parts is parts


def test_the_rule_counts_operations():
    """A prompt without context is expanded; over a long context from about 170 tokens on, of DeepSeek-V3."""
    assert V3.spared_flops(1, 1) > 0
    assert V3.spared_flops(4096, 4096) > 0
    assert V3.spared_flops(170, 100_000) < 0 < V3.spared_flops(172, 100_000)
    assert V3.spared_flops(64, 0) == 0
    pairs = 3 * 10 + 6
    expected = 2 * 128 * (pairs * (2 * 512 - 128 - 128) - 10 * 512 * 256)
    assert V3.spared_flops(3, 13) == expected


def test_a_gpu_expands_only_what_pays_for_launches_without_a_graph():
    rank = LatentSizes(num_heads=16, rank=512, rope_dim=64, nope_dim=128, v_head_dim=128)
    assert not rank.expands([(512, 512), (1, 100_000)], is_cuda=True)
    assert rank.expands([(4096, 4096), (1, 100_000)], is_cuda=True)
    assert rank.expands([(512, 512)], is_cuda=False)
    assert not rank.expands([(1, 100_000)], is_cuda=False)


def test_the_memory_of_a_step_is_bounded_for_any_number_of_heads_and_rows():
    scratch = 2 * 2 * 160 * 256 * 513 * 4
    for num_heads in (16, 128):
        sizes = LatentSizes(num_heads=num_heads, rank=512, rope_dim=64, nope_dim=128, v_head_dim=128)
        assert sizes.step_bytes(4096, 2) == latent.PIECE_BYTES + 37449 * 576 * 3 + scratch
        assert sizes.step_bytes(163_840, 2) == latent.PIECE_BYTES + 163_840 * 576 * 3 + scratch
    assert V3.step_bytes(1 << 20, 2) == (1 << 20) * (448 * 2 + 576 * 3) + scratch
