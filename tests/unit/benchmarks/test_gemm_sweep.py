"""Candidates fit the device; failures take only their own kind out; the table holds what beat cuBLAS."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest

pytest.importorskip("triton")
from benchmarks import gemm_sweep
from benchmarks.gemm_candidates import candidates, features_of, name_of
from benchmarks.gemm_worker import Outcome
from benchmarks.kernels_linear import GEMV_SHAPES
from kernels.gemm_configs import MAX_SUMS, GemmConfig, HopperGemmConfig, num_programs

SHAPE = {"o": (1024, 2048)}
NUM_SMS = 132


@pytest.mark.parametrize("num_rows", [80, 128, 192, 256, 512])
@pytest.mark.parametrize("shape", GEMV_SHAPES)
def test_every_candidate_fits_an_h100(shape, num_rows):
    n, k = GEMV_SHAPES[shape]
    found = candidates(num_rows=num_rows, n=n, k=k, num_sms=NUM_SMS)
    assert len({name_of(candidate) for candidate in found}) == len(found) > 10
    for config in found:
        if isinstance(config, HopperGemmConfig):
            assert (config.consumers * 64 + config.block_n) * config.block_k * 2 * config.num_stages <= 224 * 1024
            assert config.consumers * 64 * config.block_n <= MAX_SUMS
        if isinstance(config, HopperGemmConfig | GemmConfig):
            assert num_programs(config, num_rows=num_rows, n=n, k=k, num_sms=NUM_SMS) >= 64


class _Worker:
    """Answers by a rule instead of measuring."""

    def __init__(self, rule):
        self.rule = rule
        self.jobs = []

    def measure(self, job, *, timeout_s):
        self.jobs.append(job)
        return self.rule(job)


def _sweep(rule, *, seconds=1000.0):
    worker = _Worker(rule)
    deadline_s = time.monotonic() + seconds
    return gemm_sweep.Sweep(SHAPE, worker=worker, num_sms=NUM_SMS, deadline_s=deadline_s), worker


def _us(job):
    return Outcome(8.0 if job.candidate is None else 4.0 + job.candidate.block_n / 1000 + job.candidate.splits / 100)


def _fails_when_split(job):
    if isinstance(job.candidate, HopperGemmConfig) and job.candidate.splits > 1:
        return Outcome(None, failure="its process died", is_fatal=True)
    return _us(job)


def test_what_crashes_is_given_up_soon_and_the_rest_is_measured():
    sweep, worker = _sweep(_fails_when_split)
    sweep.try_all(256)
    measured = sweep.best("o", 256, is_chain=False)
    everything = candidates(num_rows=256, n=1024, k=2048, num_sms=NUM_SMS)
    assert set(measured) == {c for c in everything if not isinstance(c, HopperGemmConfig) or c.splits == 1}
    assert 2 <= len(sweep.failures) <= 8
    assert len(worker.jobs) + sweep.num_left_out == len(everything) + 1


def test_the_sweep_ends_in_time():
    sweep, worker = _sweep(_us, seconds=0.5)
    sweep.try_all(256)
    sweep.try_chains(256)
    assert not worker.jobs
    assert sweep.num_left_out > 50


def test_sizes_between_try_the_best_of_their_neighbour():
    sweep, worker = _sweep(_us)
    sweep.try_all(128)
    worker.jobs.clear()
    sweep.try_best_of(128, 96)
    tried = [job.candidate for job in worker.jobs]
    assert tried[0] is None
    assert tried[1:] == sweep.best("o", 128, is_chain=False)[: len(tried) - 1]
    assert 4 <= len(tried) - 1 <= 8


def _result(rows, us, config=None, *, chain=False):
    family = "cuBLAS" if config is None else "gluon" if isinstance(config, HopperGemmConfig) else "triton"
    return {"shape": "o", "n": 1024, "k": 2048, "rows": rows, "chain": chain, "us": us, "family": family,
            "config": None if config is None else asdict(config)}  # fmt: skip


def test_the_table_holds_what_beat_cublas_after_a_norm():
    one, other = HopperGemmConfig(64, 2, 2, 4), GemmConfig(128, 64, 64, 1, 4, 4)
    results = [
        *(_result(96, us, config) for us, config in ((8.0, None), (5.0, one), (4.0, other))),
        *(_result(96, us, config, chain=True) for us, config in ((9.0, None), (6.0, one), (7.0, other))),
        *(_result(128, us, config) for us, config in ((8.0, None), (5.0, one))),
        *(_result(192, us, config) for us, config in ((8.0, None), (7.9, one))),
        *(_result(256, us, config) for us, config in ((8.0, None), (5.0, other))),
        *(_result(512, us, config) for us, config in ((8.0, None), (9.0, other))),
    ]
    made = eval("{" + gemm_sweep.table(results) + "}")
    assert made == {(1024, 2048): ((128, one), (192, None), (256, other))}
    assert gemm_sweep.table([result for result in results if result["rows"] == 512]) == ""


def test_a_measurement_is_printed_beside_cublas(capsys):
    sweep, _ = _sweep(_us)
    sweep.try_all(256)
    sweep.try_chains(256)
    sweep.print_table()
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("o M256: 1.9 cu 8.0 | 4.0 gl n32")
    assert "norm+ cu 8.0 | 4.0 gl n32" in line
    assert sum(result["family"] == "cuBLAS" for result in sweep.as_json()["results"]) == 2


def test_kinds_are_named_from_narrow_to_wide():
    assert features_of(HopperGemmConfig(64, 2, 0, 4)) == [
        "gluon streamed c2 k64", "gluon streamed", "gluon k64", "gluon c2",
    ]  # fmt: skip
    assert features_of(None) == ["cuBLAS"]
