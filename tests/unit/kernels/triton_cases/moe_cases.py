"""The mixture of experts against its specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.configs import GroupedConfig, PairsConfig, PairTile, Tile
from kernels.moe.triton_route import lay_out, max_tiles, route
from models.build import build
from models.config.model_config import ModelConfig
from models.layers import moe as moe_layer
from models.parallel import TensorParallel
from models.weights.weights import Weights
from tests.support.models_harness import CPU, PagedRunner
from tests.unit.kernels.triton_cases.moe_problem import make_problem

# The interpreter truncates to bf16 instead of rounding: half precision stands for it here, bf16 is tested on the GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
DTYPES = [torch.float32, torch.float16]
SMALL = GroupedConfig(16, Tile(16, 16, 4, 2, group_m=3), Tile(16, 32, 4, 2, group_m=2))
SWAPPED = GroupedConfig(16, Tile(16, 16, 4, 2), Tile(16, 32, 4, 2), swaps=True)
PAIRS = PairsConfig(PairTile(8, 16, 4, 2), PairTile(16, 16, 4, 2))


def _route(logits, *, num_experts, top_k, renormalize, chunk_tokens=16):
    return route(
        logits,
        num_experts=num_experts,
        top_k=top_k,
        renormalize=renormalize,
        weights_dtype=torch.float32,
        chunk_tokens=chunk_tokens,
    )


@pytest.mark.parametrize("chunk_tokens", [None, 8, 64])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (21, 60, 4), (11, 128, 8), (5, 4, 4), (6, 2, 1)]
)
def test_routes_equal_their_specification(num_tokens, num_experts, top_k, renormalize, chunk_tokens):
    logits = torch.randn(num_tokens, num_experts + 1)  # a column more, which is none of the router's
    routing = _route(
        logits, num_experts=num_experts, top_k=top_k, renormalize=renormalize, chunk_tokens=chunk_tokens
    )  # fmt: skip
    weights, experts = moe.route(logits[:, :num_experts], top_k=top_k, renormalize=renormalize)
    assert torch.equal(routing.experts.long(), experts)
    torch.testing.assert_close(routing.weights, weights)


def test_equal_logits_go_to_the_lower_experts_in_both():
    logits = torch.zeros(3, 6)
    logits[1, 4] = 1.0
    logits[2, :2] = -1.0
    routing = _route(logits, num_experts=6, top_k=3, renormalize=True)
    assert routing.experts.tolist() == [[0, 1, 2], [4, 0, 1], [2, 3, 4]]
    assert moe.route(logits, top_k=3, renormalize=True)[1].tolist() == routing.experts.tolist()


def test_tokens_that_are_no_numbers_have_experts_too():
    logits = torch.randn(20, 6)
    logits[3], logits[9, 2] = float("nan"), float("nan")
    routing = _route(logits, num_experts=6, top_k=3, renormalize=True)
    assert routing.experts[[3, 9]].tolist() == [[0, 1, 2]] * 2
    pairs = _live_pairs(lay_out(routing, num_experts=6, block_m=16), 16)
    assert sorted(pair for pair, _ in pairs) == list(range(60))


@pytest.mark.parametrize("config", [SMALL, SWAPPED, PAIRS], ids=["tiles", "swapped", "pairs"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_whose_router_gives_no_numbers_gives_none_and_disturbs_no_other(bad, renormalize, config):
    problem = make_problem(
        num_tokens=5, num_experts=6, top_k=2, hidden_size=32, intermediate_size=24, dtype=torch.float32,
        renormalize=renormalize, round_weights=False,
    )  # fmt: skip
    expected = problem.call(moe.fused_moe)
    problem.logits[2, 4], problem.logits[3] = bad, bad
    problem.x[3] = bad
    for function, options in ((moe.fused_moe, {}), (moe_triton.fused_moe, {"config": config})):
        out = problem.call(function, **options)
        assert out[2:4].isnan().all()
        torch.testing.assert_close(out[[0, 1, 4]], expected[[0, 1, 4]], rtol=1e-5, atol=1e-5)


def _live_pairs(tiles, block_m):
    """(pair, expert) in the order of the rows."""
    return [
        (pair, expert)
        for row, (expert, rows) in enumerate(zip(tiles.experts.tolist(), tiles.rows.tolist(), strict=True))
        for pair in tiles.pairs[row * block_m : row * block_m + rows].tolist()
    ]


@pytest.mark.parametrize(("block_m", "chunk_tokens"), [(16, 16), (64, 64)])
@pytest.mark.parametrize("skew", [0.0, 30.0])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(2, 4, 2), (16, 60, 4), (33, 8, 2), (40, 128, 8), (100, 8, 2)]
)
def test_pairs_are_laid_out_by_expert_each_once(num_tokens, num_experts, top_k, skew, block_m, chunk_tokens):
    _assert_laid_out(num_tokens, num_experts, top_k, skew, block_m, chunk_tokens)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(40, 128), (140, 128), (150, 4), (1030, 8)])
def test_pairs_are_laid_out_over_more_chunks_than_are_added_up_at_once(num_tokens, num_experts):
    _assert_laid_out(num_tokens, num_experts, 2, 3.0, 16, 1 if num_tokens < 1000 else 64)


def _assert_laid_out(num_tokens, num_experts, top_k, skew, block_m, chunk_tokens):
    logits = torch.randn(num_tokens, num_experts) + skew * torch.randn(num_experts)
    routing = _route(logits, num_experts=num_experts, top_k=top_k, renormalize=False, chunk_tokens=chunk_tokens)
    tiles = lay_out(routing, num_experts=num_experts, block_m=block_m)
    found = _live_pairs(tiles, block_m)
    flat = routing.experts.flatten().tolist()
    # by expert, and by token within an expert, whatever the order in which programs ran
    assert found == sorted(enumerate(flat), key=lambda pair: (pair[1], pair[0]))
    full_tiles = [rows for rows in tiles.rows.tolist() if rows > 0]
    assert len(full_tiles) == sum(-(-flat.count(expert) // block_m) for expert in set(flat))
    assert tiles.rows.tolist()[len(full_tiles) :] == [0] * (len(tiles.rows) - len(full_tiles))


def test_there_is_room_for_every_routing():
    for num_pairs in range(1, 40):
        for num_experts in (1, 2, 5, 8):
            for block_m in (2, 4):
                room = max_tiles(num_pairs=num_pairs, num_experts=num_experts, block_m=block_m)
                alone = min(num_experts, num_pairs) - 1  # experts with one pair, the others on one expert
                assert room >= alone + -(-(num_pairs - alone) // block_m)
                assert room >= min(num_pairs, num_experts)


@pytest.mark.parametrize("config", [None, SMALL, SWAPPED, PAIRS], ids=["chosen", "tiles", "swapped", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "intermediate_size", "has_shared"),
    [(1, 8, 2, 32, 24, False), (3, 4, 3, 40, 24, True), (19, 6, 2, 48, 32, False), (26, 5, 3, 24, 20, True)],
)
def test_mixtures_equal_their_specification(
    num_tokens, num_experts, top_k, hidden_size, intermediate_size, has_shared, dtype, config
):
    problem = make_problem(
        num_tokens=min(num_tokens, 2) if config is PAIRS else num_tokens,  # the interpreter runs one program at a time
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        has_shared=has_shared,
        renormalize=num_experts != 6,
        round_weights=num_experts != 8,
    )
    out = problem.call(moe_triton.fused_moe, config=config)
    expected = problem.call(moe.fused_moe)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(expected.double(), problem.exact(), rtol=0, atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("config", [SMALL, SWAPPED, PAIRS], ids=["tiles", "swapped", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "gate",
    [moe.Gate("gelu_tanh"), moe.Gate("clamped", alpha=1.702, limit=0.7), moe.Gate("relu2")],
    ids=lambda gate: gate.kind,
)
def test_experts_with_biases_scales_and_other_gates_equal_their_specification(gate, dtype, config):
    problem = make_problem(
        num_tokens=2 if config is PAIRS else 11, num_experts=5, top_k=3, hidden_size=40, intermediate_size=24,
        dtype=dtype, gate=gate, has_biases=True, has_scales=True,
    )  # fmt: skip
    expected = problem.call(moe.fused_moe)
    out = problem.call(moe_triton.fused_moe, config=config)
    torch.testing.assert_close(out, expected, rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
    torch.testing.assert_close(expected.double(), problem.exact(), rtol=0, atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("config", [SMALL, PAIRS], ids=["tiles", "pairs"])
@pytest.mark.parametrize(("floor", "added"), [(0.0, 0.0), (1e-20, 0.5), (5.0, 0.0)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_mixtures_with_given_weights_equal_their_specification(renormalize, floor, added, config):
    num_tokens = 2 if config is PAIRS else 19
    problem = make_problem(
        num_tokens=num_tokens, num_experts=6, top_k=3, hidden_size=32, intermediate_size=24, dtype=torch.float32,
        renormalize=renormalize, round_weights=False,
    )  # fmt: skip
    given = torch.rand(num_tokens, 6)
    problem.logits[:, 1:3] = -float("inf")  # as experts of other groups
    problem = dataclasses.replace(problem, given=given, floor=floor, added=added, factor=2.5)
    out, expected = problem.call(moe_triton.fused_moe, config=config), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.double(), problem.exact(), rtol=0, atol=1e-4)
    weights, experts = moe.route(problem.logits, top_k=3, renormalize=False, given=given)
    assert not set(experts.flatten().tolist()) & {1, 2}
    assert torch.equal(weights, given.gather(1, experts))


def test_a_token_gives_the_same_in_any_batch_of_one_path():
    problem = make_problem(
        num_tokens=21,
        num_experts=6,
        top_k=2,
        hidden_size=32,
        intermediate_size=24,
        dtype=torch.float16,
        has_shared=True,
    )
    whole = problem.call(moe_triton.fused_moe, config=SMALL)
    order = torch.randperm(21)
    moved = type(problem)(
        problem.x[order], problem.logits[order], problem.gate_up, problem.down, problem.shared[order],
        problem.top_k, problem.renormalize, problem.round_weights,
    )  # fmt: skip
    assert torch.equal(moved.call(moe_triton.fused_moe, config=SMALL), whole[order])


def test_a_model_with_them_gives_the_logits_of_one_without():
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    raw = {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 16} | sizes | experts
    config = ModelConfig.from_json(raw)
    model = build(config, Weights.dummy(device=CPU, dtype=torch.float32), TensorParallel())
    logits = []
    for fused_moe in (moe.fused_moe, moe_triton.fused_moe):
        runner = PagedRunner(model, config)
        row = runner.add_row()
        with mock.patch.object(moe_layer, "fused_moe", fused_moe):
            logits.append(torch.cat(runner.step([(row, [1, 2, 3, 4, 5])]) + runner.step([(row, [6])])))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert logits[0].std() > 0.01
