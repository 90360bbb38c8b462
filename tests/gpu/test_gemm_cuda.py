"""The GEMM for 65 to 256 rows against float64: every cut used, odd sizes, graphs, the same bits again."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.unit.kernels.triton_cases.ragged import relative_error

pytest.importorskip("kernels.gluon_gemm", reason="needs triton 3.6", exc_type=ImportError)
from kernels.dense_linear import DenseLinear
from kernels.gluon_gemm import _TABLE, GemmCut, gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
CUTS = sorted({cut for steps in _TABLE.values() for _, cut in steps if cut is not None}, key=lambda cut: cut.block_n)


def _randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("num_rows", "n_tiles", "k"), [(65, 5, 1024), (128, 2, 192), (200, 3, 3072), (256, 40, 64)])
def test_the_gemm_equals_the_product_however_it_is_cut(cut, num_rows, n_tiles, k, dtype):
    n = n_tiles * cut.block_n
    x, w = _randn(num_rows, k + 8, dtype=dtype)[:, :k], _randn(n, k, dtype=dtype)
    expected = x.double() @ w.double().T
    for pdl in (False, True):
        out = gemm(x, w, cut=cut, pdl=pdl)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert torch.equal(out, gemm(x, w, cut=cut, pdl=pdl))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_rows_past_the_last_are_not_written(cut: GemmCut, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = _randn(130, 1024), _randn(cut.block_n, 1024)
    outputs = torch.full((192, cut.block_n), float("nan"), dtype=x.dtype, device="cuda")
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: outputs[: shape[0]])
    gemm(x, w, cut=cut)
    assert outputs[:130].isfinite().all()
    assert outputs[130:].isnan().all()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_chain_in_a_graph_follows_its_inputs(cut: GemmCut) -> None:
    """Kernels that begin inside one another must not read x too early, nor write over what is still read."""
    from kernels.triton_elementwise import rms_norm

    x, ws = _randn(256, 1024), [_randn(1024, 1024) * 0.1 for _ in range(12)]
    scale = torch.ones(1024, dtype=x.dtype, device="cuda")

    def chain(multiply):
        hidden = x
        for first, second in zip(ws[::2], ws[1::2], strict=True):
            hidden = multiply(multiply(rms_norm(hidden, scale, 1e-6, pdl=True), first), second)
        return hidden

    def ours():
        return chain(lambda a, w: gemm(a, w, cut=cut, pdl=True))

    ours()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours()
    for _ in range(20):
        x.copy_(_randn(256, 1024))
        graph.replay()
        assert relative_error(out, chain(functional.linear).double()) < 3e-2
        again = out.clone()
        graph.replay()
        assert torch.equal(out, again)


@pytest.mark.parametrize(("n", "k"), [*_TABLE, (1024, 1024)])
def test_a_dense_linear_is_right_at_every_number_of_rows(n: int, k: int) -> None:
    linear, w, bias = DenseLinear(), _randn(n, k), _randn(n)
    for num_rows in (8, 64, 65, 80, 128, 129, 192, 193, 256, 257, 600):
        x = _randn(num_rows, k)
        expected = x.double() @ w.double().T
        assert relative_error(linear(x, w, None), expected) < TOLERANCE[torch.bfloat16]
        assert relative_error(linear(x, w, bias), expected + bias.double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("n", "k"), list(_TABLE))
def test_a_dense_linear_takes_the_cut_of_the_table(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import dense_linear

    taken = []
    monkeypatch.setattr(dense_linear, "gemm", lambda x, w, *, cut, pdl: taken.append((x.shape[0], cut)))
    linear, w = DenseLinear(), _randn(n, k)
    for num_rows in (64, 128, 192, 256, 257):
        linear(_randn(num_rows, k), w, None)
        linear(_randn(num_rows, k), w, _randn(n))  # with a bias: cuBLAS
    chosen = [(rows, next(cut for max_rows, cut in _TABLE[n, k] if rows <= max_rows)) for rows in (128, 192, 256)]
    assert taken == [(rows, cut) for rows, cut in chosen if cut is not None]
