"""Mamba-2's kernels compile for a Hopper GPU, fit it and use its tensor cores. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

from kernels.mamba2.triton import mamba2
from kernels.mamba2.triton_elementwise import grouped_gated_norm, mamba2_dt
from kernels.states import StateMetadata, StateView


def launch(num_tokens, num_rows, max_query_len):
    width = num_heads * head_dim
    channels = torch.zeros(num_tokens, width + 2 * num_groups * state_size, dtype=dtype)
    x, b, c = channels.split([width, num_groups * state_size, num_groups * state_size], dim=1)
    view = StateView(torch.zeros(4, 3, 16 * state_size), 0, width, state_size)
    numbers = torch.zeros(num_rows + 1, dtype=torch.int32)
    pages = torch.zeros(num_rows, 99, dtype=torch.int32)
    metadata = StateMetadata(numbers, numbers[:-1], numbers[:-1].long(), pages, None, max_query_len, None)
    dt = mamba2_dt(channels[:, :num_heads], torch.zeros(num_heads, dtype=dtype), (0.0, 1.0), pdl=True)
    b, c = (vectors.unflatten(1, (num_groups, state_size)) for vectors in (b, c))
    y = mamba2(x.unflatten(1, (num_heads, head_dim)), b, c, dt, dt[0], dt[0], view, metadata, pdl=True)
    y, z = y.flatten(1), channels[:, :width]
    for weight in (torch.zeros(width, dtype=dtype), None):
        grouped_gated_norm(y, z, weight, 1e-5, group_size=width // num_groups, pdl=True)
    grouped_gated_norm(
        y, z, torch.zeros(width), 1e-5, group_size=2 * width, has_norm_first=True, all_reduce=lambda x: x, pdl=True
    )


num_heads, head_dim, state_size, num_groups = map(int, sys.argv[2:])
dtype = getattr(torch, sys.argv[1])
with collect_kernels() as kernels:
    launch(8192, 4, 8192)
    launch(256, 256, 1)
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(
    "sizes", ["bfloat16 64 64 128 8", "bfloat16 128 64 128 1", "bfloat16 32 128 256 2", "float32 64 64 128 8"]
)
def test_the_shapes_of_published_models_compile_and_fit(sizes, tmp_path):
    kernels = compile_kernels(SCRIPT, *sizes.split(), cache=tmp_path)
    assert {kernel.name for kernel in kernels} == {
        "_dt_kernel", "_gated_norm_kernel", "_pass_states_kernel", "_segments_kernel", "_step_kernel",
    }  # fmt: skip
    assert max(kernel.shared_bytes for kernel in kernels) <= HOPPER_SHARED_BYTES
    for kernel in kernels:
        if kernel.name in ("_segments_kernel", "_step_kernel"):
            assert kernel.has_wide_loads, kernel
        if kernel.name == "_segments_kernel":
            assert kernel.has_wgmma == sizes.startswith("bfloat16"), kernel
