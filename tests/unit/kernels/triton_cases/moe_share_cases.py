"""A rank's whole experts, and no others: against the specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.triton_route import lay_out, max_tiles, route
from tests.unit.kernels.triton_cases.moe_cases import DTYPES, TOLERANCE
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts
from tests.unit.kernels.triton_cases.packed_experts_cases import CONFIGS

SHARES = (range(2), range(2, 3), range(3, 7))  # of seven experts, which are padded to eight columns
WHOLE = {"num_experts": 7, "top_k": 3, "hidden_size": 64, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def empty_tensors_are_no_numbers():
    """Whoever reads a value that no kernel wrote gets NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _tokens(config):
    return 2 if config == "pairs" else 11  # the interpreter runs one program at a time


def _assert_shares_equal(problem, config, *, tolerance=1e-5):
    """Each share equals its specification, and all together are the whole."""
    parts = [problem.of_experts(here) for here in SHARES]
    outs = [part.call(moe_triton.fused_moe, config=CONFIGS[config]) for part in parts]
    for part, out in zip(parts, outs, strict=True):
        torch.testing.assert_close(out, part.call(moe.fused_moe), rtol=tolerance, atol=tolerance)
    whole = problem.call(moe.fused_moe).float()
    torch.testing.assert_close(sum(out.float() for out in outs), whole, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "clamped"])
@pytest.mark.table
def test_shares_equal_their_specification_and_add_up_to_the_whole(gate, dtype, config):
    has_biases = gate == "clamped"
    problem = make_problem(
        **WHOLE, num_tokens=_tokens(config), dtype=dtype, has_biases=has_biases, has_scales=not has_biases,
        gate=moe.Gate("clamped", alpha=1.702, limit=0.7) if has_biases else moe.SILU, round_weights=has_biases,
    )  # fmt: skip
    _assert_shares_equal(problem, config, tolerance=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("storage", ["mxfp4", "fp8", "fp8_rows", "nvfp4", "nf4"])
@pytest.mark.table
def test_packed_shares_equal_their_specification(storage, config):
    sizes = WHOLE | {"intermediate_size": 64 if storage == "nf4" else 32}
    problem = make_problem(**sizes, num_tokens=_tokens(config), dtype=torch.float32, round_weights=False)
    _assert_shares_equal(pack_experts(problem, storage), config, tolerance=1e-4)


@pytest.mark.parametrize("config", ["tiles", "pairs"])
def test_a_gated_shared_expert_is_added_by_each_share(config):
    problem = make_problem(**WHOLE, num_tokens=_tokens(config), dtype=torch.float32, has_shared=True)
    for here in SHARES:
        part = problem.of_experts(here)
        out, expected = part.call(moe_triton.fused_moe, config=CONFIGS[config]), part.call(moe.fused_moe)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", ["tiles", "pairs"])
def test_given_weights_of_groups_are_renormalised_over_all_experts(config):
    problem = make_problem(**WHOLE, num_tokens=_tokens(config), dtype=torch.float32, round_weights=False)
    given = torch.rand(_tokens(config), 7)
    problem.logits[:, 3:5] = -float("inf")  # experts of other groups
    _assert_shares_equal(dataclasses.replace(problem, given=given, floor=1e-20, factor=2.5), config)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_share_that_no_token_chooses_is_zero(config):
    problem = make_problem(**WHOLE, num_tokens=_tokens(config), dtype=torch.float32)
    problem.logits[:, :3] = -50.0
    for here in SHARES[:2]:
        assert not problem.of_experts(here).call(moe_triton.fused_moe, config=CONFIGS[config]).any()


@pytest.mark.parametrize("config", ["tiles", "swapped", "pairs"])
def test_a_token_whose_router_gives_no_numbers_disturbs_no_other(config):
    problem = make_problem(**WHOLE, num_tokens=_tokens(config), dtype=torch.float32, round_weights=False)
    expected = problem.call(moe.fused_moe)
    problem.logits[1, 4] = float("nan")
    for function, options in ((moe.fused_moe, {}), (moe_triton.fused_moe, {"config": CONFIGS[config]})):
        out = sum(problem.of_experts(here).call(function, **options) for here in SHARES)
        assert out[1].isnan().all()
        torch.testing.assert_close(out[[0, *range(2, len(out))]], expected[[0, *range(2, len(out))]])


@pytest.mark.parametrize("chunk_tokens", [8, 64])
@pytest.mark.parametrize("here", [range(5), range(5, 50), range(50, 60), range(60)], ids=str)
def test_pairs_of_experts_that_are_here_are_laid_out_each_once(here, chunk_tokens):
    logits = torch.randn(40, 60)
    routing = route(
        logits, num_experts=60, top_k=4, renormalize=True, weights_dtype=torch.float32, chunk_tokens=chunk_tokens,
        here=here,
    )  # fmt: skip
    weights, experts = moe.route(logits, top_k=4, renormalize=True)
    torch.testing.assert_close(routing.weights, weights)  # of all: they are normalised together
    local = torch.where((experts >= here.start) & (experts < here.stop), experts - here.start, -1)
    assert torch.equal(routing.experts.long(), local)
    tiles = lay_out(routing, num_experts=len(here), block_m=16)
    assert len(tiles.rows) == max_tiles(num_pairs=160, num_experts=len(here), block_m=16)
    found = [
        (expert, pair)
        for tile, (expert, rows) in enumerate(zip(tiles.experts.tolist(), tiles.rows.tolist(), strict=True))
        for pair in tiles.pairs[tile * 16 : tile * 16 + rows].tolist()
    ]
    assert found == sorted((expert, pair) for pair, expert in enumerate(local.flatten().tolist()) if expert >= 0)
