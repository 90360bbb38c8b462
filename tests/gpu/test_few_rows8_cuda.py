"""Products of few rows of 8 bits on the device against float64: every number of rows, odd sizes, replayed graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.dispatch import is_hopper
from kernels.linear import eight_bits, reference, w8a8
from kernels.linear.eight_bits import Fp8BlockLinear, Int8Linear
from kernels.linear.few_rows_configs import FewRowsConfig
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.splits import SplitKScratch

pytestmark = pytest.mark.gpu
KINDS = ["rows", "blocks", "integers"]
DTYPES = [torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 8, 9, 16, 17, 33, 64, 65]
# Of Llama 3.1 8B, and some that fit no tile, step or line of 128 inputs
SHAPES = [(6144, 4096), (4096, 14336), (4000, 14336), (1000, 2880), (28672, 2880), (37, 144), (16, 16)]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # more than rounding a row of one output to its dtype errs
Scaled = tuple[torch.Tensor, torch.Tensor]
Product = Callable[[RoundedRows, Scaled, torch.Tensor | None], torch.Tensor]


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _rows(num_rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different sizes."""
    return (_randn(num_rows, k) * torch.logspace(-1, 1, num_rows, device="cuda")[:, None]).to(dtype)


def _rounding(kind: str) -> Rounding:
    return Rounding(128 if kind == "blocks" else None, dtype=torch.int8 if kind == "integers" else reference.FP8)


def _weight(kind: str, n: int, k: int, *, rows: int = 128) -> Scaled:
    dense = _randn(n, k) * (torch.rand(n, 1, device="cuda") + 0.1)
    if kind == "blocks":
        return reference.quantize_blocks(dense, rows, 128)
    return w8a8.quantize_rows_int8(dense) if kind == "integers" else reference.quantize_rows(dense)


def _product(kind: str, *, rows: int = 128) -> Product:
    """The product as it is served."""
    by_block, by_integers = Fp8BlockLinear(), Int8Linear()

    def multiply(x: RoundedRows, w: Scaled, bias: torch.Tensor | None) -> torch.Tensor:
        if kind == "blocks":
            return by_block.multiply(x, *w, bias, rows=rows, columns=128)
        if kind == "integers":
            return by_integers.multiply(x, *w, bias)
        return eight_bits.rows_linear(x.values, x.scales, *w, bias, x.dtype)

    return multiply


def _wide_rows(kind: str, x: RoundedRows) -> torch.Tensor:
    scales = x.scales.double()
    if kind == "blocks":
        return x.values.double() * scales.repeat_interleave(128, 1)[:, : x.values.shape[1]]
    return x.values.double() * scales[:, None]


def _wide_weight(kind: str, w: Scaled, *, rows: int = 128) -> torch.Tensor:
    return reference.dequantize_blocks(*w, rows, 128).double() if kind == "blocks" else w[0].double() * w[1][:, None]


def _worst_row(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row; NaN if any element is NaN."""
    return float(((out.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


def _tolerance(kind: str, num_rows: int, dtype: torch.dtype) -> float:
    """Tensor cores add e4m3 with about 14 bits, 128 inputs at a time. By row, more of them give bf16."""
    if kind == "integers" or num_rows == 1:
        return TOLERANCE[dtype]
    if kind == "rows" and num_rows > (64 if is_hopper(torch.device("cuda", 0)) else 16):
        return 8e-3
    return 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_right_and_equal_in_each_run(n: int, k: int, kind: str) -> None:
    w, multiply = _weight(kind, n, k), _product(kind)
    wide = _wide_weight(kind, w).T
    for num_rows in ROWS:
        for dtype in DTYPES:
            x = eight_bits.round_rows(_rows(num_rows, k, dtype), _rounding(kind))
            exact = _wide_rows(kind, x) @ wide
            for bias in (None, _randn(n, dtype=dtype)):
                out = multiply(x, w, bias)
                assert out.dtype == dtype
                error = _worst_row(out, exact if bias is None else exact + bias.double())
                assert error < _tolerance(kind, num_rows, dtype), (num_rows, dtype, bias is None)
                assert torch.equal(multiply(x, w, bias), out)


@pytest.mark.parametrize("num_rows", [1, 5, 33])
def test_a_single_scale_is_that_of_all_rows(num_rows: int) -> None:
    x, scale = _randn(num_rows, 2880, dtype=torch.bfloat16), torch.tensor(0.02, device="cuda")
    for kind, quantize in (("rows", reference.quantize_by), ("integers", w8a8.quantize_by_int8)):
        w = _weight(kind, 1000, 2880)
        values, scales = quantize(x, scale)
        outs = [_product(kind)(RoundedRows(values, each, x.dtype), w, None) for each in (scales, scales.contiguous())]
        assert torch.equal(*outs)


@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 32])
def test_scales_of_blocks_of_fewer_rows(num_rows: int, rows: int) -> None:
    n, k = 1000, 2880
    w, bias = _weight("blocks", n, k, rows=rows), _randn(n, dtype=torch.bfloat16)
    x = eight_bits.round_rows(_rows(num_rows, k, torch.bfloat16), Rounding(128))
    exact = _wide_rows("blocks", x) @ _wide_weight("blocks", w, rows=rows).T + bias.double()
    out = _product("blocks", rows=rows)(x, w, bias)
    assert _worst_row(out, exact) < _tolerance("blocks", num_rows, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 9, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(1000, 2880), (200, 14336), (6144, 1024)])
def test_every_cut_of_tiles_leaves_its_scratch_as_it_was(n: int, k: int, num_rows: int, kind: str) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the kernel runs on Hopper alone")
    from kernels.linear.gluon_few_rows import few_rows_linear

    w, bias = _weight(kind, n, k), _randn(n, dtype=torch.bfloat16)
    x = eight_bits.round_rows(_rows(num_rows, k, torch.bfloat16), _rounding(kind))
    exact = _wide_rows(kind, x) @ _wide_weight(kind, w).T + bias.double()
    scratch = SplitKScratch.allocate(torch.device("cuda"))
    scratch.partial.fill_(float("nan"))
    for tile in ((64, 1, 3, 4, 128), (64, 2, 2, 4, 128), (128, 2, 2, 8, 128)):
        for is_whole in (True, False):
            for pdl in (True, False):
                out = few_rows_linear(
                    x.values, x.scales, *w, bias, FewRowsConfig(*tile, is_whole),
                    dtype=torch.bfloat16, rows_per_scale=128 if kind == "blocks" else 0, scratch=scratch, pdl=pdl,
                )  # fmt: skip
                assert _worst_row(out, exact) < 2 * TOLERANCE[torch.bfloat16], (tile, is_whole, pdl)
                assert not scratch.arrivals.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_row_alone(bad: float, kind: str) -> None:
    w, multiply = _weight(kind, 1000, 2880), _product(kind)
    for num_rows in (1, 3, 9, 33):
        x = _randn(num_rows, 2880, dtype=torch.bfloat16)
        x[num_rows // 2, 2879] = bad
        is_finite = multiply(eight_bits.round_rows(x, _rounding(kind)), w, None).isfinite()
        assert not is_finite[num_rows // 2].any()
        assert is_finite.sum() == (num_rows - 1) * 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 33, 64, 65])
def test_norms_and_products_that_begin_early_are_replayed_on_new_rows(num_rows: int, kind: str) -> None:
    """Each kernel is launched before the one in front of it has ended, and all reuse the memory of earlier ones."""
    size, eps, dtype = 4096, 1e-5, torch.bfloat16
    weights = [_weight(kind, size, size) for _ in range(4)]
    norm, multiply = _randn(size, dtype=dtype), _product(kind)
    x, residual = _randn(num_rows, size, dtype=dtype), _randn(num_rows, size, dtype=dtype)

    def layers() -> torch.Tensor:
        out, total = x, residual
        for w in weights:
            rounded, total = eight_bits.add_rms_norm_rounded(out, total, norm, eps, _rounding(kind))
            out = multiply(rounded, w, None)
        return out

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(5):
        x.copy_(_rows(num_rows, size, dtype))
        residual.copy_(_rows(num_rows, size, dtype))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert out.isfinite().all()
        assert torch.equal(out, layers())
