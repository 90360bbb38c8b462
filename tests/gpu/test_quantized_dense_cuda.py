"""4-bit floats, 8-bit integers and FP8 blocks on the device: products against float64, models against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quantization_schemes import SCHEMES
from benchmarks.quantized_linear_kinds import KINDS
from benchmarks.quantized_weights import requantize, store_of
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from kernels.dispatch import is_hopper
from kernels.linear import reference, w8a8
from kernels.linear.eight_bits import Fp8BlockLinear, Int8Linear
from kernels.linear.few_rows_configs import FewRowsConfig, Row8Config
from kernels.linear.float4 import dequantize_float4
from kernels.linear.lut4_configs import float4_gemm_config
from kernels.linear.ops import Float4Linear
from kernels.linear.planes import dequantize_planes
from kernels.linear.scaled8_configs import BlocksConfig
from models.build import build
from models.config.model_config import ModelConfig
from models.weights.weights import Weights
from server.config.model_source import DEMO_FOLDER
from tests.support.models_harness import SINGLE, PagedRunner
from tests.support.quantized_checkpoints import logits_of
from tests.unit.kernels.triton_cases.float4_problem import float4_problem, planes_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
FLOAT4 = ["mxfp4", "nvfp4"]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
ROWS = [1, 3, 8, 9, 16, 17, 33, 64, 65, 128, 256, 257, 300]
# Of Llama 3.1 8B, of the demo model, and one that fits no tile
SHAPES = [(6144, 4096), (640, 320), (1000, 1088)]
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "shapes"
MODELS = ["mxfp4", "nvfp4", "w8a8", "fp8-blocks"]


def _randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FLOAT4)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_of_4_bit_floats(n, k, kind, dtype):
    weight, dense = float4_problem(n, k, kind, dtype=dtype, device="cuda")
    linear, bias = Float4Linear(), _randn(n, dtype=dtype)
    for num_rows in ROWS:
        x = _randn(num_rows, k, dtype=dtype)
        # for many rows weights are rounded to 16 bits with their factors
        assert relative_error(linear(x, weight, bias), x.double() @ dense.T + bias.double()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("kind", FLOAT4)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_of_4_bit_floats_in_planes(n, k, kind):
    weight, dense = planes_problem(n, k, kind, device="cuda")
    linear, bias = Float4Linear(), _randn(n, dtype=torch.bfloat16)
    for num_rows in ROWS:
        x = _randn(num_rows, k, dtype=torch.bfloat16)
        error = relative_error(linear(x, weight, bias), x.double() @ dense.T + bias.double())
        assert error < 2 * TOLERANCE[torch.bfloat16], num_rows


@pytest.mark.parametrize("kind", FLOAT4)
def test_every_4_bit_float_in_planes_gives_its_value(kind):
    from kernels.linear.planes_configs import RULE, config_of
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_planes import dequantize, planes_gemm

    weight, dense = planes_problem(256, 512, kind, device="cuda")
    scratch, identity = (
        SplitKScratch.allocate(torch.device("cuda")),
        torch.eye(512, device="cuda", dtype=torch.bfloat16),
    )
    for _, block_m, _, tile in RULE:
        config = config_of(tile, block_m=block_m, num_rows=block_m, n=256, k=512)
        found = [planes_gemm(rows, weight, None, scratch, config=config, pdl=True) for rows in identity.split(block_m)]
        expected = dense.T.float().bfloat16()
        torch.testing.assert_close(torch.cat(found), expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=0)
    for dtype in (*DTYPES, torch.float32):
        assert torch.equal(dequantize(weight, dtype), dequantize_planes(weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FLOAT4)
def test_every_4_bit_float_and_scale_gives_its_value(kind, dtype):
    """Rows of the identity matrix as x: each weight stands alone, so a value in the wrong place shows."""
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_float4 import float4_gemm

    weight, dense = float4_problem(256, 512, kind, dtype=dtype, device="cuda")
    scratch, identity = SplitKScratch.allocate(torch.device("cuda")), torch.eye(512, device="cuda", dtype=dtype)
    expected = dense.T.float().to(dtype)
    for num_rows in (8, 16, 32, 64):
        for is_shared in (True, False) if num_rows == 8 else (True,):
            sizes = {"num_rows": num_rows, "n": 256, "k": 512, "block": weight.block}
            config = float4_gemm_config(**sizes, is_shared=is_shared)
            found = [
                float4_gemm(rows, weight, None, scratch, config=config, pdl=True) for rows in identity.split(num_rows)
            ]
            torch.testing.assert_close(torch.cat(found), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("kind", FLOAT4)
def test_matrices_of_4_bit_floats_unpack_to_the_bit(kind, dtype):
    from kernels.linear.triton_float4 import dequantize

    for stored in DTYPES:
        weight, _ = float4_problem(300, 4032, kind, dtype=stored, device="cuda")
        assert torch.equal(dequantize(weight, dtype), dequantize_float4(weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_of_integers(n, k, is_static, dtype):
    w = w8a8.quantize_rows_int8(_randn(n, k))
    linear, bias = Int8Linear(), _randn(n, dtype=dtype)
    scale = torch.tensor(0.03, device="cuda") if is_static else None
    for num_rows in ROWS:
        x = _randn(num_rows, k, dtype=dtype)
        values, scales = w8a8.quantize_rows_int8(x) if scale is None else w8a8.quantize_by_int8(x, scale)
        wide = values.double() * scales[:, None].double()
        expected = wide @ (w[0].double() * w[1][:, None].double()).T + bias.double()
        assert relative_error(linear(x, *w, bias, input_scale=scale), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (576, 128), (130, 2176)])
def test_many_rows_of_fp8_blocks_have_a_kernel_for_hopper(n, k, has_bias):
    from kernels.linear import gluon_blocks

    w, bias = reference.quantize_blocks(_randn(n, k), 128, 128), _randn(n, dtype=torch.bfloat16) if has_bias else None
    configs = [BlocksConfig(), BlocksConfig(part=64, parts=2, num_stages=3, group=3)]
    for num_rows in (1, 64, 65, 127, 128, 129, 257, 1000, 4097):
        x = reference.quantize_groups(
            _randn(num_rows, k) * torch.logspace(-2, 2, num_rows, device="cuda")[:, None], 128
        )
        assert gluon_blocks.takes(x[0], w[0], rows=128, columns=128)
        expected = reference.blocks_linear(*x, *w, bias, torch.float32, rows=128, columns=128)
        for config in configs:
            for pdl in (False, True):
                out = gluon_blocks.blocks_linear(*x, *w, bias, dtype=torch.bfloat16, config=config, pdl=pdl)
                assert relative_error(out, expected.double()) < 6e-3, (num_rows, config)
                assert relative_error(out[-1], expected[-1].double()) < 6e-3, (num_rows, config)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("num_rows", "k"), [(1, 4096), (300, 14336), (5, 1000), (2, 64)])
def test_activations_become_integers_as_specified(num_rows, k, dtype):
    from kernels.linear import triton_scaled8

    x, scale = _randn(num_rows, k, dtype=dtype), torch.tensor(0.01, device="cuda")
    x[-1, : k // 2] = 0
    exact = x.cpu()  # on CUDA torch divides by a number as by its reciprocal, so that ties round to another side
    for found, expected in (
        (triton_scaled8.quantize_rows_int8(x), w8a8.quantize_rows_int8(exact)),
        (triton_scaled8.quantize_by_int8(x, scale), w8a8.quantize_by_int8(exact, scale.cpu())),
    ):
        assert torch.equal(found[1].cpu(), expected[1])
        assert torch.equal(found[0].cpu(), expected[0])


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256, 300])
@pytest.mark.parametrize("name", KINDS)
def test_candidates_of_the_sweep_are_right(name, num_rows):
    """The served one, which fits, and of the others each third: splits, tiles and stages that are not served.

    Few of the others may fit, or none: with 4-bit floats, tiles of 16 to 48 KB are refused beside the lookup tables.
    """
    from triton.runtime.errors import TritonError

    kind, (n, k) = KINDS[name], (1536, 2048)
    x, device = _randn(num_rows, k, dtype=torch.bfloat16), torch.device("cuda")
    weight, scratch = kind.make(n, k, x.dtype, device), kind.scratch(device)
    expected = kind.exact(x, weight)
    candidates = kind.candidates(num_rows, n, k)
    if not is_hopper(torch.device("cuda", 0)):
        candidates = [config for config in candidates if not isinstance(config, Row8Config | FewRowsConfig)]
    served, *others = candidates
    assert relative_error(kind.run(x, weight, served, scratch), expected) < 6e-3, served
    for config in others[2::3]:
        try:
            out = kind.run(x, weight, config, scratch)
        except (TritonError, RuntimeError) as error:  # does not fit the device: the sweep leaves it out
            print("skipped", config, type(error).__name__)
            continue
        assert relative_error(out, expected) < 6e-3, config


@pytest.mark.parametrize("num_rows", [1, 16, 64, 300, 2000])
def test_products_are_captured_in_graphs(num_rows):
    n, k = 1024, 2048
    x = _randn(num_rows, k, dtype=torch.bfloat16)
    blocks, integers = reference.quantize_blocks(_randn(n, k), 128, 128), w8a8.quantize_rows_int8(_randn(n, k))
    float4, by_blocks, by_integers = Float4Linear(), Fp8BlockLinear(), Int8Linear()
    mxfp4, nvfp4 = (float4_problem(n, k, kind, dtype=x.dtype, device="cuda")[0] for kind in FLOAT4)
    products = [
        lambda: float4(x, mxfp4, None),
        lambda: float4(x, nvfp4, None),
        lambda: by_blocks(x, *blocks, None, rows=128, columns=128),
        lambda: by_integers(x, *integers, None, input_scale=None),
    ]
    for product in products:
        expected = product()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = product()
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_demo_model_gives_nearly_the_logits_of_the_cpu(name, tmp_path):
    section = SCHEMES[name].section
    folder = requantize(DEMO_FOLDER, tmp_path / name, store_of(section, lambda _: 1.0), section)
    config, device = ModelConfig.from_folder(folder), torch.device("cuda")
    ids = [i * 37 % 6000 + 3 for i in range(80)]
    with torch.inference_mode():
        model = build(config, Weights.from_folder(folder, device=device, dtype=torch.bfloat16), SINGLE)
    for prompt in (ids, ids[:9]):
        expected = logits_of(folder, prompt=prompt)
        runner = PagedRunner(model, config, block_size=16, dtype=torch.bfloat16, device=device)
        (logits,) = runner.step([(runner.add_row(), prompt)])
        assert relative_error(logits.float(), expected.double()) < 0.1


@pytest.mark.parametrize("name", MODELS)
def test_a_large_model_generates_from_dummy_weights(name):
    config = EngineConfig(
        model=str(PUBLISHED / f"llama-3.1-8b-{name}"), load_format="dummy", kv_cache_memory_bytes=4 * 1024**3
    )
    offline = OfflineEngine.load(config)
    offline.self_test()
    params = [SamplingParams(max_tokens=16, temperature=0.0)] * 3
    generations = offline.generate([[1, 5, 9], [7] * 300, [4]], params)
    assert all(generation.error is None and len(generation.token_ids) == 16 for generation in generations)
