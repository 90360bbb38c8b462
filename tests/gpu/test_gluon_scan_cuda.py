"""The kernels of recurrent layers' prompts for Hopper: against the specifications on rows drawn anew, and for races."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from kernels.delta_rule import chunks
from kernels.states import save_states
from tests.unit.kernels.triton_cases.mamba2_problem import error_of, make_problem
from tests.unit.kernels.triton_cases.ragged import relative_error
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
HEADS = [(16, 32), (16, 48), (16, 16)]  # key heads and value heads of Qwen3.5 35B-A3B, 27B and 2B
# Of bf16, as test_recurrent_cuda.py and test_mamba2_cuda.py have them
DELTA_TOLERANCE, SCAN_TOLERANCE = 1e-2, 6e-3
CONSUMERS = {"one": 1, "two": 2, "served": None}


def draw_rows(seed):
    draw = random.Random(seed)
    lengths = [1, 16, 17, 63, 64, 65, 128, 200, draw.randint(300, 900), draw.randint(18, 1500)]
    rows = [Row(length, draw.choice([0, 64, draw.randint(1, 500)]), writes=draw.random() > 0.2) for length in lengths]
    rows += [Row(70, PADDING), Row(0, PADDING)]
    draw.shuffle(rows)
    return rows


def delta_problem(rows, heads, seed, *, strongest=2.0):
    metadata = make_metadata(rows, device="cuda", num_pages=140, seed=seed)
    sizes = {"key_heads": heads[0], "value_heads": heads[1], "d_k": 128, "d_v": 128}
    inputs = make_delta(metadata, **sizes, strongest=strongest, dtype=torch.bfloat16, seed=seed)
    view = make_view(metadata, heads[1] * 128, 128, rows_per_piece=32, rest=0, seed=seed)
    return metadata, inputs, view


def advance(inputs, view, metadata, config):
    """Run the whole op, with the kernels for Hopper for its long rows."""
    from kernels.delta_rule import gluon_systems, triton

    served, has_gluon = triton.advance_by_chunks, triton.HAS_GLUON
    consumers = CONSUMERS[config]

    def advance_long(*arguments, config, **named):
        gluon_systems.advance_on_hopper(*arguments, consumers=consumers, **named)

    triton.advance_by_chunks, triton.HAS_GLUON = advance_long, False
    try:
        return triton.gated_delta_rule(*inputs, view, metadata, scale=0.1, pdl=True)
    finally:
        triton.advance_by_chunks, triton.HAS_GLUON = served, has_gluon


def systems_of_triton(rows, inputs, metadata):
    from kernels.delta_rule import triton_chunk_systems
    from kernels.delta_rule.triton_chunks import _rows_pad

    q, k, _v, g, beta = inputs
    num_heads = beta.shape[1]
    sizes = {
        "NUM_HEADS": num_heads, "REPEAT": num_heads // q.shape[1], "D_K": 128, "K_PAD": 128, "CHUNK": 64,
        "ROWS_PAD": _rows_pad(len(rows)), "SHORT": 16, "PRECISION": "tf32", "PDL": False, "launch_pdl": False,
    }  # fmt: skip
    return triton_chunk_systems.prepare_chunks(
        q, k, g, beta, (metadata.query_start_loc, metadata.seq_lens), (0, len(rows)), len(q) // 64 + len(rows), sizes,
        scale=0.1, eps=1e-6, num_warps=4, max_registers=168,
    )  # fmt: skip


@pytest.mark.parametrize("heads", HEADS)
def test_systems_equal_those_of_triton(heads):
    from kernels.delta_rule import gluon_systems

    seed = random.randrange(1 << 30)
    rows = draw_rows(seed)
    metadata, inputs, _ = delta_problem(rows, heads, seed)
    q, k, _v, g, beta = inputs
    wanted = systems_of_triton(rows, inputs, metadata)
    found = gluon_systems.prepare_systems(
        q, k, g, beta, (metadata.query_start_loc, metadata.seq_lens), (0, len(rows)), len(q) // 64 + len(rows),
        short=16, scale=0.1, eps=1e-6, pdl=False,
    )  # fmt: skip
    lengths = [row.num_tokens if row.start != PADDING and row.num_tokens > 16 else 0 for row in rows]
    index = 0
    for length in lengths:
        for chunk in range(-(-length // 64)):
            is_token = slice(0, min(64, length - chunk * 64))
            for mine, other in ((found.transform, wanted.transform), (found.reads, wanted.reads)):
                error = relative_error(mine[index, :, is_token], other[index, :, is_token].double())
                assert error < DELTA_TOLERANCE, (seed, index)
            factors = found.factors[index].view(-1, 4, 64)
            for place in range(3):
                mine, other = factors[:, place, is_token], wanted.factors[place, index, :, is_token]
                assert relative_error(mine, other.double()) < 1e-4, (seed, place, index)
            assert relative_error(factors[:, 3, 0], wanted.decays[index].double()) < 1e-4, (seed, index)
            index += 1


def test_the_scan_of_tritons_systems_equals_the_specification():
    """The scan with a first phase that is known to be right."""
    from kernels.gluon_chunks import Systems
    from kernels.gluon_scan import scan_chunks

    seed = random.randrange(1 << 30)
    rows = draw_rows(seed)
    metadata, inputs, view = delta_problem(rows, HEADS[0], seed)
    q, k, v, g, beta = inputs
    made, other = systems_of_triton(rows, inputs, metadata), clone(view)
    decays = made.decays[:, :, None, None].expand(-1, -1, 1, 64)
    factors = torch.cat((made.factors.permute(1, 2, 0, 3), decays), 2).flatten(2).contiguous()
    expected = chunks.gated_delta_rule(q.float(), k.float(), v.float(), g, beta, other, metadata, scale=0.1)
    lengths = torch.tensor([row.num_tokens if row.start != PADDING else 0 for row in rows], device=q.device)
    is_long = lengths > 16
    in_long = is_long.repeat_interleave(metadata.query_start_loc.diff())
    for consumers in (1, 2):
        out, mine = torch.zeros_like(v), clone(view)
        scan_chunks(
            q, k, v, out, Systems(made.transform, made.reads, factors), mine, metadata, rows=(0, len(rows)), short=16,
            consumers=consumers, pdl=False,
        )  # fmt: skip
        assert relative_error(out[in_long], expected[in_long].double()) < DELTA_TOLERANCE, (seed, consumers)
        states, wanted = states_after(mine, metadata)[is_long], states_after(other, metadata)[is_long]
        assert relative_error(states, wanted.double()) < DELTA_TOLERANCE, (seed, consumers)
        assert not out[~in_long].any(), (seed, consumers)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("config", CONSUMERS)
def test_the_delta_rule_equals_its_specification(config, heads):
    seed = random.randrange(1 << 30)
    for strongest in (2.0, 30.0):
        metadata, inputs, view = delta_problem(draw_rows(seed), heads, seed, strongest=strongest)
        other = clone(view)
        q, k, v, g, beta = inputs
        expected = chunks.gated_delta_rule(q.float(), k.float(), v.float(), g, beta, other, metadata, scale=0.1)
        states = states_after(other, metadata).double()
        mine = clone(view)
        out = advance(inputs, mine, metadata, config)
        assert relative_error(out, expected.double()) < DELTA_TOLERANCE, seed
        assert relative_error(states_after(mine, metadata), states) < DELTA_TOLERANCE, seed
        assert_only_states_changed(mine, view, metadata)


def test_the_delta_rule_gives_the_same_bits_each_time_and_by_one_warpgroup_or_two():
    seed = random.randrange(1 << 30)
    rows = [row for i in range(6) for row in draw_rows(seed + i)]
    for heads in HEADS:
        metadata, inputs, view = delta_problem(rows, heads, seed)
        first, states = None, None
        for number in range(60):
            mine = clone(view)
            out = advance(inputs, mine, metadata, ("one", "two")[number % 2])
            first, states = (out, mine.pool) if first is None else (first, states)
            assert torch.equal(out, first), (seed, number)
            assert torch.equal(mine.pool.nan_to_num(), states.nan_to_num()), (seed, number)


@pytest.mark.parametrize("heads", HEADS)
def test_a_prompt_of_the_delta_rule_has_the_same_bits_alone_cut_and_beside_others(heads):
    """Whole and alone against pieces that begin at multiples of 64, each in a step with other rows around it."""
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    length = draw.randint(500, 1500)
    row = Row(length, 0)
    whole, inputs, view = delta_problem([row], heads, seed)
    pool = clone(view)
    expected = advance(inputs, view, whole, "served")
    cuts = [0, *sorted(draw.sample(range(64, length - 16, 64), 3)), length]
    for start, end in itertools.pairwise(cuts):
        others = draw_rows(seed + start)
        place = draw.randrange(len(others))
        rows = [*others[:place], Row(end - start, start), *others[place:]]
        metadata, given, room = delta_problem(rows, heads, seed + end)
        first = int(metadata.query_start_loc[place])
        own = slice(first, first + end - start)
        for mine, of_whole in zip(given, inputs, strict=True):
            mine[own] = of_whole[start:end]
        if start:
            save_row(room, metadata, place, states_after(pool, whole)[0])
        out = advance(given, room, metadata, "served")
        assert torch.equal(out[own], expected[start:end]), (seed, start, end)
        save_row(pool, whole, 0, states_after(room, metadata)[place])
    assert torch.equal(states_after(pool, whole), states_after(view, whole)), seed


def save_row(view, metadata, row, state):
    """Write one row's state to its pages."""
    own = {name: getattr(metadata, name)[row : row + 1] for name in ("req_index", "seq_lens")}
    part = dataclasses.replace(metadata, **own, writes=None)
    save_states(view, part, state[None])


def scan_problem(rows, groups, seed):
    problem = make_problem(
        rows, num_heads=64, head_dim=64, state_size=128, num_groups=groups, dtype=torch.bfloat16, device="cuda",
        seed=seed,
    )  # fmt: skip
    # As a layer has them, rows are whole numbers of 16 bytes
    return dataclasses.replace(problem, **{name: getattr(problem, name).contiguous() for name in ("x", "b", "c")})


@pytest.mark.parametrize("groups", [8, 1])
def test_mamba_2_equals_its_specification_with_the_same_bits_each_time(groups):
    from kernels.mamba2 import triton

    seed = random.randrange(1 << 30)
    rows = [(row.start, row.num_tokens) for i in range(4) for row in draw_rows(seed + i)]
    problem = scan_problem(rows, groups, seed)
    assert triton.runs_on_hopper(problem.x, problem.b, problem.c)
    assert error_of(problem, triton.mamba2, pdl=True) < SCAN_TOLERANCE, seed
    first, view = problem.run(triton.mamba2, pdl=True)
    for number in range(60):
        out, again = problem.run(triton.mamba2, pdl=True)
        assert torch.equal(out, first), (seed, number)
        assert torch.equal(again.pool.nan_to_num(), view.pool.nan_to_num()), (seed, number)


@pytest.mark.parametrize("groups", [8, 1])
def test_a_prompt_of_mamba_2_has_the_same_bits_alone_cut_and_beside_others(groups):
    from kernels.mamba2 import triton

    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    length = draw.randint(500, 1500)
    alone = scan_problem([(0, length)], groups, seed)
    expected, after = alone.run(triton.mamba2, pdl=True)
    cuts = [0, *sorted(draw.sample(range(64, length - 16, 64), 3)), length]
    state = None
    for start, end in itertools.pairwise(cuts):
        rows = [(row.start, row.num_tokens) for row in draw_rows(seed + start)]
        place = draw.randrange(len(rows))
        rows.insert(place, (start, end - start))
        # The same seed does not give the same heads to other rows
        problem = dataclasses.replace(scan_problem(rows, groups, seed + end), a=alone.a, d=alone.d)
        first = int(problem.metadata.query_start_loc[place])
        own = slice(first, first + end - start)
        for name in ("x", "b", "c", "dt"):
            getattr(problem, name)[own] = getattr(alone, name)[start:end]
        if state is not None:
            save_row(problem.view, problem.metadata, place, state)
        out, view = problem.run(triton.mamba2, pdl=True)
        assert torch.equal(out[own], expected[start:end]), (seed, start, end)
        state = states_after(view, problem.metadata)[place]
    assert torch.equal(state, states_after(after, alone.metadata)[0]), seed


def test_prompts_run_the_kernels_for_hopper(monkeypatch):
    from kernels.delta_rule import gluon_systems, triton
    from kernels.mamba2 import gluon_systems as mamba2_systems
    from kernels.mamba2 import triton as mamba2

    called = []
    monkeypatch.setattr(gluon_systems, "advance_on_hopper", lambda *args, **named: called.append("delta rule"))
    monkeypatch.setattr(mamba2_systems, "scan_on_hopper", lambda *args, **named: called.append("mamba2"))
    metadata, inputs, view = delta_problem([Row(70, 0)], HEADS[0], 0)
    triton.gated_delta_rule(*inputs, view, metadata, scale=0.1)
    problem = make_problem(
        [(0, 70)], num_heads=8, head_dim=64, state_size=128, num_groups=2, dtype=torch.bfloat16, device="cuda"
    )
    problem = dataclasses.replace(problem, **{name: getattr(problem, name).contiguous() for name in ("x", "b", "c")})
    problem.run(mamba2.mamba2)
    assert called == ["delta rule", "mamba2"]
