"""Grouped decode rows in torch equal the same rows one by one."""

import dataclasses

import pytest
import torch

from kernels.attention.torch_ref import TorchAttention
from kernels.elementwise.reference import KVScales
from tests.unit.kernels.triton_cases.ragged import as_fp8, as_int8, make_problem, reference, relative_error
from tests.unit.kernels.triton_cases.shared_problem import share_blocks

LENGTHS, GROUPS = [70, 20, 300, 64, 90, 71], [([0, 3, 4], 64), ([1, 5], 16)]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": torch.randn(4)}, {"sliding_window": 40}])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_rows_of_groups_equal_the_reference(options, is_mixed):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1] * len(LENGTHS), context_lens=LENGTHS, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=8,
        block_size=16, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    metadata = share_blocks(k_cache, v_cache, metadata, GROUPS)
    if is_mixed:
        metadata = dataclasses.replace(metadata, num_decodes=None, max_prefills=1)
    out = TorchAttention().forward(q, k_cache, v_cache, metadata, scale=0.25, **options)
    assert relative_error(out, reference(q, k_cache, v_cache, metadata, scale=0.25, **options)) < 1e-5


@pytest.mark.parametrize("pool", ["fp8", "int8"])
def test_pools_of_one_byte_are_grouped_too(pool):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1] * len(LENGTHS), context_lens=LENGTHS, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    metadata = share_blocks(k_cache, v_cache, metadata, GROUPS)
    if pool == "fp8":
        (k_pool, k_true), (v_pool, v_true), scales = as_fp8(k_cache, 0.5), as_fp8(v_cache, 2.0), KVScales(0.5, 2.0)
    else:
        (k_pool, k_scales, k_true), (v_pool, v_scales, v_true) = as_int8(k_cache), as_int8(v_cache)
        scales = KVScales(k_scales, v_scales)
    out = TorchAttention().forward(q, k_pool, v_pool, metadata, scale=0.25, kv_scales=scales)
    assert relative_error(out, reference(q, k_true, v_true, metadata, scale=0.25)) < 1e-5
