"""Counters that a launch must find at zero: a debug run says so where they are not, for each kernel that has some."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from kernels.attention.triton_decode import DecodeScratch, decode_attention
from kernels.linear.triton_gemv import GemvConfig, allocate_scratch, gemv
from kernels.sampling.triton_draw import SamplingConfig
from tests.unit.kernels.triton_cases import ragged, sampling_problem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _debug_run(monkeypatch):
    """TRITON_DEBUG=1 for the interpreter, which does not read it."""
    monkeypatch.setattr(interpreter_builder, "options", dataclasses.replace(interpreter_builder.options, debug=True))


def _decode(dirt):
    q, k_cache, v_cache, metadata = ragged.make_problem(
        query_lens=[1], context_lens=[300], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    scratch = DecodeScratch.allocate(num_heads=4, num_kv_heads=2, head_dim=16, device=CPU)
    scratch.arrivals.fill_(dirt)
    tables = (metadata.block_table, metadata.seq_lens)
    decode_attention(q, k_cache, v_cache, *tables, torch.empty_like(q), scratch, scale=0.25, num_splits=2)


def _gemv(dirt):
    scratch = allocate_scratch(CPU)
    scratch.arrivals.fill_(dirt)
    config = GemvConfig(block_n=16, block_k=64, splits=2, num_warps=4, num_stages=2, uses_dot=False)
    gemv(torch.randn(1, 512).half(), torch.randn(40, 512).half(), None, scratch, config=config)


def _sample(dirt):
    problem = sampling_problem.make_problem([sampling_problem.Parameters(0.0)], 300)
    scratch = sampling_problem.make_scratch(problem)
    scratch.arrivals.fill_(dirt)
    sampling_problem.run_triton(problem, scratch=scratch, config=SamplingConfig(64, 2, num_warps=4))


@pytest.mark.parametrize("launch", [_decode, _gemv, _sample])
def test_counters_that_are_not_zero_stop_a_debug_run(launch):
    launch(0)
    with pytest.raises(Exception, match="arrivals were not zero before the launch"):
        launch(2)
