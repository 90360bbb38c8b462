"""The GEMMs for 65 to 512 rows against float64: every way to cut, odd sizes, graphs, the same bits again."""

from __future__ import annotations

import functools

import pytest
import torch

from kernels.gemm_configs import STREAMED, GemmConfig, GemmScratch, HopperGemmConfig, num_programs
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
HOPPER = [
    HopperGemmConfig(block_n, consumers, splits, num_stages=2 if block_k == 128 else 3, block_k=block_k)
    for block_n in (32, 64, 128, 256) for consumers in (1, 2, 3, 4) for splits in (1, 2, 3, 4, 8)
    for block_k in (64, 128) if block_n * consumers <= 512
]  # fmt: skip
STREAMS = [HopperGemmConfig(128, c, STREAMED, 3) for c in (1, 2, 3, 4)] + [HopperGemmConfig(256, 2, STREAMED, 4)]
TRITON = [GemmConfig(128, 64, 64, splits, 4, 4) for splits in (1, 2, 4)] + [GemmConfig(256, 128, 64, 1, 8, 3)]


def _randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


@functools.cache
def _scratch():
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    scratch = GemmScratch.allocate(torch.device("cuda"), num_sms=num_sms)
    scratch.partial.fill_(float("nan"))
    return scratch


def _check(config, num_rows, n, k, *, dtype=torch.bfloat16, has_bias=True):
    from kernels.triton_gemm import can_gemm, gemm

    x, w = _randn(num_rows, k + 8, dtype=dtype)[:, :k], _randn(n, k, dtype=dtype)
    bias = _randn(n, dtype=dtype) if has_bias else None
    assert can_gemm(x, w)
    assert num_programs(config, num_rows=num_rows, n=n, k=k, num_sms=_scratch().num_sms) > 0
    expected = x.double() @ w.double().T
    if bias is not None:
        expected += bias.double()
    for pdl in (False, True):
        out = gemm(x, w, bias, _scratch(), config=config, pdl=pdl)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert torch.equal(out, gemm(x, w, bias, _scratch(), config=config, pdl=pdl))
    assert not _scratch().arrivals.any()


@pytest.mark.parametrize("config", HOPPER, ids=str)
def test_the_hopper_gemm_equals_the_product_however_it_is_cut(config):
    _check(config, 64 * config.consumers - 3 if config.consumers > 1 else 70, 5 * config.block_n - 8, 1024)


@pytest.mark.parametrize("num_rows", [65, 200, 256])
@pytest.mark.parametrize("config", STREAMS, ids=str)
def test_programs_that_stay_share_the_tiles_at_their_borders(config, num_rows):
    n = (_scratch().num_sms + 7) * config.block_n
    _check(config, num_rows, n, 1024, has_bias=False)
    _check(config, num_rows, 2 * n + 40, 384)


@pytest.mark.parametrize("config", TRITON, ids=str)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(65, 1000, 512), (256, 1024, 2048), (300, 640, 3072)])
def test_the_triton_gemm_equals_the_product(config, num_rows, n, k):
    _check(config, num_rows, n, k)


@pytest.mark.parametrize("config", [HopperGemmConfig(64, 2, 2, 4), STREAMS[1], TRITON[1]], ids=str)
def test_float16_and_more_rows_than_a_tile(config):
    n = 200 * config.block_n if config.splits == STREAMED else 6 * config.block_n
    _check(config, 450, n, 1024, dtype=torch.float16)


@pytest.mark.parametrize("config", [HopperGemmConfig(64, 4, 4, 4), STREAMS[3], TRITON[2]], ids=str)
def test_a_chain_in_a_graph_follows_its_inputs(config):
    """Kernels that begin inside one another must not meet in the scratch, nor read x too early."""
    from kernels.triton_elementwise import rms_norm
    from kernels.triton_gemm import gemm

    n = 133 * config.block_n if config.splits == STREAMED else 1024
    x, ws, back = _randn(256, 1024), [_randn(n, 1024) * 0.1 for _ in range(6)], _randn(1024, n) * 0.1
    scale = torch.ones(1024, dtype=x.dtype, device="cuda")

    def chain(multiply):
        hidden = x
        for w in ws:
            wide = multiply(rms_norm(hidden, scale, 1e-6, pdl=True), w)
            hidden = torch.nn.functional.linear(wide, back)
        return hidden

    ours = functools.partial(chain, lambda a, w: gemm(a, w, None, _scratch(), config=config, pdl=True))
    ours()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours()
    for _ in range(20):
        x.copy_(_randn(256, 1024))
        graph.replay()
        theirs = chain(torch.nn.functional.linear)
        assert relative_error(out, theirs.double()) < 3e-2
        again = out.clone()
        graph.replay()
        assert torch.equal(out, again)


def test_a_dense_linear_takes_the_cut_of_its_table(monkeypatch):
    from kernels import gemm_configs
    from kernels.dense_linear import DenseLinear

    monkeypatch.setitem(gemm_configs._TABLE, (1024, 2048), ((128, HopperGemmConfig(64, 2, 4, 4)), (256, None)))
    linear = DenseLinear()
    w = _randn(1024, 2048)
    for num_rows in (8, 64, 65, 128, 129, 256, 600):
        x = _randn(num_rows, 2048)
        assert relative_error(linear(x, w, None), x.double() @ w.double().T) < TOLERANCE[torch.bfloat16]
    assert linear._gemm_scratch is not None
