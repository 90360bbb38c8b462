"""The Hopper product of 16 bits compiles for a Hopper GPU and fits it. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.linear.dense import DenseConfig
from kernels.linear.gluon_dense import gated_linear

with collect_kernels() as kernels:
    for dtype in (torch.bfloat16, torch.float16):
        x, w = (torch.zeros(size, 1024, dtype=dtype) for size in (512, 6144))
        for config in (DenseConfig(), DenseConfig(num_stages=2)):
            for is_gelu in (False, True):
                gated_linear(x, w, is_gelu=is_gelu, config=config, pdl=True)
"""


@pytest.mark.full
@needs_triton
def test_every_tile_compiles_and_fits_without_spilling(tmp_path):
    compiled = compile_kernels(SCRIPT, cache=tmp_path)
    assert len(compiled) == 8
    assert all(kernel.has_wgmma and kernel.shared_bytes <= HOPPER_SHARED_BYTES for kernel in compiled)
    assert not any(kernel.local_bytes for kernel in compiled), compiled
