"""Candidates fit the device and the product; what is printed names cuBLAS, the best and what is chosen."""

from __future__ import annotations

import pytest

pytest.importorskip("kernels.gluon_gemm", reason="needs triton 3.6", exc_type=ImportError)
from benchmarks import gemm_sweep
from benchmarks.kernels_linear import GEMV_SHAPES
from kernels.gluon_gemm import _TABLE, BLOCK_K, BLOCK_M


@pytest.mark.parametrize("num_rows", gemm_sweep.ROWS)
@pytest.mark.parametrize("shape", GEMV_SHAPES)
def test_every_candidate_fits_an_h100_and_what_is_chosen_is_among_them(shape, num_rows):
    n, k = GEMV_SHAPES[shape]
    found = gemm_sweep.candidates(num_rows=num_rows, n=n)
    assert len(set(found)) == len(found) > 1
    for cut in found:
        assert n % cut.block_n == 0
        assert cut.num_stages * (BLOCK_M + cut.block_n) * BLOCK_K * 2 < 227 * 1024
        assert cut.registers * 2 * 128 <= 65536
    chosen = next((cut for max_rows, cut in _TABLE.get((n, k), ()) if num_rows <= max_rows), None)
    assert chosen is None or chosen in found


def test_a_line_names_cublas_the_best_after_a_norm_and_what_is_chosen():
    kinds = [(None, False, 6.0, 8.0), ([64, 8], True, 6.5, 7.0), ([128, 6], False, 5.0, 7.5)]
    results = [
        {"shape": "o", "rows": 80, "cut": cut, "chosen": chosen, "us": us, "after_norm_us": after}
        for cut, chosen, us, after in kinds
    ]
    assert gemm_sweep.lines(results) == [
        "o M80: cuBLAS cuBLAS 6.0 norm+ 8.0 | best [64, 8] 6.5 norm+ 7.0 | chosen [64, 8] 6.5 norm+ 7.0"
    ]
    assert "chosen cuBLAS 6.0" in gemm_sweep.lines(results[:1])[0]
