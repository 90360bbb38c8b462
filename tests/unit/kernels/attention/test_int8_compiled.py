"""Attention over int8 pools, and fp8 ones with scales of heads, compiles for a Hopper GPU; decoding spills nothing."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.attention import triton_decode, triton_prefill
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_prefill import prefill_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise.reference import FP8, KVScales
from kernels.elementwise.triton_write_kv import norm_rope_write_kv
from tests.unit.kernels.triton_cases.ragged import empty_int8

for module in (triton_decode, triton_prefill):
    module.has_ptx = lambda q: True  # though the tensors are on the CPU
KINDS = [{}, {"sliding_window": 1024, "sinks": torch.zeros(16)}, {"chunk": 8192, "softcap": 30.0}]
head_dim, pool = int(sys.argv[1]), sys.argv[2]


def launch(num_tokens, num_rows, num_kv_heads=2, dtype=torch.bfloat16, **kind):
    q, out = (torch.zeros(num_tokens, 16, head_dim, dtype=dtype) for _ in range(2))
    (keys, k_scales), (values, v_scales) = (empty_int8(2, 16, num_kv_heads, head_dim) for _ in range(2))
    if pool == "fp8":
        keys, values = (torch.zeros(2, 16, num_kv_heads, head_dim, dtype=FP8) for _ in range(2))
        k_scales, v_scales = torch.ones(num_kv_heads), torch.ones(num_kv_heads)
    table, seq_lens = torch.zeros(num_rows, 80, dtype=torch.int32), torch.ones(num_rows, dtype=torch.int32)
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    scratch = DecodeScratch.allocate(
        num_heads=16, num_kv_heads=num_kv_heads, head_dim=head_dim, device=torch.device("cpu")
    )
    options = {"scale": 1.0, "pdl": True, "kv_scales": KVScales(k=k_scales, v=v_scales), **kind}
    decode_attention(q[:num_rows], keys, values, table, seq_lens, out[:num_rows], scratch, **options)
    prefill_attention(q, keys, values, table, starts, seq_lens, out, max_query_len=num_tokens, **options)
    slots, weight = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(head_dim, dtype=dtype)
    qkv = torch.zeros(num_tokens, (16 + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.zeros(9, head_dim, dtype=dtype)
    norm_rope_write_kv(
        qkv, weight, weight, 1e-6, slots, angles, keys, values, slots, num_heads=16, pdl=True,
        kv_scales=options["kv_scales"],
    )


with collect_kernels() as kernels:
    for kind in KINDS:
        launch(3000, 200, **kind)
    launch(4, 2)
    launch(3000, 200, num_kv_heads=1)
    launch(3000, 200, dtype=torch.float16)
"""


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("pool", ["int8", "fp8"])
def test_every_kind_of_layer_compiles_and_decoding_spills_nothing(head_dim, pool, tmp_path):
    compiled = compile_kernels(SCRIPT, str(head_dim), pool, cache=tmp_path)
    assert {kernel.name for kernel in compiled} == {"_decode_kernel", "_prefill_kernel", "_norm_rope_write_kv_kernel"}
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES
    assert all(kernel.has_wide_loads for kernel in compiled if kernel.name in ("_decode_kernel", "_prefill_kernel"))
    assert not any(kernel.num_single_conversions for kernel in compiled)
    assert all(kernel.has_shared_wgmma for kernel in compiled if kernel.has_wgmma)
    decoding = [kernel for kernel in compiled if kernel.name == "_decode_kernel"]
    assert not any(kernel.num_byte_loads or kernel.local_bytes for kernel in decoding)
    if pool == "int8":  # the large tiles of other pools spill a little, and are the faster for it
        spilled = {kernel.name: kernel.local_bytes for kernel in compiled if kernel.local_bytes}
        assert spilled == ({} if head_dim <= 128 else {"_prefill_kernel": 8})  # two registers, of windows alone
