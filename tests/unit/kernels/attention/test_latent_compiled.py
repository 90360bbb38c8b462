"""Latent attention compiles for a Hopper GPU, fits it and uses wgmma. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.attention import triton_latent
from kernels.attention.base import AttentionMetadata
from kernels.attention.triton_latent import latent_attention
from kernels.attention.triton_latent_splits import LatentScratch
from kernels.attention.triton_prefill import prefill_attention

triton_latent.has_ptx = lambda q: True  # though the tensors are on the CPU
num_heads, rank, rope_dim = map(int, sys.argv[1:])


def int32(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def launch(dtype, pool=None, num_decodes=None):
    num_tokens = 24 if num_decodes is None else num_decodes
    q = torch.zeros(num_tokens, num_heads, rank + rope_dim, dtype=dtype)
    cache = torch.zeros(2, 16, 1, rank + rope_dim, dtype=pool or dtype)
    out = torch.zeros(num_tokens, num_heads, rank, dtype=dtype)
    scratch = LatentScratch.allocate(num_heads=num_heads, rank=rank, dtype=dtype, device=torch.device("cpu"))
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    metadata = AttentionMetadata(int32(9), int32(8), int32(8, 80), slots, 8, 1200, num_decodes)
    latent_attention(q, cache, metadata, out, scratch, scratch.cut(metadata), scale=1.0, pdl=True)


def expanded(head_dim, v_head_dim):
    q = torch.zeros(3000, 16, head_dim, dtype=torch.bfloat16)
    keys, values = (torch.zeros(2, 64, 16, size, dtype=torch.bfloat16) for size in (head_dim, v_head_dim))
    out = torch.zeros(3000, 16, v_head_dim, dtype=torch.bfloat16)
    prefill_attention(
        q, keys, values, int32(8, 80), int32(9), int32(8), out, scale=1.0, max_query_len=3000, pdl=True
    )


with collect_kernels() as kernels:
    launch(torch.bfloat16)
    launch(torch.bfloat16, num_decodes=8)
    launch(torch.bfloat16, pool=torch.float8_e4m3fn)
    launch(torch.float32)
    expanded(192, 128)
    expanded(256, 256)
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("sizes", ["16 512 64", "20 512 64", "32 256 64", "128 512 64"])
def test_latent_attention_compiles_and_fits(sizes, tmp_path):
    compiled = compile_kernels(SCRIPT, *sizes.split(), cache=tmp_path)
    names = {"_short_rows_kernel", "_long_rows_kernel", "_merge_kernel", "_cut_rows_kernel", "_prefill_kernel"}
    assert {kernel.name for kernel in compiled} == names
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES
    assert all(kernel.has_wide_loads for kernel in compiled if kernel.name in ("_short_rows_kernel", "_prefill_kernel"))
    assert not any(kernel.num_byte_loads or kernel.num_single_conversions for kernel in compiled)
    assert all(kernel.has_shared_wgmma for kernel in compiled if kernel.has_wgmma)
    # Tiles of 64 rows run as wgmma: long rows always, short ones from 33 heads on; float32 never
    assert sum(kernel.has_wgmma for kernel in compiled if kernel.name == "_long_rows_kernel") == 2
    with_many_heads = sum(kernel.has_wgmma for kernel in compiled if kernel.name == "_short_rows_kernel")
    assert with_many_heads == (3 if int(sizes.split()[0]) > 32 else 0)
