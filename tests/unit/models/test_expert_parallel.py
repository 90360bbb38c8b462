"""Ranks that have whole experts, each some of them, give the logits of one rank that has all."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from kernels.moe.planes import PlanesMatrix
from models.build import build, check_headers
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.layers import moe
from models.parallel import TensorParallel
from models.weights.weights import Weights
from tests.support.checkpoints import TINY, make_configs
from tests.support.hybrid_checkpoints import make_hybrids
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.packed_experts import FP8_CONFIG, MXFP4_CONFIG, save_fp8_blocks, save_mxfp4
from tests.support.rank_group import run_ranks
from tests.support.reference import save_checkpoint
from tests.support.tensor_parallel_rank import PROMPT, run_rank
from tests.unit.models.test_experts import merge_experts

CONFIGS = make_configs() | make_hybrids(TINY)
# Softmax and sigmoid, groups, shared experts with and without gates, biases, scales of experts and of their inputs
KINDS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_groups"),
    *("granite_moe_shared", "phimoe", "ernie4_5_moe", "hunyuan_moe", "llama4", "gemma4_experts", "mellum"),
    *("lfm2_moe", "nemotron_3_latent"),
)
# Experts whose parts would cut the blocks of their scales: 144 inputs of 128 for two ranks, 64 of 32 for four
PACKED = {
    "mxfp4": save_mxfp4,
    "fp8": save_fp8_blocks,
    "fp8_deepseek": lambda dense, packed: save_fp8_blocks(dense, packed, kind="deepseek_v3"),
}


def rank_of(rank, size):
    """A rank of a model whose layers are only looked at."""
    return TensorParallel(rank, size, distributed.GroupMember.NON_GROUP_MEMBER, is_expert_parallel=True)


def with_experts(kind, count):
    config = copy.deepcopy(CONFIGS[kind])
    name = "num_local_experts" if hasattr(config, "num_local_experts") else "num_experts"
    setattr(config, name, count)
    return config


def assert_ranks_give_the_logits_of_one(folders, size, tmp_path):
    run_ranks(run_rank, size, tmp_path / "store", folders, True)
    for folder in folders:
        runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
        expected = runner.step([(runner.add_row(), PROMPT)])[0]
        for rank in range(size):
            logits = torch.load(folder / f"logits-{size}-{rank}.pt")
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1)), folder.name


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_with_whole_experts_give_the_logits_of_one(size, tmp_path):
    configs = {kind: copy.deepcopy(CONFIGS[kind]) for kind in KINDS}
    configs["qwen3_5_moe"].linear_num_key_heads = size
    configs["qwen3_5_moe"].linear_num_value_heads = 2 * size
    uneven = {f"{kind}_uneven": with_experts(kind, 7) for kind in ("qwen3_moe", "gpt_oss")}
    folders = [tmp_path / name for name in configs | uneven]
    for folder, config in zip(folders, (configs | uneven).values(), strict=True):
        save_checkpoint(folder, config)
    for kind in ("qwen3_moe", "qwen2_moe"):  # the layout with one tensor of all experts
        save_checkpoint(tmp_path / f"{kind}_merged", CONFIGS[kind])
        merge_experts(tmp_path / f"{kind}_merged")
        folders.append(tmp_path / f"{kind}_merged")
    assert_ranks_give_the_logits_of_one(folders, size, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_whole_experts_are_split_between_the_blocks_of_any_scheme(size, tmp_path):
    for kind, save in PACKED.items():
        save(tmp_path / f"dense-{kind}", tmp_path / kind)
    config = ModelConfig.from_folder(tmp_path / ("mxfp4" if size == 4 else "fp8"))
    with pytest.raises(ModelError, match=r"only at multiples of \d+: use --expert-parallel or fewer ranks"):
        config.check_tensor_parallel(size)
    assert_ranks_give_the_logits_of_one([tmp_path / kind for kind in PACKED], size, tmp_path)


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(8, 2, [4, 4]), (7, 2, [3, 4]), (10, 4, [2, 3, 2, 3]), (3, 3, [1] * 3)]
)
def test_the_experts_of_all_ranks_are_the_experts(count, size, sizes):
    shares = [rank_of(rank, size).share_of_experts(count) for rank in range(size)]
    assert [len(share.here) for share in shares] == sizes
    assert [expert for share in shares for expert in share.here] == list(range(count))
    assert all((share.rank, share.size) == (0, 1) for share in shares)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_each_expert_is_on_one_rank_and_no_other(kind):
    config = ModelConfig.from_json(CONFIGS[kind].to_dict() | {"architectures": [type_of(kind)]})
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    sparse = config.sparse_layers.index(True)
    whole = build(config, w, TensorParallel()).layers[sparse].mlp
    parts = [build(config, w, rank_of(rank, 2)).layers[sparse].mlp for rank in range(2)]
    for name in ("gate_up", "down"):
        found = [getattr(part.weights, name) for part in parts]
        assert torch.equal(torch.cat(found), getattr(whole.weights, name))
    assert [part.weights.first_expert for part in parts] == [0, config.experts.num_experts // 2]
    if whole.weights.biases is not None:  # of an expert that is whole, also its bias
        assert torch.equal(torch.cat([part.weights.biases.down for part in parts]), whole.weights.biases.down)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_in_planes_are_those_of_their_rank(kind, monkeypatch):
    """The arrangement of bfloat16 on a Hopper GPU, which needs no GPU itself."""
    monkeypatch.setattr(moe, "takes_planes", lambda dtype, device, is_integer: device.type == "cuda")
    sizes = {"hidden_size": 128, "intermediate_size" if kind == "gpt_oss" else "moe_intermediate_size": 128}
    raw = CONFIGS[kind].to_dict() | {"architectures": [type_of(kind)]} | sizes
    config = ModelConfig.from_json(raw | {"quantization_config": MXFP4_CONFIG if kind == "gpt_oss" else FP8_CONFIG})
    w = Weights.dummy(device=CPU, dtype=torch.bfloat16)
    mlp = build(config, w, rank_of(1, 2)).layers[-1].mlp
    w.device = torch.device("cuda")
    arranged = moe._arrange(mlp.weights, w)
    assert isinstance(arranged.gate_up, PlanesMatrix)
    assert isinstance(arranged.down, PlanesMatrix)
    assert arranged.first_expert == mlp.weights.first_expert == config.experts.num_experts // 2
    assert arranged.biases is mlp.weights.biases


def type_of(kind):
    return f"{type(CONFIGS[kind]).__name__.removesuffix('Config')}ForCausalLM"


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_only_a_ranks_own_experts_are_read(kind, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, CONFIGS[kind])
    read, progress = [], []
    original = Weights._read
    monkeypatch.setattr(Weights, "_read", lambda w, part: read.append(part.name) or original(w, part))
    config = ModelConfig.from_folder(tmp_path)
    w = Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32, progress=lambda *done: progress.append(done))
    build(config, w, rank_of(1, 2))
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name} == {4, 5, 6, 7}
    done = [bytes_done for bytes_done, _ in progress]
    assert done == sorted(done)
    total = (tmp_path / "model.safetensors").stat().st_size
    assert total - 20_000 < done[-2] < done[-1] == total  # all but the header, before finish() says "all"


def test_an_experts_tensor_without_a_place_is_found_by_its_rank(tmp_path):
    save_checkpoint(tmp_path, CONFIGS["qwen3_moe"])
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.1.mlp.experts.5.odd": torch.ones(1)}, path)
    config = ModelConfig.from_folder(tmp_path)
    build(config, Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32), rank_of(0, 2))
    odd = r"1 tensors have no place in the model: .*experts\.5\.odd"
    with pytest.raises(ModelError, match=odd):
        build(config, Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32), rank_of(1, 2))
    with pytest.raises(ModelError, match=odd):  # before weights are read
        check_headers(config, tmp_path, rank_of(0, 2), dtype=torch.float32)


@pytest.mark.parametrize("packed", [None, MXFP4_CONFIG])
@pytest.mark.parametrize(("size", "count"), [(2, 8), (2, 7), (4, 6)])
def test_the_bytes_of_a_rank_are_those_of_the_largest_share(size, count, packed):
    raw = with_experts("gpt_oss", count).to_dict() | {"architectures": ["GptOssForCausalLM"], "hidden_size": 64}
    config = ModelConfig.from_json(raw | {"intermediate_size": 96, "quantization_config": packed})
    share = config.share_of_rank(size, is_expert_parallel=True)
    parts = [build(config, Weights.dummy(device=CPU, dtype=torch.bfloat16), rank_of(r, size)) for r in range(size)]
    largest = max(sum(map(num_bytes, part.layers)) for part in parts)
    layers = config.num_layers
    matrices = 3 * 64 * 96 * (2 if packed is None else 17 / 32) + (2 * 96 + 64) * 2
    assert largest == layers * -(-count // size) * matrices
    all_bytes, none = (counted(config, number) for number in (count, 0))
    assert all_bytes - none == layers * count * matrices
    assert share.weight_bytes(torch.bfloat16) - counted(share, 0) == layers * -(-count // size) * matrices
    assert share.experts.num_experts == count
    assert share.experts.intermediate_size == 96


def counted(config, num_experts):
    """The bytes of weights if each layer stored so many of its experts."""
    experts = dataclasses.replace(config.experts, num_on_rank=num_experts)
    return dataclasses.replace(config, experts=experts).weight_bytes(torch.bfloat16)


def num_bytes(layer):
    weights = layer.mlp.weights
    tensors = [weights.biases.gate_up, weights.biases.down]
    for matrix in (weights.gate_up, weights.down):
        tensors += [matrix] if isinstance(matrix, torch.Tensor) else [matrix.blocks, matrix.scales]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("qwen3", 2, "--expert-parallel: Qwen3ForCausalLM has no experts: --tensor-parallel-size 2 alone splits it"),
        (
            "mixtral", 8,
            "--expert-parallel: MixtralForCausalLM has 4 experts, and each rank needs one: --tensor-parallel-size 8"
            " must be at most 4",
        ),
        ("mixtral", 1, "--tensor-parallel-size is 1: it must be at least 2"),
        ("qwen3_moe", 8, "num_heads 4 does not split over 8 ranks"),
    ],
)  # fmt: skip
def test_what_has_no_experts_for_each_rank_is_refused(kind, size, message):
    config = ModelConfig.from_json(CONFIGS[kind].to_dict() | {"architectures": [type_of(kind)]})
    with pytest.raises(ModelError, match=message):
        config.check_tensor_parallel(size, is_expert_parallel=True)


@pytest.mark.parametrize(
    ("name", "size"), [("qwen3-30b-a3b-fp8", 4), ("gpt-oss-20b-mxfp4", 4), ("gpt-oss-20b-mxfp4", 8)]
)
def test_published_models_whose_blocks_parts_would_cut_split_by_whole_experts(name, size):
    config = ModelConfig.from_folder(Path("benchmarks/shapes") / name)
    with pytest.raises(ModelError, match="--expert-parallel"):
        config.check_tensor_parallel(size)
    config.check_tensor_parallel(size, is_expert_parallel=True)
    share = config.share_of_rank(size, is_expert_parallel=True).weight_bytes(torch.bfloat16)
    whole = config.weight_bytes(torch.bfloat16)
    assert whole / size < share < 1.25 * whole / size  # norms and routers are on every rank


def test_experts_of_a_width_that_does_not_split_may_be_whole():
    raw = CONFIGS["qwen3_moe"].to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 21}
    config = ModelConfig.from_json(raw)
    with pytest.raises(ModelError, match=r"of each expert 21 does not split over 2 ranks: use --expert-parallel$"):
        config.check_tensor_parallel(2)
    config.check_tensor_parallel(2, is_expert_parallel=True)
    blocks = ModelConfig.from_json(raw | {"moe_intermediate_size": 384, "quantization_config": FP8_CONFIG})
    blocks.check_tensor_parallel(2, is_expert_parallel=True)
