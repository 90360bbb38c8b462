"""The Hopper product of FP8 blocks compiles for a Hopper GPU and fits it. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.linear.gluon_blocks import blocks_linear
from kernels.linear.scaled8_configs import BlocksConfig

x, w = (torch.zeros(size, 1024, dtype=torch.float8_e4m3fn) for size in (512, 4096))
x_scales, w_scales = torch.ones(512, 8), torch.ones(32, 8)
with collect_kernels() as kernels:
    for bias, dtype in ((None, torch.bfloat16), (torch.zeros(4096), torch.float16)):
        for config in (BlocksConfig(), BlocksConfig(part=64, parts=2, num_stages=3, group=3)):
            blocks_linear(x, x_scales, w, w_scales, bias, dtype=dtype, config=config, pdl=True)
"""


@pytest.mark.full
@needs_triton
def test_every_tile_compiles_and_fits_without_spilling(tmp_path):
    compiled = compile_kernels(SCRIPT, cache=tmp_path)
    assert len(compiled) == 4
    assert all(kernel.has_wgmma and kernel.shared_bytes <= HOPPER_SHARED_BYTES for kernel in compiled)
    assert not any(kernel.local_bytes for kernel in compiled), compiled
