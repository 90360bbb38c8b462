"""Products of few rows of 8 bits compile for a Hopper GPU, fit it and spill nothing; rounding signals as it should.

Needs Triton's compiler, but no GPU.
"""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton, run_script

SHAPES = """
FP8 = torch.float8_e4m3fn
# Of Llama 3.1 8B and 70B, of Qwen3 0.6B, and one whose outputs fill no tile
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 28672)]
SHAPES += [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1000, 2880)]
KINDS = [(FP8, False), (FP8, True), (torch.int8, False)]


def problem(num_rows, n, k, dtype, by_block, has_bias):
    x, w = torch.empty(num_rows, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    blocks = -(-k // 128)
    scales = ((num_rows, blocks), (-(-n // 128), blocks)) if by_block else ((num_rows,), (n,))
    bias = torch.empty(n, dtype=torch.bfloat16) if has_bias else None
    return x, torch.empty(scales[0]), w, torch.empty(scales[1]), bias


def options(by_block):
    return {"dtype": torch.bfloat16, "rows_per_scale": 128 if by_block else 0, "pdl": True}
"""
FEW_ROWS = (
    SHAPES
    + """
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.linear.few_rows_configs import MAX_ROWS, MAX_ROWS_BY_BLOCK, few_rows_config
from kernels.linear.gluon_few_rows import few_rows_linear
from kernels.linear.splits import SplitKScratch

scratch, seen = SplitKScratch.allocate(torch.device("cpu")), set()
with collect_kernels() as kernels:
    for n, k in SHAPES:
        for dtype, by_block in KINDS:
            for num_rows in (2, 8, 16, 32, 64):
                if num_rows > (MAX_ROWS_BY_BLOCK if by_block else MAX_ROWS):
                    continue
                config = few_rows_config(num_rows=num_rows, n=n, k=k, by_block=by_block, num_sms=132)
                case = (config, dtype, by_block, max(8, num_rows), n % 16)
                if case not in seen and (n % 16 == 0 or num_rows == 16):
                    seen.add(case)
                    x = problem(num_rows, n, k, dtype, by_block, has_bias=n % 16 > 0)
                    few_rows_linear(*x, config, scratch=scratch, **options(by_block))
"""
)
ROW = (
    SHAPES
    + """
from kernels.linear.few_rows_configs import row8_config
from kernels.linear.triton_row8 import row8_linear

seen = set()
with collect_kernels() as kernels:
    for n, k in SHAPES:
        for dtype, by_block in KINDS:
            config = row8_config(n=n, k=k, dtype=dtype, by_block=by_block)
            case = (config, dtype, by_block, k % config.block_k)
            if case not in seen:
                seen.add(case)
                row8_linear(*problem(1, n, k, dtype, by_block, n % 16 > 0), config=config, **options(by_block))
"""
)
ROUNDING = """
import kernels.linear.triton_fp8 as triton_fp8

triton_fp8.is_hopper = lambda device: True

from kernels.linear.rounding import Rounding
from kernels.linear.triton_rounded import add_rms_norm_rounded, gate_and_mul_rounded
from kernels.linear.triton_scaled8 import quantize_by_int8, quantize_rows_int8

scale, weight = torch.ones(()), torch.ones(1024)
bounds = []
with collect_kernels() as kernels:
    for num_rows in (1, 32, 33, 64, 65):
        x, wide = (torch.zeros(num_rows, size, dtype=torch.bfloat16) for size in (1024, 2048))
        triton_fp8.quantize_rows(x, pdl=True)
        triton_fp8.quantize_by(x, scale, pdl=True)
        quantize_rows_int8(x, pdl=True)
        quantize_by_int8(x, scale, pdl=True)
        for rounding in (Rounding(), Rounding(dtype=torch.int8)):
            add_rms_norm_rounded(x, x, weight, 1e-5, rounding, pdl=True)
            gate_and_mul_rounded(wide, rounding, is_gelu=False, pdl=True)
        bounds.append((num_rows, "by row", len(kernels)))
        triton_fp8.quantize_groups(x, 128, pdl=True)
        add_rms_norm_rounded(x, x, weight, 1e-5, Rounding(128), pdl=True)
        gate_and_mul_rounded(wide, Rounding(128), is_gelu=False, pdl=True)
        bounds.append((num_rows, "by block", len(kernels)))
for place, kernel in enumerate(kernels):
    function = kernel.function
    source = function.ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    assembly = function.compile(source, target=target, options=dict(kernel.options)).asm["ptx"]
    signal, wait = (assembly.index(f"griddepcontrol.{name}") for name in ("launch_dependents", "wait"))
    num_rows, kind, _ = next(bound for bound in bounds if place < bound[2])  # of its first launch
    print(num_rows, kind, function.__name__, "signals" if signal < wait else "waits", sep=", ")
"""


@pytest.mark.full
@needs_triton
def test_tiles_of_few_rows_compile_and_fit(tmp_path):
    compiled = compile_kernels(FEW_ROWS, cache=tmp_path)
    assert len(compiled) >= 20
    assert all(kernel.has_shared_wgmma and kernel.shared_bytes <= HOPPER_SHARED_BYTES for kernel in compiled), compiled
    # that of 64 rows of e4m3 in tiles of 64 keeps three numbers in local memory, none of which it reads for each box
    spilled = [kernel.local_bytes for kernel in compiled if kernel.local_bytes]
    assert spilled in ([], [16]), compiled


@pytest.mark.full
@needs_triton
def test_products_of_a_row_compile_and_load_by_16_bytes(tmp_path):
    compiled = compile_kernels(ROW, cache=tmp_path)
    assert len(compiled) >= 8
    assert all(kernel.has_wide_loads and kernel.local_bytes == 0 for kernel in compiled), compiled


@pytest.mark.full
@needs_triton
def test_rounding_signals_before_it_waits_where_a_product_of_few_rows_follows(tmp_path):
    lines = [line.split(", ") for line in run_script(ROUNDING, cache=tmp_path).stdout.splitlines()]
    first_of = {(num_rows, kind, what) for num_rows, kind, _name, what in lines}
    # kernels are compiled anew for the first number of rows behind which no product of few rows is
    assert first_of == {
        ("1", "by row", "signals"),
        ("65", "by row", "waits"),
        ("1", "by block", "signals"),
        ("33", "by block", "waits"),
    }
    assert len(lines) == 2 * (8 + 3)
