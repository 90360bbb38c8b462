"""Decoding over 8-bit pools compiles for a Hopper GPU into what the kernel is written for. Needs no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_REGISTERS, HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys
from dataclasses import replace

from kernels.attention.gluon_decode import decode8_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise.reference import FP8, KVScales
from tests.unit.kernels.triton_cases.ragged import empty_int8

pool, (head_dim, group) = sys.argv[1], map(int, sys.argv[2:])
(keys, k_scales), (values, v_scales) = (empty_int8(2, 16, 2, head_dim) for _ in range(2))
if pool == "fp8":
    keys, values = (torch.zeros(2, 16, 2, head_dim, dtype=FP8) for _ in range(2))
    k_scales, v_scales = torch.ones(2), torch.ones(2)
scratch = DecodeScratch.allocate(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, device=torch.device("cpu"))
scratch = replace(scratch, num_sms=132)


def launch(num_rows, **kind):
    q = torch.zeros(num_rows, 2 * group, head_dim, dtype=torch.bfloat16)
    table, seq_lens = torch.zeros(num_rows, 80, dtype=torch.int32), torch.ones(num_rows, dtype=torch.int32)
    if not kind.keys() & {"sliding_window", "chunk"}:
        kind["pieces"] = torch.zeros(num_rows + 66, 4, dtype=torch.int32)
    decode8_attention(
        q, keys, values, table, seq_lens, torch.empty_like(q), scratch, scale=1.0, pdl=True,
        kv_scales=KVScales(k=k_scales, v=v_scales), **kind,
    )


with collect_kernels() as kernels:
    for num_rows in (16, 250, 600) if head_dim < 256 else (16,):  # four, two and one warp
        launch(num_rows)
    launch(600, sliding_window=1000, sinks=torch.zeros(2 * group))
    launch(600, chunk=8192, softcap=30.0, query_start_loc=torch.zeros(601, dtype=torch.int32))
"""
WARPS_PER_SM = 8  # of gluon_decode, which needs triton


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (128, 16), (64, 4), (256, 8)])
@pytest.mark.parametrize("pool", ["fp8", "int8"])
def test_tiles_go_from_memory_to_registers_in_wide_loads_and_stay_there(pool, head_dim, group, tmp_path):
    compiled = compile_kernels(SCRIPT, pool, str(head_dim), str(group), cache=tmp_path)
    numbers_of_warps = [4, 2, 1, 1, 1] if head_dim < 256 else [4, 4, 4]
    assert len(compiled) == len(numbers_of_warps)
    for kernel, num_warps in zip(compiled, numbers_of_warps, strict=True):
        assert kernel.name == "_decode8_kernel"
        assert kernel.registers * WARPS_PER_SM <= HOPPER_REGISTERS * num_warps
        assert kernel.shared_bytes * WARPS_PER_SM <= HOPPER_SHARED_BYTES * num_warps
        assert kernel.has_wide_loads
        assert kernel.num_transposed > 0
        assert kernel.num_byte_loads == 0
        assert not kernel.num_single_conversions
        assert not kernel.num_half_products  # queries are lowered before they are float16
        # The merge of the pieces of sixteen heads spills, behind all keys; heads of 256 spill a few registers
        assert kernel.local_bytes <= (336 if group > 8 else head_dim // 256 * 24)
