"""Attention of every kind of layer compiles for a Hopper GPU and fits it. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.attention.gluon_prefill import hopper_prefill_attention
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_prefill import prefill_attention
from kernels.attention.triton_splits import DecodeScratch

KINDS = [{}, {"sliding_window": 1024, "sinks": torch.zeros(16)}, {"chunk": 8192, "softcap": 30.0}]


def launch(head_dim, value_dim, dtype, num_tokens, num_rows, num_kv_heads=2, **kind):
    q = torch.zeros(num_tokens, 16, head_dim, dtype=dtype)
    out = torch.zeros(num_tokens, 16, value_dim, dtype=dtype)
    k_cache, v_cache = (torch.zeros(2, 16, num_kv_heads, size, dtype=dtype) for size in (head_dim, value_dim))
    if head_dim in (576, 320):  # latent attention
        v_cache = k_cache[..., :value_dim]
    table, seq_lens = torch.zeros(num_rows, 80, dtype=torch.int32), torch.ones(num_rows, dtype=torch.int32)
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    scratch = DecodeScratch.allocate(
        num_heads=16, num_kv_heads=num_kv_heads, head_dim=value_dim, device=torch.device("cpu")
    )
    decode_attention(
        q[:num_rows], k_cache, v_cache, table, seq_lens, out[:num_rows], scratch, scale=1.0, pdl=True, **kind
    )
    shared = (q, k_cache, v_cache, table, starts, seq_lens, out)
    if dtype == torch.bfloat16 and head_dim == value_dim and head_dim in (64, 128, 256, 512):
        hopper_prefill_attention(
            *shared, torch.zeros(2, dtype=torch.int32), scale=1.0, max_seq_len=2048, pdl=True, **kind
        )
    prefill_attention(*shared, scale=1.0, max_query_len=num_tokens, pdl=True, **kind)


head_dim, value_dim = map(int, sys.argv[1:])
with collect_kernels() as kernels:
    for kind in KINDS:
        launch(head_dim, value_dim, torch.bfloat16, 3000, 200, **kind)
    launch(head_dim, value_dim, torch.bfloat16, 4, 2)
    launch(head_dim, value_dim, torch.bfloat16, 3000, 200, num_kv_heads=1)
    launch(head_dim, value_dim, torch.float32, 3000, 200)
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("sizes", ["128 128", "192 128", "256 256", "512 512", "576 512", "320 256"])
def test_every_kind_of_layer_compiles_and_fits(sizes, tmp_path):
    compiled = compile_kernels(SCRIPT, *sizes.split(), cache=tmp_path)
    assert {kernel.name for kernel in compiled} == {"_decode_kernel", "_prefill_kernel"}
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES


ONE_KIND = """
import sys

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.attention.gluon_prefill import HopperConfig, hopper_prefill_attention

head_dim, consumers, num_stages = map(int, sys.argv[1:])
config = HopperConfig(consumers=consumers, block_n=64, num_stages=num_stages, programs_per_sm=1)
with collect_kernels() as kernels:
    q, cache = (torch.zeros(*shape, head_dim, dtype=torch.bfloat16) for shape in ((64, 16), (2, 64, 8)))
    table, starts, seq_lens, tickets = (torch.zeros(size, dtype=torch.int32) for size in ((1, 16), 2, 1, 2))
    hopper_prefill_attention(
        q, cache, cache, table, starts, seq_lens, q, tickets, scale=1.0, max_seq_len=64, config=config
    )
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(("head_dim", "consumers", "num_stages"), [(128, 1, 2), (128, 2, 4), (256, 1, 2), (512, 1, 1)])
def test_prefill_has_only_barriers_that_it_uses_to_the_end(head_dim, consumers, num_stages, tmp_path):
    # Others' memory would become that of the output's tiles; a barrier's memory may hold nothing else
    (kernel,) = compile_kernels(ONE_KIND, str(head_dim), str(consumers), str(num_stages), cache=tmp_path)
    turns = 2 if consumers == 2 else 0
    assert kernel.num_barriers == 2 + 4 * num_stages + turns
