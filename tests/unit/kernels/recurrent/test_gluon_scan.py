"""Recurrent layers' kernels for Hopper, with their products and barriers on the CPU, against their specifications."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.delta_rule.reference import recurrent_gated_delta_rule
from kernels.mamba2 import reference
from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton
from tests.unit.kernels.triton_cases.mamba2_problem import make_problem
from tests.unit.kernels.triton_cases.recurrent_problem import (
    PADDING,
    Row,
    assert_only_states_changed,
    clone,
    make_delta,
    make_metadata,
    make_view,
    states_after,
)  # fmt: skip

gluon_scan = pytest.importorskip("kernels.gluon_scan", reason="needs triton 3.6", exc_type=ImportError)

# Sums in another order; half precision stands for bf16
TOLERANCE = 4e-3
# A rest, too few tokens for chunks, padding, a whole chunk, more chunks than stages and a rest of less than 8
RAGGED = [Row(17, 0, writes=False), Row(16, 3), Row(20, PADDING), Row(64, 64), Row(197, 3)]


def assert_equal_where_long(rows, metadata, out, expected, view, other, before):
    starts = metadata.query_start_loc.tolist()
    for number, row in enumerate(rows):
        own = slice(starts[number], starts[number + 1])
        if row.num_tokens <= 16 or row.start == PADDING:
            assert not out[own].any()
        else:
            assert (out[own].float() - expected[own].float()).norm() <= TOLERANCE * expected[own].float().norm()
    is_long = [row.num_tokens > 16 for row in rows]
    states, wanted = states_after(view, metadata)[is_long], states_after(other, metadata)[is_long]
    assert (states - wanted).norm() <= TOLERANCE * wanted.norm()
    assert_only_states_changed(view, before, metadata)


@pytest.mark.slow
@pytest.mark.parametrize("consumers", [1, 2])
def test_rows_of_the_delta_rule_equal_the_specification(consumers, monkeypatch):
    from kernels.delta_rule import gluon_systems
    from tests.support.gluon_interpreter import interpret

    interpret(gluon_scan, "_scan_kernel", monkeypatch)
    interpret(gluon_systems, "_systems_kernel", monkeypatch)
    metadata = dataclasses.replace(make_metadata(RAGGED), num_decodes=None)
    sizes = {"key_heads": 1, "value_heads": 2, "d_k": 128, "d_v": 128}
    inputs = make_delta(metadata, **sizes, dtype=torch.float16)
    assert gluon_scan.takes(*inputs[:3])
    view = make_view(metadata, 256, 128, rows_per_piece=23)
    before, other = clone(view), clone(view)
    out = torch.zeros_like(inputs[2])
    gluon_systems.advance_on_hopper(
        *inputs, out, view, metadata, scale=0.3, eps=1e-6, short=16,
        consumers=consumers,
    )  # fmt: skip
    expected = recurrent_gated_delta_rule(*inputs, other, metadata, scale=0.3)
    assert_equal_where_long(RAGGED, metadata, out, expected, view, other, before)


@pytest.mark.slow
def test_rows_of_mamba_2_equal_the_specification(monkeypatch):
    from kernels.mamba2 import gluon_systems
    from tests.support.gluon_interpreter import interpret

    interpret(gluon_scan, "_scan_kernel", monkeypatch)
    interpret(gluon_systems, "_systems_kernel", monkeypatch)
    problem = make_problem(
        [(row.start, row.num_tokens) for row in RAGGED], num_heads=4, head_dim=64, state_size=128, num_groups=2,
        dtype=torch.float16, writes=[row.writes for row in RAGGED],
    )  # fmt: skip
    x, b, c = (tokens.contiguous() for tokens in (problem.x, problem.b, problem.c))  # rows of whole 16 bytes
    dt, a, d = problem.dt, problem.a, problem.d
    assert gluon_scan.takes(c, b, x)
    view, other = clone(problem.view), clone(problem.view)
    out = torch.zeros(x.shape, dtype=x.dtype)
    gluon_systems.scan_on_hopper(
        x, b, c, dt, a, d, out, view, problem.metadata, rows=(0, len(RAGGED)), shortest=17,
    )  # fmt: skip
    expected = reference.mamba2(x, b, c, dt, a, d, other, problem.metadata)
    assert_equal_where_long(RAGGED, problem.metadata, out, expected, view, other, problem.view)


SCRIPT = """
import dataclasses
import sys

from kernels.delta_rule import gluon_systems
from kernels.mamba2 import gluon_systems as mamba2_systems
from kernels.states import StateView
from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton
from tests.unit.kernels.triton_cases.mamba2_problem import make_problem
from tests.unit.kernels.triton_cases.recurrent_problem import Row, make_delta, make_metadata

consumers, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
rows = [Row(300, 3), Row(70, 0, writes=False)]
with collect_kernels() as kernels:
    metadata = make_metadata(rows)
    pool = torch.zeros(2, 9, 4096)
    for key_heads, value_heads in ((16, 48), (8, 8)):
        sizes = {"key_heads": key_heads, "value_heads": value_heads, "d_k": 128, "d_v": 128}
        inputs = make_delta(metadata, **sizes, dtype=dtype)
        view = StateView(pool, 3, value_heads * 128, 128)
        gluon_systems.advance_on_hopper(
            *inputs, torch.empty_like(inputs[2]), view, metadata, scale=0.1, eps=1e-6, short=16, consumers=consumers,
            pdl=True,
        )
    if consumers == 1:
        for heads, groups in ((64, 8), (128, 1)):
            sizes = {"num_heads": heads, "head_dim": 64, "state_size": 128, "num_groups": groups}
            problem = make_problem([(3, 300)], **sizes, dtype=dtype)
            x, b, c = (tokens.contiguous() for tokens in (problem.x, problem.b, problem.c))
            mamba2_systems.scan_on_hopper(
                x, b, c, problem.dt, problem.a, problem.d, x, problem.view, problem.metadata, rows=(0, 1), shortest=17,
                pdl=True,
            )
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("consumers", [1, 2])
def test_kernels_for_hopper_compile_and_fit(consumers, dtype, tmp_path):
    compiled = compile_kernels(SCRIPT, str(consumers), dtype, cache=tmp_path)
    scans = [kernel for kernel in compiled if kernel.name == "_scan_kernel"]
    assert len(scans) == (4 if consumers == 1 else 2)
    assert {kernel.name for kernel in compiled} == {"_scan_kernel", "_systems_kernel"}
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES
    assert all(kernel.local_bytes == 0 for kernel in compiled)  # what spills is read and written for each chunk
    for kernel in scans:
        assert kernel.has_wgmma
        # Memory of barriers that are not used to the end would be given to others
        assert kernel.num_barriers == 2 * gluon_scan._STAGES
        # A sum over warps leaves its result where the arguments of partitions go, with no barrier between
        assert kernel.start_barriers == 0
