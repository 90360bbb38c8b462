"""The Triton backend over latents in both forms, and all candidates of benchmarks.latent_attention, against float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.latent_attention import cases
from benchmarks.latent_problem import make_problem
from kernels.attention.latent import LatentHeads, latent_attention
from kernels.attention.triton_backend import TritonAttention
from tests.unit.kernels.triton_cases.ragged import make_problem as make_rows
from tests.unit.kernels.triton_cases.ragged import reference, relative_error

NUM_HEADS, RANK, NOPE, ROPE, VALUE = 6, 32, 24, 16, 16
LIKE = {"dtype": torch.float32, "device": torch.device("cpu")}


def _error(query_lens, context_lens, *, knows_lens):
    q, cache, _, metadata = make_rows(
        query_lens=query_lens, context_lens=context_lens, num_heads=NUM_HEADS, num_kv_heads=1, head_dim=RANK + ROPE,
        block_size=16, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    metadata.num_decodes = None
    if knows_lens:
        metadata.row_lens = [(n, n + context) for n, context in zip(query_lens, context_lens, strict=True)]
    q_nope, q_rope = torch.randn(q.shape[0], NUM_HEADS, NOPE), q[..., RANK:].contiguous()
    heads = LatentHeads(torch.randn(NUM_HEADS, NOPE, RANK) / 5, torch.randn(NUM_HEADS, RANK, VALUE) / 5)
    backend = TritonAttention()
    out = latent_attention(backend, q_nope, q_rope, cache, heads, metadata, scale=0.2)
    assert not backend._scratches  # prompts need no buffers of decode rows
    latents = cache[:, :, 0].double()
    keys = torch.einsum("bsr,hnr->bshn", latents[..., :RANK], heads.to_keys.double())
    keys = torch.cat((keys, latents[:, :, None, RANK:].expand(*keys.shape[:3], -1)), -1)
    values = torch.einsum("bsr,hrv->bshv", latents[..., :RANK], heads.to_values.double())
    return relative_error(out, reference(torch.cat((q_nope, q_rope), -1), keys, values, metadata, scale=0.2))


@pytest.mark.parametrize("knows_lens", [True, False])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"), [([40, 2, 33, 1, 1], [5, 140, 0, 70, 2]), ([1, 1], [80, 3]), ([70], [0])]
)
def test_the_backend_equals_float64(query_lens, context_lens, knows_lens):
    assert _error(query_lens, context_lens, knows_lens=knows_lens) < 1e-5


@pytest.mark.parametrize(
    "number", range(len(list(cases(["decode", "drafts", "prompt"], is_smoke=True, is_sweep=True))))
)
def test_candidates_of_the_benchmark_equal_float64(number):
    _, shape, (rows, tokens, keys), candidates = list(
        cases(["decode", "drafts", "prompt"], is_smoke=True, is_sweep=True)
    )[number]
    problem = make_problem(shape, rows=rows, tokens=tokens, keys=keys, num_layers=2, like=LIKE)
    for candidate in candidates(problem, torch.device("cpu")):
        assert candidate.error(candidate.run(-1)) < 1e-5, candidate.config
