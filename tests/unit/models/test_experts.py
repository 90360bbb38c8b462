"""Experts are read from every layout that checkpoints have, each rank its share, and routed as config.json says."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from models.build import build
from models.config.model_config import ModelConfig, ModelError
from models.layers.moe import SparseMLP
from models.layers.routing import ExpertNames
from models.parallel import TensorParallel
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

pytestmark = pytest.mark.slow

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe")
ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
BLOCK = {"mixtral": "model.layers.0.block_sparse_moe", "qwen2_moe": "model.layers.0.mlp"}
PROMPT = [3, 90, 17, 4, 55, 8, 8, 61]


def merge_experts(folder):
    """Rewrite the checkpoint as transformers 5 has it in memory, which save_original_format=False saves."""
    path = folder / "model.safetensors"
    tensors, merged, experts = load_file(path), {}, {}
    for name, tensor in tensors.items():
        head, found, tail = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
        if not found:
            merged[head] = tensor
            continue
        expert, matrix = tail.removesuffix(".weight").split(".")
        place = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(matrix, matrix)
        experts.setdefault(f"{head}.experts", {}).setdefault(place, {})[int(expert)] = tensor
    for prefix, matrices in experts.items():
        stacked = {place: torch.stack([found[i] for i in range(len(found))]) for place, found in matrices.items()}
        merged[f"{prefix}.gate_up_proj"] = torch.cat((stacked["gate_proj"], stacked["up_proj"]), 1)
        merged[f"{prefix}.down_proj"] = stacked["down_proj"]
    save_file(merged, path)


@pytest.mark.parametrize("kind", [*KINDS, "kimi_linear"])
def test_merged_experts_give_the_logits_of_published_ones(kind, tmp_path):
    save_checkpoint(tmp_path, make_config(kind))
    expected = reference_logits(tmp_path, PROMPT)
    merge_experts(tmp_path)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path))
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    # and it is what transformers itself reads there
    torch.testing.assert_close(reference_logits(tmp_path, PROMPT), expected, atol=1e-5, rtol=0)


FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_quantised_experts_is_refused_by_its_config(kind):
    raw = make_config(kind).to_dict() | {"architectures": [ARCHITECTURES[kind]]}
    with pytest.raises(ModelError, match=r"experts are quantized \(mxfp4\).*use the bf16 checkpoint"):
        ModelConfig.from_json(raw | {"quantization_config": {"quant_method": "mxfp4"}})
    ignored = FP8 | {"ignored_layers": ["experts", "re:.*mlp.gate$"]}
    config = ModelConfig.from_json(raw | {"quantization_config": ignored})
    assert config.quantization.scheme_of("model.layers.0.self_attn.q_proj") is not None
    assert ModelConfig.from_json(raw).quantized("fp8").quantization.is_on_load


def test_a_shared_expert_is_counted_as_quantised_beside_routed_ones():
    raw = make_config("qwen2_moe").to_dict() | {"architectures": [ARCHITECTURES["qwen2_moe"]]}
    config = ModelConfig.from_json(raw)
    fp8 = config.quantized("fp8")
    saved = config.weight_bytes(torch.bfloat16) - fp8.weight_bytes(torch.bfloat16)
    routed_only = dataclasses.replace(fp8, experts=dataclasses.replace(fp8.experts, shared_intermediate_size=0))
    plain = dataclasses.replace(routed_only, quantization=None)
    without_shared = plain.weight_bytes(torch.bfloat16) - routed_only.weight_bytes(torch.bfloat16)
    shared, hidden, num_sparse = 40, config.hidden_size, config.sparse_layers.count(True)
    assert num_sparse > 0
    assert saved - without_shared == num_sparse * (3 * shared * hidden - 4 * (2 * shared + hidden))


@pytest.mark.parametrize("is_merged", [False, True])
def test_ranks_have_their_shares_of_each_expert(is_merged, tmp_path):
    save_checkpoint(tmp_path, make_config("qwen2_moe"))
    if is_merged:
        merge_experts(tmp_path)
    config = ModelConfig.from_folder(tmp_path)

    def block(tp):
        w = Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32) / BLOCK["qwen2_moe"]
        return SparseMLP(config, w, tp, Unquantized(), ExpertNames())

    whole = block(TensorParallel())
    parts = [block(TensorParallel(rank, 4, distributed.GroupMember.NON_GROUP_MEMBER)) for rank in range(4)]
    assert whole.weights.gate_up.shape == (8, 48, 32)
    assert whole.weights.down.shape == (8, 32, 24)
    gates, ups = zip(*(part.weights.gate_up.split(6, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat(gates + ups, dim=1), whole.weights.gate_up)
    assert torch.equal(torch.cat([part.weights.down for part in parts], dim=2), whole.weights.down)


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_one_model_however_it_is_split(kind, tmp_path):
    save_checkpoint(tmp_path, make_config(kind))
    config = ModelConfig.from_folder(tmp_path)
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    ranks = [TensorParallel(), *(TensorParallel(r, 2, distributed.GroupMember.NON_GROUP_MEMBER) for r in range(2))]
    whole, *parts = (SparseMLP(config, w / "mlp", tp, Unquantized(), ExpertNames()) for tp in ranks)
    assert torch.equal(torch.cat([part.weights.down for part in parts], dim=2), whole.weights.down)
    assert all(torch.equal(part.router.linear.params["weight"], whole.router.linear.params["weight"]) for part in parts)
    assert len({tuple(e.flatten()[:4].tolist()) for e in whole.weights.down}) == whole.weights.down.shape[0]


def test_one_layer_of_each_kind_is_a_model_that_runs(tmp_path):
    save_checkpoint(tmp_path, make_config("qwen2_moe"))
    config = ModelConfig.from_folder(tmp_path).one_layer_of_each_kind()
    assert set(config.sparse_layers) == {False, True}
    model = build(config, Weights.dummy(device=CPU, dtype=torch.float32), TensorParallel())
    runner = PagedRunner(model, config)
    assert runner.step([(runner.add_row(), PROMPT)])[0].isfinite().all()


def test_a_missing_expert_is_named(tmp_path):
    save_checkpoint(tmp_path, make_config("mixtral"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[BLOCK["mixtral"] + ".experts.3.w2.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.block_sparse_moe\.experts\.3\.w2\.weight"):
        load(tmp_path)


def test_an_expert_too_many_is_named(tmp_path):
    save_checkpoint(tmp_path, make_config("mixtral"))
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_local_experts": 4', '"num_local_experts": 3'))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    gates = {name: tensor[:3] for name, tensor in tensors.items() if name.endswith("gate.weight")}
    save_file(tensors | {name: gate.clone() for name, gate in gates.items()}, path)
    with pytest.raises(ModelError, match=r"9 tensors have no place in the model: .*experts\.3"):
        load(tmp_path)


@pytest.mark.parametrize("field", ["norm_topk_prob", "num_experts_per_tok", "mlp_only_layers"])
def test_each_field_of_routing_changes_the_logits(field, tmp_path):
    config = make_config("qwen3_moe")
    save_checkpoint(tmp_path, config)
    before = reference_logits(tmp_path, PROMPT)
    text = (tmp_path / "config.json").read_text()
    old, new = {
        "norm_topk_prob": ('"norm_topk_prob": true', '"norm_topk_prob": false'),
        "num_experts_per_tok": ('"num_experts_per_tok": 3', '"num_experts_per_tok": 2'),
        "mlp_only_layers": ('"mlp_only_layers": []', '"mlp_only_layers": [2]'),
    }[field]
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new))
    if field == "mlp_only_layers":
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.gate_proj\.weight .*is missing"):
            load(tmp_path)
        return
    runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path))
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    torch.testing.assert_close(logits, reference_logits(tmp_path, PROMPT), atol=1e-4, rtol=0)
    assert (logits - before).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("glm4_moe", "model.layers.3.mlp.gate"),
        ("mellum", "mtp.norm"),
        ("ernie4_5_moe", "model.mtp"),
        ("qwen3_next", "mtp.fc"),
    ],
)
def test_layers_that_guess_further_tokens_are_left_unread_and_no_others(kind, layer, tmp_path, caplog):
    save_checkpoint(tmp_path, make_config(kind))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{layer}.weight": torch.ones(2)}, path)
    load(tmp_path)
    assert "guesses of further tokens are not read: tensors=1" in caplog.text
    save_file(tensors | {"model.layers.4.mlp.gate.weight": torch.ones(2)}, path)
    with pytest.raises(ModelError, match=r"1 tensors have no place in the model: model\.layers\.4"):
        load(tmp_path)


@pytest.mark.parametrize(("kind", "field"), [("glm4_moe_groups", "topk_group"), ("phimoe", "router_jitter_noise")])
def test_groups_and_jitter_change_the_logits(kind, field, tmp_path):
    save_checkpoint(tmp_path, make_config(kind))
    before = reference_logits(tmp_path, PROMPT)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {field: {"topk_group": 4, "router_jitter_noise": 0.01}[field]}))
    runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path))
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    torch.testing.assert_close(logits, reference_logits(tmp_path, PROMPT), atol=1e-4, rtol=0)
    assert (logits - before).abs().max() > 0.05
