"""Matrices of 4-bit codes: the layout, the table that lookups read, and how products are cut."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import reference
from kernels.linear.lut4_configs import lut4_gemm_config
from kernels.linear.ops import Linear4Bit
from kernels.linear.reference import dequantize_lut4, lut4_weight_bytes, make_lut4_weight, unpack_lut4
from kernels.linear.splits import SCRATCH_SUMS, SCRATCH_TILES
from tests.unit.kernels.triton_cases.lut4_problem import TABLES, lut4_problem

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("k", [64, 256, 320, 640])
def test_a_matrix_of_bitsandbytes_stays_what_it_is(k):
    table = torch.tensor(reference.NF4_TABLE)
    packed, scales = reference.quantize_nf4(torch.randn(5, k))
    weight = make_lut4_weight(packed, scales, table, torch.float32)
    assert torch.equal(unpack_lut4(weight), packed)
    expected = reference.dequantize_4bit(packed, scales, table, torch.float32)
    assert torch.equal(dequantize_lut4(weight, torch.float32), expected)
    x, bias = torch.randn(3, k), torch.randn(5)
    assert torch.equal(Linear4Bit()(x, weight, bias), torch.nn.functional.linear(x, expected, bias))
    assert weight.packed.nbytes + weight.scales.nbytes == lut4_weight_bytes(5, k)


def test_words_hold_bytes_of_four_planes():
    packed = torch.arange(256).to(torch.uint8).view(2, 128)
    weight = make_lut4_weight(packed, torch.ones(2, 4), torch.arange(16.0), torch.bfloat16)
    # The second tile of the second row; word 3, plane 2: inputs 128 + 64 + 6 and 7
    assert int(weight.packed[1, 1, 4 * 3 + 2]) == int(packed[1, 198 // 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TABLES)
def test_pairs_are_the_values_of_both_halves_of_a_byte(name, dtype):
    weight, _ = lut4_problem(2, 64, dtype=dtype, table=name)
    values = torch.tensor(TABLES[name]).to(dtype)
    assert torch.equal(weight.pairs[:, 0], values.repeat_interleave(16))
    assert torch.equal(weight.pairs[:, 1], values.repeat(16))


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_scratch_holds_every_split(is_shared):
    for num_rows in (1, 8, 9, 33, 64, 65, 128):
        for n in range(16, 30000, 496):
            for num_tiles in (1, 4, 8, 32, 112, 400):
                config = lut4_gemm_config(num_rows=num_rows, n=n, k=128 * num_tiles, is_shared=is_shared)
                if config is None:
                    assert num_rows > 8
                    assert not is_shared
                    continue
                tiles = -(-num_rows // config.block_m) * -(-n // config.block_n)
                sums = tiles * config.splits * config.block_m * config.block_n
                assert config.splits == 1 or (sums <= SCRATCH_SUMS and tiles <= SCRATCH_TILES)
                assert config.splits <= max(1, num_tiles // 2)


def test_a_tile_holds_the_rows_and_more_of_them_are_made_dense():
    def block_m(num_rows):
        return lut4_gemm_config(num_rows=num_rows, n=4096, k=4096, is_shared=True).block_m

    assert [block_m(rows) for rows in (1, 8, 9, 17, 33, 64, 65, 128)] == [8, 8, 16, 32, 64, 64, 64, 64]
    assert lut4_gemm_config(num_rows=129, n=4096, k=4096, is_shared=True) is None
    assert lut4_gemm_config(num_rows=9, n=4096, k=4096, is_shared=False) is None
