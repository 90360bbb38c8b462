"""The CPU's row-wise ops of bf16 models, and its attention row by row, against the references in fp32."""

import pytest
import torch

from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from kernels.elementwise import cpu, reference
from kernels.elementwise.reference import FP8, KVScales

BF16 = torch.bfloat16
CLOSE = {"rtol": 2**-6, "atol": 2**-6}  # roundings of bf16


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
def test_norms_equal_the_reference(weight_dtype: torch.dtype) -> None:
    x, residual, weight = bf16(5, 96), bf16(5, 96) + 1, bf16(96).to(weight_dtype)
    expected = reference.rms_norm(x.float(), weight.float(), 1e-6)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-6).float(), expected, **CLOSE)
    normed, total = cpu.add_rms_norm(x, residual, weight, 1e-6)
    assert normed.dtype == total.dtype == BF16
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.float(), reference.rms_norm(total.float(), weight.float(), 1e-6), **CLOSE)


@pytest.mark.parametrize("pool_dtype", [BF16, FP8])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 16])
@pytest.mark.parametrize("form", [{}, {"is_interleaved": True}, {"norms_rotated": True}])
def test_queries_and_stored_keys_equal_the_reference(
    pool_dtype: torch.dtype, has_norms: bool, rotary_dim: int, form: dict[str, bool]
) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = 7, 4, 2, 32
    qkv = bf16(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    before = qkv.clone()
    weights = (bf16(head_dim), bf16(head_dim) + 1) if has_norms else (None, None)
    angles = torch.rand(64, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(BF16)
    positions, slots = torch.arange(num_tokens) * 3, torch.arange(num_tokens) * 2 + 1
    results = []
    for function, dtype in ((cpu.norm_rope_write_kv, BF16), (reference.norm_rope_write_kv, torch.float32)):
        pools = torch.zeros(4, 2, 4, num_kv_heads, head_dim, dtype=dtype if pool_dtype == BF16 else FP8)
        given = [None if weight is None else weight.to(dtype) for weight in weights]
        q = function(
            qkv.to(dtype), *given, 1e-6, positions, table.to(dtype), pools[:, 0], pools[:, 1], slots,
            num_heads=num_heads, kv_scales=KVScales(0.5, 0.25), **form,
        )  # fmt: skip
        results.append((q.float(), pools.float()))
    assert torch.equal(qkv, before)
    (q, pools), (expected_q, expected_pools) = results
    torch.testing.assert_close(q, expected_q, rtol=2**-5, atol=2**-4)
    step = 2**-3 if pool_dtype == FP8 else 2**-5
    torch.testing.assert_close(pools, expected_pools, rtol=step, atol=2**-4)


@pytest.mark.parametrize("rule", [{}, {"sliding_window": 5}, {"chunk": 8}])
@pytest.mark.parametrize("num_prefills", [0, 1])
def test_rows_of_large_heads_attend_alone(rule: dict[str, int], num_prefills: int) -> None:
    num_heads, num_kv_heads, head_dim, block_size = 4, 2, 128, 4
    lengths = [9, 1, 22, 0, 13]
    num_tokens = [1] * len(lengths)
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(2)).view(5, 8).int()
    if num_prefills:
        lengths, num_tokens, tables = [*lengths, 11], [*num_tokens, 6], torch.cat((tables, tables[:1].flip(1)))
    ends = torch.tensor([0, *num_tokens]).cumsum(0).int()
    metadata = AttentionMetadata(
        ends, torch.tensor(lengths, dtype=torch.int32), tables, torch.zeros(int(ends[-1]), dtype=torch.int64),
        max_query_len=max(num_tokens), max_seq_len=max(lengths), num_decodes=5,
    )  # fmt: skip
    q, keys, values = bf16(int(ends[-1]), num_heads, head_dim), *bf16(2, 40, block_size, num_kv_heads, head_dim)
    backend = TorchAttention()
    found = [backend.forward(q, keys, values, metadata, scale=0.1, **rule) for _ in range(2)]
    assert torch.equal(found[0], found[1])
    expected = TorchAttention().forward(q.float(), keys.float(), values.float(), metadata, scale=0.1, **rule)
    torch.testing.assert_close(found[0].float(), expected, **CLOSE)
