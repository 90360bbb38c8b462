"""Attention over shared keys compiles for a Hopper GPU and fits it. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.attention import triton_decode, triton_shared
from kernels.attention.base import AttentionMetadata, SharedRows
from kernels.attention.triton_backend import TritonAttention
from kernels.elementwise.reference import FP8, INT8, KVScales


def launch(num_rows, num_heads, num_kv_heads, head_dim, dtype, kv_dtype, is_mixed=False, **options):
    q = torch.zeros(num_rows, num_heads, head_dim, dtype=dtype)
    cache = torch.zeros(2, 16, num_kv_heads, head_dim, dtype=kv_dtype)
    if kv_dtype == INT8:
        options["kv_scales"] = KVScales(torch.zeros(2, 16, num_kv_heads), torch.zeros(2, 16, num_kv_heads))
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens=torch.ones(num_rows, dtype=torch.int32),
        block_table=torch.zeros(num_rows, 80, dtype=torch.int32),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64),
        max_query_len=1,
        max_seq_len=1280,
        num_decodes=None if is_mixed else num_rows,
        max_prefills=0,
        shared=SharedRows(torch.arange(num_rows), torch.zeros(num_rows, 2, dtype=torch.int32), 32),
    )
    backend = TritonAttention()
    backend._knows_device, backend._pdl = True, True
    backend.forward(q, cache, cache, metadata, scale=1.0, **options)


for module in (triton_decode, triton_shared):
    module.has_ptx = lambda q: True  # though the tensors are on the CPU
head_dim = int(sys.argv[1])
with collect_kernels() as kernels:
    for rows in (16, 256):
        launch(rows, 32, 8, head_dim, torch.bfloat16, torch.bfloat16)
        launch(rows, 16, 1, head_dim, torch.bfloat16, FP8)
        launch(rows, 16, 8, head_dim, torch.float16, INT8, is_mixed=True)
    launch(64, 24, 8, head_dim, torch.bfloat16, torch.bfloat16, softcap=30.0, sinks=torch.zeros(24))
    launch(64, 4, 4, head_dim, torch.float32, torch.float32)
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("head_dim", ["64", "128", "256"])
def test_shared_attention_compiles_and_fits(head_dim, tmp_path):
    compiled = compile_kernels(SCRIPT, head_dim, cache=tmp_path)
    assert {kernel.name for kernel in compiled} >= {"_shared_kernel", "_group_rows_kernel", "_decode_kernel"}
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES
    tiles = [kernel for kernel in compiled if kernel.name == "_shared_kernel"]
    assert any(kernel.has_wgmma for kernel in tiles)
    attending = [kernel for kernel in compiled if kernel.name in ("_shared_kernel", "_decode_kernel")]
    assert not any(kernel.num_byte_loads or kernel.num_single_conversions for kernel in attending)
    assert all(kernel.has_shared_wgmma for kernel in compiled if kernel.has_wgmma)
