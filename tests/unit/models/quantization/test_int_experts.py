"""Experts in integers: AWQ, GPTQ and pack-quantized give what their dequantised weights give, whole and split."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from kernels.moe.planes import to_planes
from kernels.moe.storage import dense_matrix
from kernels.moe.storage_int import IntMatrix
from models.build import build
from models.config.model_config import ModelConfig
from models.config.size import quantized_experts
from models.errors import ModelError
from models.parallel import TensorParallel
from models.quantization import experts_scheme
from models.quantization.config import LayerNames
from models.quantization.experts_scheme import expert_bytes
from models.weights.weights import Weights
from tests.support.checkpoints import make_config, make_configs
from tests.support.int_checkpoints import AWQ, edit_config, gptq_config, packed_config
from tests.support.int_experts import FAMILIES, FORMATS, save_int_experts
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.packed_experts import num_bytes
from tests.support.rank_group import run_ranks
from tests.support.reference import reference_logits
from tests.support.tensor_parallel_rank import PROMPT, run_rank

pytestmark = pytest.mark.slow

EXPERTS = "model.layers.1.mlp.experts"
SHAPES = Path(__file__).parents[4] / "benchmarks" / "shapes"
REFUSED = ("gptq_desc_act", "packed_ordered")
# kinds that another family than the first shows
ELSEWHERE = {
    "awq": "qwen3_next", "packed": "mixtral", "gptq": "glm4_moe", "packed_channel": "deepseek_v3",
    "gptq_symmetric": "qwen3_5_moe",
}  # fmt: skip
GIB = 2**30


def run(folder, *, cuts=None, num_more=0):
    """The logits of PROMPT, computed in chunks of these sizes or whole, and of so many greedy tokens after it."""
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
    row, prompt, logits = runner.add_row(), iter(PROMPT), []
    for size in cuts or [len(PROMPT)]:
        logits += runner.step([(row, [next(prompt) for _ in range(size)])])
    for _ in range(num_more):
        logits += runner.step([(row, [int(logits[-1][-1].argmax())])])
    return torch.cat(logits)


def save(tmp_path, kind, **options):
    save_int_experts(tmp_path / "dense", tmp_path / "packed", FORMATS[kind], **options)
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        # each kind once
        *((kind, "qwen3_moe") for kind in FORMATS if kind not in (*REFUSED, *ELSEWHERE)),
        *((kind, family) for kind, family in ELSEWHERE.items()),
        *(pytest.param(kind, "qwen3_moe", marks=pytest.mark.full) for kind in ELSEWHERE),
        *(pytest.param(kind, "mixtral", marks=pytest.mark.full) for kind in ("awq",)),
        pytest.param("packed", "glm4_moe", marks=pytest.mark.full),
        pytest.param("awq", "deepseek_v3", marks=pytest.mark.full),
    ],
)
def test_experts_in_integers_give_the_logits_of_what_they_mean(kind, family, tmp_path):
    packed = save(tmp_path, kind, family=family)
    logits, unpacked = run(packed, num_more=6), run(tmp_path / "dense", num_more=6)
    torch.testing.assert_close(logits, unpacked, atol=3e-5, rtol=0)
    assert torch.equal(logits.argmax(-1), unpacked.argmax(-1))
    assert len(set(logits.argmax(-1).tolist())) > 3
    tolerance = 2e-4 if family == "qwen3_5_moe" else 1e-4  # its recurrence rounds otherwise in transformers
    expected = reference_logits(tmp_path / "dense", PROMPT)
    torch.testing.assert_close(logits[: len(PROMPT)], expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(run(packed, cuts=(4, 1, 1, 5)), logits[: len(PROMPT)], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kinds",
    [
        {"awq": "deepseek_v3", "packed_channel": "mixtral"},
        pytest.param({"packed": "deepseek_v3", "gptq_8bit": "deepseek_v3"}, marks=pytest.mark.full),
    ],
    ids=["few", "others"],
)
def test_split_experts_in_integers_give_the_logits_of_the_whole(kinds, tmp_path):
    folders = []
    for kind, family in kinds.items():
        (tmp_path / kind).mkdir()
        # heads of these sizes do not end at words and groups
        folders.append(save(tmp_path / kind, kind, family=family, quantizes_attention=False))
    run_ranks(run_rank, 2, tmp_path / "store", folders)
    for folder in folders:
        expected = run(folder)
        for rank in range(2):
            torch.testing.assert_close(torch.load(folder / f"logits-2-{rank}.pt"), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "has_zeros", "bits"),
    [("awq", True, 4), ("gptq", True, 4), ("gptq_symmetric", False, 4), ("gptq_8bit", True, 8), ("packed", False, 4)],
)
def test_weights_stay_packed_in_the_bytes_that_the_config_says(kind, has_zeros, bits, tmp_path, monkeypatch):
    packed = save(tmp_path, kind)
    config = ModelConfig.from_folder(packed)
    weights = load(packed).layers[1].mlp.weights
    assert (weights.gate_up.has_zeros, weights.gate_up.bits) == (has_zeros, bits)
    monkeypatch.setattr(experts_scheme, "takes_planes", lambda dtype, device, is_integer: device.type == "cuda")
    found = [weights.gate_up, weights.down]
    said, planes = [], []
    for matrix, scheme, count in quantized_experts(config):
        if ".layers.1." in matrix.name:
            sizes = matrix.out_features, matrix.in_features
            said.append(count * scheme.expert_bytes(*sizes))
            planes.append(count * expert_bytes(scheme, *sizes, dtype=torch.bfloat16, device=torch.device("cuda")))
    assert num_bytes(found) == sum(said)
    assert num_bytes([to_planes(matrix) for matrix in found]) == sum(planes)
    assert (sum(planes) > sum(said)) == (bits == 4)  # 8 bits stay as they are


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("awq", "3.up_proj.scales", None, r"experts\.3\.up_proj\.scales with shape \[2, 96\] is missing"),
        ("awq", "3.up_proj.qzeros", None, r"experts\.3\.up_proj\.qzeros .*is missing"),
        (
            "awq", "0.down_proj.scales", torch.ones(2, 64).half(),
            r"down_proj\.scales has shape \[2, 64\], but config.json requires \[3, 64\]",
        ),
        ("awq", "0.down_proj.qweight", torch.zeros(96, 8), r"down_proj\.qweight is float32"),
        ("gptq", "0.gate_proj.qzeros", torch.zeros(1, 12).int(), r"qzeros has shape \[1, 12\], .* \[2, 12\]"),
        ("gptq", "2.gate_proj.g_idx", torch.arange(64).int() % 2, r"experts\.2\.gate_proj: .*g_idx.* for experts"),
        ("gptq_symmetric", "2.gate_proj.bias", torch.ones(96).half(), r"experts\.2\.gate_proj: .*bias is not zero"),
        ("packed", "7.up_proj.weight_scale", None, r"experts\.7\.up_proj\.weight_scale .*is missing"),
        ("packed", "7.up_proj.weight_scale", torch.ones(96, 1).half(), r"weight_scale has shape .* \[96, 2\]"),
        ("packed", "0.up_proj.weight_shape", torch.tensor([96, 32]), r"weight_shape says \[96, 32\], .* \[96, 64\]"),
        ("packed_asymmetric", "0.up_proj.weight_zero_point", None, r"weight_zero_point .*is missing"),
    ],
)  # fmt: skip
def test_a_missing_or_odd_tensor_is_named(kind, name, value, message, tmp_path):
    path = save(tmp_path, kind) / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(f"{EXPERTS}.{name}", None)
    save_file(tensors if value is None else tensors | {f"{EXPERTS}.{name}": value}, path)
    with pytest.raises(ModelError, match=message):
        load(path.parent)


class Recording:
    """A reader that says which tensors are read."""

    def __init__(self, reader):
        self._reader = reader
        self.names = []

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def read(self, part):
        self.names.append(part.name)
        return self._reader.read(part)


@pytest.mark.parametrize(("kind", "scales"), [("awq", "scales"), ("gptq", "scales"), ("packed", "weight_scale")])
def test_an_expert_without_scales_is_refused_before_its_weights_are_read(kind, scales, tmp_path):
    path = save(tmp_path, kind) / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{EXPERTS}.0.gate_proj.{scales}"]
    save_file(tensors, path)
    w = Weights.from_folder(path.parent, device=CPU, dtype=torch.float32)
    reader = Recording(w._reader)
    with pytest.raises(ModelError, match=rf"gate_proj\.{scales} .*; the layer is quantized as {kind[:4]}"):
        build(ModelConfig.from_folder(path.parent), Weights(reader), TensorParallel())
    assert any("layers.0.mlp.experts" in name for name in reader.names)
    weights = [f"{EXPERTS}.0.gate_proj.{tensor}" for tensor in ("qweight", "weight_packed")]
    assert not {*weights} & {*reader.names}


def parse(kind, quantization, **sizes):
    architecture = {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "granite_moe": "GraniteMoe", "mixtral": "Mixtral"}
    raw = make_config(kind).to_dict() | sizes | {"quantization_config": quantization}
    return ModelConfig.from_json(raw | {"architectures": [f"{architecture[kind]}ForCausalLM"]})


@pytest.mark.parametrize(
    ("kind", "quantization", "message"),
    [
        (
            "qwen3_moe", gptq_config(desc_act=True),
            r"layers\.0\.mlp\.experts\.0\.gate_proj is quantized as gptq .*desc_act\): desc_act .*not supported",
        ),
        ("mixtral", packed_config(actorder="group"), r"experts\.0\.w1 is quantized as pack-quantized .*not supported"),
        ("qwen3_moe", AWQ | {"group_size": 12}, r"gate_proj is quantized as awq .*group_size 12 .* multiple of 8"),
        ("gpt_oss", AWQ, r"experts\.gate_up_proj is quantized as awq .*all experts in one tensor"),
        ("granite_moe", AWQ, r"quantized as awq .*this family's experts"),
        ("qwen3_moe", AWQ | {"version": "gemv"}, r"version 'gemv' is not supported"),
        ("qwen3_moe", packed_config(num_bits=3), r"weights \(3-bit int"),
    ],
)  # fmt: skip
def test_experts_that_are_not_served_are_refused_by_layer_and_scheme(kind, quantization, message):
    with pytest.raises(ModelError, match=message):
        parse(kind, quantization)


def test_experts_of_one_layer_with_two_schemes_are_refused(tmp_path):
    packed = save(tmp_path, "awq")
    section = json.loads((packed / "config.json").read_text())["quantization_config"]
    names = [*section["modules_to_not_convert"], f"{EXPERTS}.7.down_proj"]
    edit_config(packed, quantization_config=section | {"modules_to_not_convert": names})
    words = r"experts\.0\.gate_proj is awq .* and .*experts\.7\.down_proj is not quantized, .*: all experts of a layer"
    with pytest.raises(ModelError, match=words):
        load(packed)


@pytest.mark.parametrize(
    ("kind", "quantization", "sizes", "message"),
    [
        (
            "qwen3_moe", AWQ | {"group_size": 32}, {"moe_intermediate_size": 96},
            r"experts\.0\.down_proj: 2 ranks have 48 inputs each, but awq .* split only at multiples of 32",
        ),
        (
            "mixtral", packed_config(group_size=32), {"intermediate_size": 96},
            r"experts\.0\.w2: 2 ranks have 48 inputs each, but pack-quantized .* split only at multiples of 32",
        ),
        (
            "qwen3_moe", gptq_config(bits=4, group_size=-1), {"moe_intermediate_size": 24},
            r"experts\.0\.gate_proj: 2 ranks have 12 outputs each, but gptq .* split only at multiples of 8",
        ),
    ],
)  # fmt: skip
def test_ranks_that_would_cut_a_group_of_experts_are_refused(kind, quantization, sizes, message):
    names = {"awq": "modules_to_not_convert", "gptq": "modules_to_not_convert", "compressed-tensors": "ignore"}
    own = {names[quantization["quant_method"]]: ["self_attn", "lm_head", "gate"]}
    config = parse(kind, quantization | own, hidden_size=64, **sizes)
    with pytest.raises(ModelError, match=message):
        config.check_tensor_parallel(2)


@pytest.mark.parametrize("quantization", [AWQ, gptq_config(bits=8, sym=True), packed_config()])
def test_random_experts_in_integers_are_one_model_however_they_are_split(quantization):
    config = parse("qwen3_moe", quantization, hidden_size=64, moe_intermediate_size=64)
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    ranks = [TensorParallel(), *(TensorParallel(r, 2, distributed.GroupMember.NON_GROUP_MEMBER) for r in range(2))]
    whole, *parts = (build(config, w, tp).layers[0].mlp.weights for tp in ranks)
    assert isinstance(whole.down, IntMatrix)
    assert whole.down.has_zeros == (quantization["quant_method"] == "awq")
    for expert in (0, 7):
        whole_up, *part_ups = (dense_matrix(each.gate_up, expert, torch.float32) for each in (whole, *parts))
        gates, ups = zip(*(each.chunk(2) for each in part_ups), strict=True)
        assert torch.equal(torch.cat(gates + ups), whole_up)
        downs = [dense_matrix(each.down, expert, torch.float32) for each in (whole, *parts)]
        assert torch.equal(torch.cat(downs[1:], dim=1), downs[0])
        assert 0.015 < downs[0].std() < 0.025


def test_ranks_with_whole_experts_have_those_of_the_whole():
    """Without a cut through groups, which the same ranks would have with a part of each expert."""
    config = parse("qwen3_moe", AWQ | {"group_size": 64}, hidden_size=64, moe_intermediate_size=64)
    w, group = Weights.dummy(device=CPU, dtype=torch.float32), distributed.GroupMember.NON_GROUP_MEMBER
    ranks = [TensorParallel(), *(TensorParallel(rank, 2, group, is_expert_parallel=True) for rank in range(2))]
    names = LayerNames(("self_attn",))
    config = dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, ignored=names))
    whole, *parts = (build(config, w, tp).layers[0].mlp.weights for tp in ranks)
    for name in ("gate_up", "down"):
        found = [getattr(part, name) for part in parts]
        assert torch.equal(torch.cat([each.words for each in found]), getattr(whole, name).words)
        assert torch.equal(torch.cat([each.groups for each in found]), getattr(whole, name).groups)


def test_a_model_without_values_has_the_shapes_of_one_with():
    config = parse("qwen3_moe", AWQ, hidden_size=64, moe_intermediate_size=64)
    found = [
        build(config, Weights.dummy(device=torch.device(name), dtype=torch.bfloat16), TensorParallel())
        for name in ("meta", "cpu")
    ]
    shapes = [(each.words.shape, each.groups.shape) for each in (m.layers[0].mlp.weights.down for m in found)]
    assert shapes[0] == shapes[1]


def test_sizes_of_whole_models():
    """With all but embeddings, head, routers and norms in integers: GiB, counted by hand from the shapes."""
    qwen = json.loads((SHAPES / "qwen3-30b-a3b-awq" / "config.json").read_text())
    assert 15.9 < ModelConfig.from_json(qwen).weight_bytes(torch.float16) / GIB < 16.1
    symmetric = qwen | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}
    assert 15.5 < ModelConfig.from_json(symmetric).weight_bytes(torch.float16) / GIB < 15.6
    eight = qwen | {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}}
    assert 29.4 < ModelConfig.from_json(eight).weight_bytes(torch.float16) / GIB < 29.6
    air = json.loads((SHAPES / "glm-4.5-air-int4" / "config.json").read_text())
    assert 57.9 < ModelConfig.from_json(air).weight_bytes(torch.bfloat16) / GIB < 58.1


def test_every_family_of_these_tests_is_a_kind():
    assert {family.kind for family in FAMILIES.values()} < {*make_configs()}
