"""The specification of experts in integers: what each bit means, and the bytes of a matrix."""

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe.storage_int import IntMatrix, int_matrix_bytes, pack_codes, pack_groups
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, Integers, pack_integers, random_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem


def test_the_layout_of_words_and_groups():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 1, 16)
    words = pack_codes(codes, 4)
    assert [hex(word) for word in words.flatten().tolist()] == ["0x76543210", "-0x1234568", "0x0", "0x0"]
    assert pack_codes(codes, 8).flatten().tolist()[0] == 0x03020100
    scales = torch.tensor([1.0, 2.0, 3.0]).to(torch.float16).view(1, 1, 3)
    bits = scales.view(torch.int16).flatten().tolist()
    assert pack_groups(scales, None).flatten().tolist() == [bits[0] | bits[1] << 16, bits[2]]
    zeros = torch.tensor([0, 7, 15], dtype=torch.uint8).view(1, 1, 3)
    assert pack_groups(scales, zeros).flatten().tolist() == [bits[0], bits[1] | 7 << 16, bits[2] | 15 << 16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_weight_is_its_value_less_the_zero_point_times_the_scale(num_groups, bits, has_zeros, dtype):
    generator = torch.Generator().manual_seed(bits)
    shape = 3, 5, 10 * num_groups
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    scales = torch.randn(3, 5, num_groups, generator=generator).to(dtype)
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8, generator=generator) if has_zeros else None
    matrix = IntMatrix(
        pack_codes(codes, bits), pack_groups(scales, zeros), shape[2], num_groups, bits, dtype, has_zeros=has_zeros
    )
    assert matrix.shape == shape
    points = torch.full(scales.shape, 1 << (bits - 1)) if zeros is None else zeros
    expected = codes.double() - points.double().repeat_interleave(10, 2)
    expected *= scales.double().repeat_interleave(10, 2)
    for expert in range(3):
        assert torch.equal(matrix.dense(expert, torch.float32).double(), expected[expert])
        assert torch.equal(matrix.dense(expert, torch.bfloat16), expected[expert].to(torch.bfloat16))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_mixture_of_integers_is_that_of_its_dense_experts(storage):
    problem = make_problem(
        num_tokens=9, num_experts=4, top_k=2, hidden_size=384, intermediate_size=768, dtype=torch.float32
    )  # fmt: skip
    packed = pack_integers(problem, STORAGES[storage])
    assert 0.5 < float(packed.gate_up.dense(0, torch.float32).std() / problem.gate_up[0].std()) < 2
    inner, x = [], packed.x
    weights, experts = moe.route(packed.logits, top_k=2, renormalize=True)
    for expert in range(4):
        up = moe.gate_and_mul(x @ packed.gate_up.dense(expert, torch.float32).T, moe.SILU)
        inner.append(up @ packed.down.dense(expert, torch.float32).T)
    expected = (torch.stack(inner, 1).gather(1, experts[..., None].expand(-1, -1, 384)) * weights[..., None]).sum(1)
    torch.testing.assert_close(packed.call(moe.fused_moe), expected)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_bytes_of_a_matrix_are_known_before_it_is_made(storage):
    kind = STORAGES[storage]
    matrix = random_integers(2, 16, 768, kind, torch.Generator().manual_seed(0))
    expected = int_matrix_bytes(
        16, 768, bits=kind.bits, num_groups=matrix.num_groups, has_zeros=kind.has_zeros
    )  # fmt: skip
    assert matrix.words.nbytes + matrix.groups.nbytes == 2 * expected


def test_bits_a_weight():
    kinds = {"gptq": 4.125, "awq": 4.25, "packed": 4.5, "gptq_8bit": 8.125}
    for storage, bits in kinds.items():
        kind: Integers = STORAGES[storage]
        num_groups = 2048 // kind.group_size
        num_bytes = int_matrix_bytes(1, 2048, bits=kind.bits, num_groups=num_groups, has_zeros=kind.has_zeros)
        assert num_bytes * 8 / 2048 == bits
