"""Products of 8-bit values with scales: their cuts, which compile for a Hopper GPU, and rounding."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.linear import eight_bits, w8a8
from kernels.linear.eight_bits import Fp8BlockLinear, Int8Linear
from kernels.linear.reference import dequantize_blocks, quantize_blocks
from kernels.linear.scaled8_configs import scaled8_config
from kernels.linear.splits import SCRATCH_SUMS, SCRATCH_TILES
from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton


def test_the_scratch_holds_every_split():
    for num_rows in (1, 8, 9, 33, 64, 65, 256):
        for n in range(16, 30000, 496):
            for num_steps in (1, 4, 8, 32, 112, 400):
                config = scaled8_config(num_rows=num_rows, n=n, k=128 * num_steps, block_k=128)
                tiles = -(-num_rows // config.block_m) * -(-n // config.block_n)
                sums = tiles * config.splits * config.block_m * config.block_n
                assert config.splits == 1 or (sums <= SCRATCH_SUMS and tiles <= SCRATCH_TILES)
                assert config.is_few or config.splits == 1


@pytest.mark.skipif(not eight_bits.HAS_GLUON, reason="needs Triton 3.6")
def test_outputs_that_the_hopper_kernel_stores_slowly_have_another(monkeypatch):
    monkeypatch.setattr(eight_bits, "is_hopper", lambda device: True)
    x = torch.empty(300, 256, dtype=torch.float8_e4m3fn)
    for n, is_taken in ((16, True), (1000, False), (1008, True)):
        w = torch.empty(n, 256, dtype=torch.float8_e4m3fn)
        assert eight_bits._takes_blocks(x, w, rows=128, columns=128) is is_taken
    assert not eight_bits._takes_blocks(x, w, rows=128, columns=64)
    assert not eight_bits._takes_blocks(torch.empty(300, 264, dtype=x.dtype)[:, :256], w, rows=128, columns=128)


_FOLDER = Path(__file__).parents[4] / "benchmarks" / "results"
RESULTS = _FOLDER / "kernels-fp8-blocks-sweep-h200-2026-11-23.json"
MANY_ROWS = _FOLDER / "kernels-w8a8-many-rows-h100-2026-11-26.json"


def test_configs_are_near_the_best_measured_without_the_copy_engine():
    results = json.loads(RESULTS.read_text())["results"]
    assert len(results) == 12
    for result in results:
        sizes = {"num_rows": result["rows"], "n": result["n"], "k": result["k"]}
        config = asdict(scaled8_config(**sizes, block_k=128))
        times = [
            (cut["us"], {key: value for key, value in cut["config"].items() if key != "is_fused"})
            for cut in result["cuts"]
            if not cut["config"]["is_fused"] and not cut["config"]["has_tma"]
        ]
        (chosen,) = (us for us, cut in times if cut == config)
        assert chosen <= 1.07 * min(us for us, _ in times), sizes


def test_configs_of_integers_with_many_rows_are_near_the_best_measured():
    results = json.loads(MANY_ROWS.read_text())["results"]
    assert len(results) == 4
    for result in results:
        sizes = {"num_rows": result["rows"], "n": result["n"], "k": result["k"]}
        config = asdict(scaled8_config(**sizes, block_k=128, has_tma=True))
        (chosen,) = (cut["us"] for cut in result["cuts"] if cut["config"] == config)
        assert chosen <= 1.05 * result["best_us"], sizes


def test_splits_of_k_give_way_to_tiles_that_fill_the_device():
    def config(num_rows, n=4096):
        return scaled8_config(num_rows=num_rows, n=n, k=4096, block_k=128)

    assert [config(rows).block_m for rows in (1, 9, 33, 200)] == [8, 16, 64, 64]
    assert config(64).is_few  # 32 tiles of 64 x 128
    assert config(64).splits == 4
    for found in (config(64, n=6144), config(65), config(257)):
        assert not found.is_few
        assert found.splits == 1


def test_rows_up_to_a_power_of_two_have_one_kernel():
    for n in (64, 640, 4096, 28672):
        for most in (16, 64, 128, 256):
            sizes = {"n": n, "k": 4096, "block_k": 128}
            found = {scaled8_config(num_rows=rows, **sizes) for rows in range(most // 2 + 1, most + 1)}
            assert len(found) == 1


def test_integers_are_rounded_to_even_and_saturate():
    values, scales = w8a8.quantize_by_int8(torch.tensor([[0.5, 1.5, -0.5, 2.4, 300.0, -300.0]]), torch.tensor(1.0))
    assert values.tolist() == [[0, 2, 0, 2, 127, -127]]
    assert scales.tolist() == [1.0]
    values, scales = w8a8.quantize_rows_int8(torch.tensor([[2.0, -4.0], [0.0, 0.0]]))
    assert values.tolist() == [[64, -127], [0, 0]]
    assert scales[0] == pytest.approx(4 / 127)


class _NoFloat64(TorchDispatchMode):
    """Fails at a value of 64 bits, which Apple GPUs do not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        assert not (torch.is_tensor(out) and out.dtype == torch.float64), func
        return out


@pytest.mark.parametrize("k", [1, 1024, 1025, 4100])
def test_sums_of_integers_are_exact_without_float64(k):
    x, w = torch.randint(-127, 128, (3, k)).to(torch.int8), torch.randint(-128, 128, (5, k)).to(torch.int8)
    x[0], w[0], w[1] = 127, -128, 127  # the largest sums
    ones = [torch.ones(n) for n in (3, 5)]
    with _NoFloat64():
        out = w8a8.int8_linear(x, ones[0], w, ones[1], None, torch.float32)
    assert torch.equal(out, (x.long() @ w.long().T).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_err_as_the_rounding_of_activations_does(dtype):
    x, dense, bias = torch.randn(5, 256).to(dtype), torch.randn(24, 256), torch.randn(24).to(dtype)
    w, scales = quantize_blocks(dense, 128, 128)
    exact = x.double() @ dequantize_blocks(w, scales, 128, 128).double().T + bias.double()
    out = Fp8BlockLinear()(x, w, scales, bias, rows=128, columns=128)
    assert out.dtype == dtype
    assert 0.0 < (out.double() - exact).norm() / exact.norm() < 0.04
    w, scales = w8a8.quantize_rows_int8(dense)
    exact = x.double() @ (w.double() * scales[:, None].double()).T + bias.double()
    for input_scale in (None, torch.tensor(float(x.abs().amax()) / 127)):
        out = Int8Linear()(x, w, scales, bias, input_scale=input_scale)
        assert 0.0 < (out.double() - exact).norm() / exact.norm() < 0.02


SCRIPT = """
from dataclasses import replace

from kernels.linear.scaled8_configs import scaled8_config
from kernels.linear.triton_fp8 import quantize_groups
from kernels.linear.splits import SplitKScratch
from kernels.linear import triton_scaled8

k = 1024
scratch = SplitKScratch.allocate(torch.device("cpu"))
dtype = torch.bfloat16
with collect_kernels() as kernels:
    for num_rows, n in ((1, 4096), (16, 4096), (64, 4096), (64, 6144), (512, 4096)):
        integers, floats = torch.zeros(n, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.float8_e4m3fn)
        blocks, rows = torch.zeros(n // 128, k // 128), torch.zeros(n)
        x = torch.zeros(num_rows, k, dtype=dtype)
        options = {"dtype": dtype, "pdl": True}
        config = scaled8_config(num_rows=num_rows, n=n, k=k, block_k=128)
        given = quantize_groups(x, 128)
        triton_scaled8.blocks_linear(
            *given, floats, blocks, None, scratch, rows=128, columns=128, config=config, **options
        )
        rounded = triton_scaled8.quantize_rows_int8(x, pdl=True)
        triton_scaled8.int8_linear(*rounded, integers, rows, None, scratch, config=config, **options)
    config = replace(config, has_tma=True)
    triton_scaled8.int8_linear(*rounded, integers, rows, None, scratch, config=config, **options)
    triton_scaled8.blocks_linear(*given, floats, blocks, None, scratch, rows=128, columns=128, config=config, **options)
"""


@pytest.mark.full
@needs_triton
def test_every_cut_compiles_and_fits(tmp_path):
    compiled = compile_kernels(SCRIPT, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name in ("_few_rows_kernel", "_tiled_kernel")]
    assert len(products) == 2 * 5 + 2
    for kernel in products:
        assert kernel.shared_bytes <= HOPPER_SHARED_BYTES, compiled
    assert all(kernel.has_wide_loads for kernel in products[:-2]), compiled  # the last two by the copy engine
    assert [kernel.has_wgmma for kernel in products if kernel.name == "_tiled_kernel"] == [True] * 6
