"""FP8 and bitsandbytes on the device: kernels against their specifications, whole models against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.dispatch import is_hopper
from kernels.linear import reference
from kernels.linear.ops import Linear4Bit, linear_int8
from kernels.linear.reference import make_lut4_weight
from models.build import build
from models.config.model_config import ModelConfig
from models.weights.weights import Weights
from server.config.model_source import DEMO_FOLDER
from tests.support.models_harness import SINGLE, PagedRunner
from tests.support.quantized_checkpoints import PROMPT, logits_of
from tests.unit.engine.test_real_model import make_engine, mixed_params, prompts, tokens
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
ROWS = [1, 2, 7, 16, 33, 64]
# Of Llama 3.1 8B, of the demo model, and some that fit no tile
SHAPES = [(6144, 4096), (4096, 14336), (28672, 4096), (640, 320), (1000, 1088)]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
BITSANDBYTES = Path(__file__).parents[1] / "unit" / "models" / "bitsandbytes_checkpoints"


def _randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def _reference(x, w, bias):
    """In float64, of what both hold after they were rounded."""
    return x.double() @ w.double().T + (0 if bias is None else bias.double())


def _captured(product):
    """The same from a replayed CUDA graph."""
    product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("num_rows", "k"), [(1, 4096), (300, 14336), (5, 1000), (2, 64)])
def test_activations_become_e4m3_as_specified(num_rows, k, dtype):
    from kernels.linear import triton_fp8 as triton_quant_fp8

    x = _randn(num_rows, k, dtype=dtype)
    x[0] *= 50
    x[-1, : k // 2] = 0
    scale = torch.tensor(0.01, device="cuda")
    exact = x.cpu()  # on CUDA torch divides by a number as by its reciprocal, so that ties round to another side
    for found, expected in (
        (triton_quant_fp8.quantize_rows(x), reference.quantize_rows(exact)),
        (triton_quant_fp8.quantize_by(x, scale), reference.quantize_by(exact, scale.cpu())),
        (triton_quant_fp8.quantize_groups(x, 128), reference.quantize_groups(exact, 128)),
    ):
        assert torch.equal(found[1].cpu(), expected[1])
        assert torch.equal(found[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row_or_group_as_specified(bad):
    from kernels.linear import triton_fp8 as triton_quant_fp8

    x = _randn(3, 5000, dtype=torch.bfloat16)
    x[1, 4321] = bad
    scale = torch.tensor(0.01, device="cuda")
    exact = x.cpu()
    for found, expected in (
        (triton_quant_fp8.quantize_rows(x), reference.quantize_rows(exact)),
        (triton_quant_fp8.quantize_by(x, scale), reference.quantize_by(exact, scale.cpu())),
        (triton_quant_fp8.quantize_groups(x, 128), reference.quantize_groups(exact, 128)),
    ):
        for values, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(values.cpu().float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [*ROWS, 65, 128, 300])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_e4m3_products_scaled_by_row(n, k, num_rows, dtype):
    from kernels.linear import eight_bits

    x, w = eight_bits.quantize_rows(_randn(num_rows, k, dtype=dtype)), reference.quantize_rows(_randn(n, k))
    wide = (x[0].double() * x[1][:, None].double(), w[0].double() * w[1][:, None].double())
    # tensor cores add e4m3 with about 14 bits; torch's product gives bf16
    most = 64 if is_hopper(x[0].device) else 16
    tolerance = TOLERANCE[dtype] if num_rows == 1 else 2 * TOLERANCE[dtype] if num_rows <= most else 6e-3
    for bias in (None, _randn(n, dtype=dtype)):
        out = eight_bits.rows_linear(*x, *w, bias, dtype)
        assert out.dtype == dtype
        assert relative_error(out, _reference(*wide, bias)) < tolerance


def _microseconds(product, num_launches=50):
    """The time of a product in a row of launches, on warm clocks."""
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(num_launches):
            product()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_launches)
    return min(times)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096)])
def test_a_row_depends_on_the_rows_beside_it_no_more_in_fp8_than_in_bf16(n, k, monkeypatch):
    """The error against float64 of one row among others. Run with -s: prints it with fast sums and exact ones."""
    from kernels.linear import eight_bits

    torch.manual_seed(0)
    x, dense = _randn(1024, k, dtype=torch.bfloat16), _randn(n, k)
    values, scales = eight_bits.quantize_rows(x)
    w, w_scales = reference.quantize_rows(dense)
    exact = (values[:16].double() * scales[:16, None].double()) @ (w.double() * w_scales[:, None].double()).T
    exact_bf16 = x[:16].double() @ dense.bfloat16().double().T
    errors = {}
    for num_rows in (16, 17, 64, 128, 256, 257, 512, 1024):
        for name, most in (("fast", 0), ("exact", 1 << 30)):
            monkeypatch.setattr(eight_bits, "_EXACT_ROWS", most)
            args = values[:num_rows], scales[:num_rows], w, w_scales, None, torch.bfloat16
            out = eight_bits.rows_linear(*args)
            errors[num_rows, name] = relative_error(out[:16], exact)
            took = _microseconds(lambda args=args: eight_bits.rows_linear(*args))
            print(f"n={n} k={k} rows={num_rows} sums={name} error={errors[num_rows, name]:.2e} us={took:.1f}")
        plain = torch.nn.functional.linear(x[:num_rows], dense.bfloat16())
        errors[num_rows, "bf16"] = relative_error(plain[:16], exact_bf16)
        print(f"n={n} k={k} rows={num_rows} bf16 error={errors[num_rows, 'bf16']:.2e}")
    for num_rows in (17, 64, 128, 256):
        assert errors[num_rows, "exact"] < 1.2 * max(errors[16, "exact"], errors[num_rows, "bf16"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [*ROWS, 65, 128, 300])
@pytest.mark.parametrize("rows", [128, 64])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_e4m3_products_scaled_by_block(n, k, rows, num_rows, dtype):
    from kernels.linear import eight_bits

    dense = _randn(num_rows, k, dtype=dtype)
    x = eight_bits.quantize_groups(dense, 128)
    w = reference.quantize_blocks(_randn(n, k) * torch.rand(n, 1, device="cuda"), rows, 128)
    linear = eight_bits.Fp8BlockLinear()
    wide_x = x[0].double() * x[1].double().repeat_interleave(128, 1)[:, :k]
    wide_w = reference.dequantize_blocks(*w, rows, 128)
    for bias in (None, _randn(n, dtype=dtype)):
        out = linear(dense, *w, bias, rows=rows, columns=128)
        assert relative_error(out, _reference(wide_x, wide_w, bias)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [*ROWS, 65, 128, 300])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_8bit_products(n, k, num_rows, dtype):
    x, integers = _randn(num_rows, k, dtype=dtype), reference.quantize_int8(_randn(n, k))
    for bias in (None, _randn(n, dtype=dtype)):
        expected = _reference(x, reference.dequantize_int8(*integers, torch.float32), bias)
        assert relative_error(linear_int8(x, *integers, bias), expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_8bit_matrices_unpack_as_specified(dtype):
    from kernels.linear import triton_bitsandbytes

    integers = reference.quantize_int8(_randn(300, 4032))
    out = triton_bitsandbytes.dequantize_int8(*integers, dtype)
    torch.testing.assert_close(out, reference.dequantize_int8(*integers, dtype), rtol=1e-2, atol=0)


@pytest.mark.parametrize("num_rows", [1, 16, 64, 300])
def test_products_are_captured_in_graphs(num_rows):
    from kernels.linear import eight_bits

    n, k = 1024, 2048
    x, w, table = _randn(num_rows, k).bfloat16(), _randn(n, k), torch.tensor(reference.NF4_TABLE, device="cuda")
    by_row, by_block = reference.quantize_rows(w), reference.quantize_blocks(w, 128, 128)
    codes, integers = make_lut4_weight(*reference.quantize_nf4(w), table, x.dtype), reference.quantize_int8(w)
    linear_4bit, by_blocks = Linear4Bit(), eight_bits.Fp8BlockLinear()
    products = [
        lambda: eight_bits.rows_linear(*eight_bits.quantize_rows(x), *by_row, None, x.dtype),
        lambda: eight_bits.rows_linear(*eight_bits.quantize_by(x, scale), *by_row, None, x.dtype),
        lambda: by_blocks(x, *by_block, None, rows=128, columns=128),
        lambda: linear_4bit(x, codes, None),
        lambda: linear_int8(x, *integers, None),
    ]
    scale = torch.tensor(0.01, device="cuda")
    for product in products:
        assert torch.equal(_captured(product), product())


@pytest.mark.parametrize("name", ["fp8", "bitsandbytes-nf4", "bitsandbytes-int8"])
def test_the_demo_model_gives_nearly_the_logits_of_the_cpu(name):
    config = ModelConfig.from_folder(DEMO_FOLDER).quantized(name)
    ids = [i * 37 % 6000 + 3 for i in range(80)]
    for prompt in (ids, ids[:9]):  # more rows than are streamed, and fewer
        expected = logits_of(DEMO_FOLDER, name, prompt=prompt)
        device = torch.device("cuda")
        with torch.inference_mode():
            weights = Weights.from_folder(DEMO_FOLDER, device=device, dtype=torch.bfloat16)
            model = build(config, weights, SINGLE)
        runner = PagedRunner(model, config, block_size=16, dtype=torch.bfloat16, device=device)
        (logits,) = runner.step([(runner.add_row(), prompt)])
        assert relative_error(logits.float(), expected.double()) < 0.1


@pytest.mark.parametrize("name", ["nf4", "nf4_double", "fp4_as_bfloat16", "int8"])
def test_bitsandbytes_checkpoints_give_the_logits_of_their_weights(name):
    torch.backends.cuda.matmul.allow_tf32 = False
    config, device = ModelConfig.from_folder(BITSANDBYTES / name), torch.device("cuda")
    expected = load_file(BITSANDBYTES / name / "logits.safetensors")["logits"]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        with torch.inference_mode():
            model = build(config, Weights.from_folder(BITSANDBYTES / name, device=device, dtype=dtype), SINGLE)
        runner = PagedRunner(model, config, dtype=dtype, device=device)
        (logits,) = runner.step([(runner.add_row(), PROMPT)])
        assert relative_error(logits.float(), expected.double()) < tolerance


@pytest.mark.parametrize("name", ["fp8", "bitsandbytes-nf4", "bitsandbytes-int8"])
def test_graphs_and_depth_do_not_change_the_tokens(name):
    runs = []
    for enforce_eager, depth in ((True, 1), (True, 2), (False, 1), (False, 2)):
        engine, transport = make_engine(
            DEMO_FOLDER,
            device="cuda",
            quantization=name,
            block_size=16,
            overlap_depth=depth,
            enforce_eager=enforce_eager,
            kv_cache_memory_bytes=64 * 1024**2,
        )
        runs.append(tokens(_generate(engine, transport)))
    eager, graphs = runs[0], runs[2]
    assert runs == [eager, eager, graphs, graphs]
    # a graph's rows are padded, and from some number of rows on another product is faster, which rounds otherwise
    num_same = sum(mine == theirs for mine, theirs in zip(eager, graphs, strict=True))
    assert num_same == len(eager) if name == "bitsandbytes-int8" else num_same >= len(eager) // 2


def _generate(engine, transport):
    from engine.core.local_client import generate

    lengths = (5, 17, 30, 61, 12, 40, 23, 35)
    return generate(engine, transport, prompts(*lengths), mixed_params(len(lengths)))
