"""Which cut a product of many rows takes, and which cuts fit. The kernels themselves: triton_cases/ and tests/gpu."""

from __future__ import annotations

import pytest
import torch

from kernels import gemm_configs
from kernels.gemm_configs import MAX_SUMS, STREAMED, GemmConfig, GemmScratch, HopperGemmConfig, num_programs

SPLIT = HopperGemmConfig(64, 2, 2, 4)
SIZES = {"n": 4096, "k": 1024, "num_sms": 132}


def test_a_product_takes_the_cut_for_its_rows_and_else_none(monkeypatch):
    steps = ((96, SPLIT), (128, None), (256, GemmConfig(128, 64, 64, 1, 4, 4)))
    monkeypatch.setattr(gemm_configs, "_TABLE", {(1024, 1024): steps})
    chosen = [
        gemm_configs.gemm_config(num_rows=rows, n=1024, k=1024, num_sms=132) for rows in (65, 96, 97, 128, 129, 256)
    ]
    assert chosen == [SPLIT, SPLIT, None, None, steps[2][1], steps[2][1]]
    assert gemm_configs.gemm_config(num_rows=257, n=1024, k=1024, num_sms=132) is None
    assert gemm_configs.gemm_config(num_rows=96, n=1024, k=2048, num_sms=132) is None


def test_a_cut_that_does_not_fit_a_smaller_device_is_not_taken(monkeypatch):
    monkeypatch.setattr(gemm_configs, "_TABLE", {(4096, 1024): ((128, SPLIT),)})
    assert gemm_configs.gemm_config(num_rows=128, n=4096, k=1024, num_sms=132) == SPLIT  # 128 programs
    assert gemm_configs.gemm_config(num_rows=128, n=4096, k=1024, num_sms=114) is None


def test_every_cut_of_the_table_fits_an_h100():
    for (n, k), steps in gemm_configs._TABLE.items():
        assert [rows for rows, _ in steps] == sorted(rows for rows, _ in steps)
        for rows, config in steps:
            assert config is None or num_programs(config, num_rows=rows, n=n, k=k, num_sms=132) > 0


@pytest.mark.parametrize(("config", "num_rows", "programs"), [
    (HopperGemmConfig(64, 2, 1, 4), 128, 64),
    (HopperGemmConfig(64, 2, 1, 4), 129, 128),
    (SPLIT, 129, 0),  # 256 programs that wait for one another
    (HopperGemmConfig(64, 2, STREAMED, 4), 256, 0),  # 128 tiles
    (HopperGemmConfig(64, 2, STREAMED, 4), 257, 132),
    (HopperGemmConfig(64, 2, 2, 4, block_k=96), 100, 0),
    (GemmConfig(64, 64, 64, 4, 4, 4), 100, 512),
    (GemmConfig(64, 64, 64, 3, 4, 4), 100, 0),
    (GemmConfig(128, 128, 64, 16, 4, 4), 256, 0),  # more sums than the scratch holds
])  # fmt: skip
def test_programs_of_a_cut(config, num_rows, programs):
    assert num_programs(config, num_rows=num_rows, **SIZES) == programs


def test_the_scratch_holds_whatever_fits():
    scratch = GemmScratch.allocate(torch.device("cpu"), num_sms=20)
    assert scratch.num_sms == 20
    for block_m in (64, 128, 256):
        for block_n in (32, 64, 128):
            for splits in (2, 4, 8):
                config = GemmConfig(block_m, block_n, 64, splits, 4, 4)
                for n in range(64, 4096, 96):
                    programs = num_programs(config, num_rows=300, n=n, k=1024, num_sms=20)
                    assert programs * block_m * block_n <= scratch.partial.numel() == 20 * MAX_SUMS
                    assert programs // splits <= scratch.arrivals.numel()


def test_registers_of_a_cut_fit_an_sm():
    registers_of = pytest.importorskip(
        "kernels.gluon_gemm", reason="needs triton 3.6", exc_type=ImportError
    ).registers_of
    for consumers in (1, 2, 3, 4):
        for block_n in (32, 64, 128, 256):
            if consumers * 64 * block_n <= MAX_SUMS:
                at_entry, parted = registers_of(HopperGemmConfig(block_n, consumers, 1, 4))
                assert at_entry % 8 == parted % 8 == 0
                assert at_entry * 128 * (consumers + 1) <= 65536
                assert consumers * parted + 24 <= at_entry * (consumers + 1)
