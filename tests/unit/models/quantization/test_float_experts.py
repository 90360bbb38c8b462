"""Experts in FP8 by row or tensor, NVFP4, NF4 and FP4 as published give what their dequantised weights give."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from kernels.moe.planes import PlanesMatrix, to_planes
from kernels.moe.storage import dense_matrix
from kernels.moe.storage_lut4 import TABLES
from models.build import build
from models.config.model_config import ModelConfig
from models.config.size import quantized_experts, quantized_matrices
from models.errors import ModelError
from models.parallel import TensorParallel
from models.quantization import experts_scheme
from models.weights.checkpoint import SafetensorsReader
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.float_experts import FP8_ROWS, NF4, NVFP4, SCHEMES, save_float_experts
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.packed_experts import num_bytes
from tests.support.rank_group import run_ranks
from tests.support.reference import reference_logits
from tests.support.tensor_parallel_rank import PROMPT, run_rank

pytestmark = pytest.mark.slow

SAVED = [*((scheme, "qwen3_moe") for scheme in SCHEMES), ("fp8_tensor", "mixtral"), ("nvfp4", "glm4_moe")]
SAVED += [("nf4", "deepseek_v3"), ("fp8_rows", "deepseek_v3"), ("nvfp4", "mixtral")]
SHAPES = Path(__file__).parents[4] / "benchmarks" / "shapes"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def run(folder, num_more=0, chunk=64):
    """The logits of PROMPT, so many tokens a step, and of so many greedy tokens after it."""
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
    row = runner.add_row()
    logits = [runner.step([(row, PROMPT[i : i + chunk])])[0] for i in range(0, len(PROMPT), chunk)]
    for _ in range(num_more):
        logits += runner.step([(row, [int(logits[-1][-1].argmax())])])
    return torch.cat(logits)


@pytest.mark.parametrize(("scheme", "kind"), SAVED)
def test_experts_give_the_logits_of_what_they_mean(scheme, kind, tmp_path):
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    save_float_experts(dense, packed, scheme=scheme, kind=kind)
    logits = run(packed, 6)
    torch.testing.assert_close(logits[: len(PROMPT)], reference_logits(dense, PROMPT), atol=1e-4, rtol=0)
    unpacked = run(dense, 6)
    torch.testing.assert_close(logits, unpacked, atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), unpacked.argmax(-1))
    assert len(set(logits.argmax(-1).tolist())) > 3
    torch.testing.assert_close(run(packed, 6, chunk=3), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_expert_parallel", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_split_experts_give_the_logits_of_the_whole(size, is_expert_parallel, tmp_path):
    """Whole experts may have widths whose parts would cut blocks."""
    folders = [tmp_path / scheme for scheme in SCHEMES]
    for scheme, folder in zip(SCHEMES, folders, strict=True):
        width = None if is_expert_parallel else 64 * size
        save_float_experts(tmp_path / f"dense-{scheme}", folder, scheme=scheme, width=width)
    run_ranks(run_rank, size, tmp_path / "store", folders, is_expert_parallel)
    for folder in folders:
        expected = run(folder)
        for rank in range(size):
            torch.testing.assert_close(torch.load(folder / f"logits-{size}-{rank}.pt"), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_stay_packed_and_sizes_are_those_of_their_tensors(scheme, tmp_path, monkeypatch):
    save_float_experts(tmp_path / "dense", tmp_path / "packed", scheme=scheme, width=128)
    model = load(tmp_path / "packed")
    matrices = [matrix for layer in model.layers[1:] for matrix in _matrices(layer)]
    num_weights = sum(matrix.shape[0] * matrix.shape[1] * matrix.shape[2] for matrix in matrices)
    dense, packed = (ModelConfig.from_folder(tmp_path / name) for name in ("dense", "packed"))
    saved = dense.weight_bytes(torch.bfloat16) - packed.weight_bytes(torch.bfloat16)
    assert saved == 2 * num_weights - num_bytes(matrices)
    monkeypatch.setattr(experts_scheme, "takes_planes", lambda dtype, device, is_integer: device.type == "cuda")
    arranged = [to_planes(matrix) for matrix in matrices]
    assert {isinstance(matrix, PlanesMatrix) for matrix in arranged} == {True}
    more = packed.weight_bytes(torch.bfloat16, torch.device("cuda")) - packed.weight_bytes(torch.bfloat16, CPU)
    assert more == num_bytes(arranged) - num_bytes(matrices)


def _matrices(layer):
    return layer.mlp.weights.gate_up, layer.mlp.weights.down


def _edit(folder, name, value):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors if value is None else tensors | {name: value}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("scheme", "suffix", "value", "message"),
    [
        ("fp8_rows", "weight_scale", None, r"up_proj\.weight_scale is missing .* is quantized as fp8"),
        ("fp8_rows", "weight_scale", torch.ones(3, 1), r"weight_scale has shape \[3, 1\], but config.json requires"),
        ("fp8_tensor", "weight_scale", torch.tensor(0.0), r"weight_scale is 0.0, and a scale must be a positive"),
        ("fp8_tensor", "input_scale", None, r"input_scale is missing"),
        ("fp8_rows", "weight", torch.zeros(40, 56), r"up_proj\.weight is float32, but"),
        ("nvfp4", "weight_scale", None, r"weight_scale is missing"),
        ("nvfp4", "weight_scale", torch.ones(48, 5), r"weight_scale is float32, but .* float8_e4m3fn"),
        (
            "nvfp4", "weight_scale", torch.ones(48, 3).to(torch.float8_e4m3fn),
            r"weight_scale has shape \[48, 3\], but config.json requires \[48, 5\]",
        ),
        ("nvfp4", "weight_global_scale", None, r"up_proj\.weight_global_scale is missing .* is quantized as nvfp4"),
        ("nvfp4", "weight_global_scale", torch.tensor([float("inf")]), r"weight_global_scale is inf"),
        ("nvfp4", "weight_global_scale", torch.ones(2), r"weight_global_scale has shape \[2\], but"),
        ("nvfp4", "weight_packed", torch.zeros(48, 80, dtype=torch.uint8), r"weight_packed has shape \[48, 80\]"),
        ("nf4", "weight.absmax", None, r"weight\.absmax is missing"),
        ("nf4", "weight.absmax", torch.zeros(3, dtype=torch.uint8), r"absmax has shape \[3\], but .* \[192\]"),
        ("nf4", "weight.quant_map", torch.arange(16.0), r"up_proj: its quant_map is not that of nf4"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8), r"malformed"),
    ],
)  # fmt: skip
def test_a_missing_or_odd_tensor_is_named_before_weights_of_its_layer_are_read(
    scheme, suffix, value, message, tmp_path, monkeypatch
):
    save_float_experts(tmp_path / "dense", tmp_path / "packed", scheme=scheme)
    _edit(tmp_path / "packed", f"{EXPERT}.{suffix}", value)
    read, names = SafetensorsReader.read, []
    monkeypatch.setattr(SafetensorsReader, "read", lambda self, part: names.append(part.name) or read(self, part))
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path / "packed")
    assert f"; the layer is quantized as {'bitsandbytes nf4' if scheme == 'nf4' else scheme[:3]}" in str(caught.value)
    values = [name for name in names if name.startswith("model.layers.1.mlp.experts.") and name.endswith(".weight")]
    assert not values or suffix == "weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp5"}, r"format 'nvfp5' is not supported: supported are .*nvfp4-pack-quantized"),
        ({"weights": {"group_size": 32}}, r"weights.* \(4-bit float, by tensor_group"),
        ({"weights": {"num_bits": 8}}, r"weights.* \(8-bit float"),
        ({"weights": {"type": "int"}}, r"weights.* \(4-bit int"),
        ({"input_activations": {"num_bits": 8}}, r"activations.* \(8-bit float"),
        ({"weights": {"dynamic": True}}, r"weights .*dynamic True"),
    ],
)
def test_other_formats_are_refused_by_the_config(change, message):
    group = {**NVFP4["config_groups"]["group_0"]}
    for name, fields in change.items():
        group[name] = group[name] | fields if isinstance(fields, dict) else fields
    with pytest.raises(ModelError, match=message):
        _parse("qwen3_moe", NVFP4 | {"config_groups": {"group_0": group}})


def _parse(kind, quantization, **sizes):
    architecture = {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "granite_moe": "GraniteMoe"}[kind]
    raw = make_config(kind).to_dict() | {"architectures": [f"{architecture}ForCausalLM"]} | sizes
    return ModelConfig.from_json(raw | {"quantization_config": quantization})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_families_that_store_experts_otherwise_refuse_by_layer_and_scheme(scheme):
    section, described = SCHEMES[scheme][0], {"modelopt": "nvfp4"}.get(scheme, scheme.partition("_")[0])
    with pytest.raises(ModelError, match=rf"experts\.gate_up_proj is quantized as .*{described} .*in one tensor"):
        _parse("gpt_oss", section | {"ignored_layers": [], "ignore": [], "llm_int8_skip_modules": []})
    with pytest.raises(ModelError, match=rf"quantized as .*{described} .*this family's experts"):
        _parse("granite_moe", section | {"ignored_layers": [], "ignore": [], "llm_int8_skip_modules": []})


@pytest.mark.parametrize(
    ("section", "sizes", "tp_size", "message"),
    [
        (
            NF4,
            {"hidden_size": 64, "moe_intermediate_size": 192},
            2,
            r"down_proj: 2 ranks have 96 inputs .*nf4 .* of 64",
        ),
        (NVFP4, {"moe_intermediate_size": 48}, 2, r"down_proj: 2 ranks have 24 inputs each, but nvfp4 .* of 16"),
        (NF4, {"moe_intermediate_size": 96}, 1, r"down_proj: 96 inputs are no multiple of 64, .* nf4"),
        (NVFP4, {"hidden_size": 72}, 1, r"experts\.0\.gate_proj: 72 inputs are no multiple of 16, .* nvfp4"),
    ],
)
def test_blocks_that_experts_or_their_shares_would_cut_are_refused(section, sizes, tp_size, message):
    config = _parse("qwen3_moe", section, **{"hidden_size": 64} | sizes)
    with pytest.raises(ModelError, match=message):
        config.check_tensor_parallel(tp_size)
    if tp_size > 1:  # whole experts are not cut
        config.check_tensor_parallel(tp_size, is_expert_parallel=True)
    else:
        with pytest.raises(ModelError, match=message):
            config.check_tensor_parallel(2, is_expert_parallel=True)


@pytest.mark.parametrize("section", [FP8_ROWS, NVFP4, NF4])
def test_random_experts_are_one_model_however_it_is_split(section):
    config = _parse("qwen3_moe", section, hidden_size=64, moe_intermediate_size=128)
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    ranks = [TensorParallel(), *(TensorParallel(r, 2, distributed.GroupMember.NON_GROUP_MEMBER) for r in range(2))]
    whole, *parts = (build(config, w, tp).layers[1].mlp.weights for tp in ranks)
    downs = [dense_matrix(each.down, 5, torch.float32) for each in (whole, *parts)]
    assert torch.equal(torch.cat(downs[1:], dim=1), downs[0])
    gates, ups = zip(*(dense_matrix(part.gate_up, 5, torch.float32).chunk(2) for part in parts), strict=True)
    assert torch.equal(torch.cat(gates + ups), dense_matrix(whole.gate_up, 5, torch.float32))
    assert 0.01 < downs[0].std() < 0.04


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_random_weights_have_the_table_of_their_kind(kind):
    section = NF4 | {"bnb_4bit_quant_type": kind, "llm_int8_skip_modules": ["lm_head", "mlp.gate"]}
    config = _parse("qwen3_moe", section, hidden_size=64, moe_intermediate_size=128, head_dim=32)
    layer = build(config, Weights.dummy(device=CPU, dtype=torch.float32), TensorParallel()).layers[1]
    assert layer.mlp.weights.down.kind == kind
    values = torch.stack([dense_matrix(layer.mlp.weights.down, expert, torch.float32) for expert in range(4)])
    assert values.mean().abs() < 0.03 * values.std()  # or tokens would grow alike, and choose the same experts
    (linear,) = [module for name, module in layer.named_modules() if name.endswith("o_proj")]
    assert torch.equal(linear.params.params[0].table, torch.tensor(TABLES[kind]))


def test_published_sizes():
    plain = ModelConfig.from_folder(SHAPES / "qwen3-30b-a3b")
    gib = {name: plain.quantized(name).weight_bytes(torch.bfloat16) / 2**30 for name in ("fp8", "bitsandbytes-nf4")}
    assert 28 < gib["fp8"] < 30
    assert 15.5 < gib["bitsandbytes-nf4"] < 17
    nvfp4 = ModelConfig.from_folder(SHAPES / "qwen3-30b-a3b-nvfp4")
    assert 16 < nvfp4.weight_bytes(torch.bfloat16) / 2**30 < 18


def test_all_layers_of_a_published_shape_are_nvfp4_but_head_and_routers():
    raw = json.loads((SHAPES / "qwen3-30b-a3b-nvfp4" / "config.json").read_text())
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 97}
    config = ModelConfig.from_json(raw | sizes | {"moe_intermediate_size": 64, "head_dim": 32})
    model = build(config, Weights.dummy(device=CPU, dtype=torch.float32), TensorParallel())
    runner = PagedRunner(model, config)
    assert torch.isfinite(runner.step([(runner.add_row(), PROMPT)])[0]).all()
    experts = list(quantized_experts(config))
    assert [count for *_, count in experts] == [4, 4, 4]
    assert {matrix.name.rpartition(".")[2] for matrix, _ in quantized_matrices(config)} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
