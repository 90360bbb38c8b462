"""Packed experts: published MXFP4 and FP8 blocks give what their dequantised weights give, whole and split."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.moe.planes import to_planes
from kernels.moe.storage import Fp8Matrix, Mxfp4Matrix, dense_matrix
from models.build import build
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.parallel import TensorParallel
from models.quantization import experts_scheme
from models.quantization.mxfp4 import Mxfp4
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.packed_experts import FP8_CONFIG, MXFP4_CONFIG, num_bytes, save_fp8_blocks, save_mxfp4
from tests.support.rank_group import run_ranks
from tests.support.reference import reference_logits
from tests.support.tensor_parallel_rank import PROMPT, run_rank

pytestmark = pytest.mark.slow

SAVES = {
    "mxfp4": save_mxfp4,
    "fp8": save_fp8_blocks,
    "fp8_glm": lambda dense, packed: save_fp8_blocks(dense, packed, kind="glm4_moe"),
    "fp8_minimax": lambda dense, packed: save_fp8_blocks(dense, packed, kind="minimax_m2"),
    "fp8_deepseek": lambda dense, packed: save_fp8_blocks(dense, packed, kind="deepseek_v3"),
    "fp8_kimi": lambda dense, packed: save_fp8_blocks(dense, packed, kind="kimi_linear"),
}
EXPERTS = "model.layers.1.mlp.experts"
PUBLISHED = Path(__file__).parents[4] / "benchmarks" / "shapes"


def run(folder, num_more=0):
    """The logits of PROMPT and of so many greedy tokens after it."""
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
    row = runner.add_row()
    logits = runner.step([(row, PROMPT)])
    for _ in range(num_more):
        logits += runner.step([(row, [int(logits[-1][-1].argmax())])])
    return torch.cat(logits)


@pytest.mark.parametrize("kind", SAVES)
def test_packed_experts_give_the_logits_of_what_they_mean(kind, tmp_path):
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    SAVES[kind](dense, packed)
    logits = run(packed, 6)
    torch.testing.assert_close(logits[: len(PROMPT)], reference_logits(dense, PROMPT), atol=1e-4, rtol=0)
    unpacked = run(dense, 6)
    torch.testing.assert_close(logits, unpacked, atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), unpacked.argmax(-1))
    assert len(set(logits.argmax(-1).tolist())) > 3


def test_mxfp4_weights_are_those_of_transformers_for_every_code_and_scale():
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255, 1).view(1, 255 * 16, 1, 16)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(16).view(1, -1, 1)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    for dtype in (torch.float32, torch.bfloat16):
        found = dense_matrix(Mxfp4Matrix(blocks.flatten(2), scales), 0, dtype)
        assert torch.equal(found.float(), expected.to(dtype).float())


def test_weights_stay_packed(tmp_path, monkeypatch):
    save_mxfp4(tmp_path / "dense", tmp_path / "packed")
    config = ModelConfig.from_folder(tmp_path / "packed")
    weights = load(tmp_path / "packed").layers[1].mlp.weights
    matrices = [weights.gate_up, weights.down]
    assert num_bytes(matrices) == 8 * 3 * 96 * 64 * 17 // 32
    saved = ModelConfig.from_folder(tmp_path / "dense").weight_bytes(torch.bfloat16) - config.weight_bytes(
        torch.bfloat16
    )
    assert saved == config.num_layers * (8 * 3 * 96 * 64 * 2 - num_bytes(matrices))
    monkeypatch.setattr(experts_scheme, "takes_planes", lambda dtype, device, is_integer: device.type == "cuda")
    more = config.weight_bytes(torch.bfloat16, torch.device("cuda")) - config.weight_bytes(torch.bfloat16, CPU)
    arranged = [to_planes(matrix) for matrix in matrices]
    assert more == config.num_layers * (num_bytes(arranged) - num_bytes(matrices)) > 0


@pytest.mark.slow
def test_split_packed_experts_give_the_logits_of_the_whole(tmp_path):
    folders = [tmp_path / "mxfp4", tmp_path / "fp8"]
    save_mxfp4(tmp_path / "dense4", folders[0])
    save_fp8_blocks(tmp_path / "dense8", folders[1], width=256)
    run_ranks(run_rank, 2, tmp_path / "store", folders)
    for folder in folders:
        expected = run(folder)
        for rank in range(2):
            torch.testing.assert_close(torch.load(folder / f"logits-2-{rank}.pt"), expected, atol=1e-4, rtol=0)


def test_a_layer_that_is_not_converted_has_16_bits(tmp_path):
    save_mxfp4(tmp_path / "dense", tmp_path / "packed")
    path = tmp_path / "packed" / "model.safetensors"
    tensors, dense = load_file(path), load_file(tmp_path / "dense" / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if not re.match(rf"{EXPERTS}\..*(blocks|scales)$", name)}
    tensors |= {name: each for name, each in dense.items() if name.startswith(EXPERTS)}
    save_file(tensors, path)
    names = [*MXFP4_CONFIG["modules_to_not_convert"], EXPERTS]
    _edit_config(tmp_path / "packed", quantization_config=MXFP4_CONFIG | {"modules_to_not_convert": names})
    assert isinstance(load(tmp_path / "packed").layers[1].mlp.weights.gate_up, torch.Tensor)
    torch.testing.assert_close(run(tmp_path / "packed"), run(tmp_path / "dense"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("mxfp4", f"{EXPERTS}.gate_up_proj_scales", None, r"gate_up_proj_scales with shape \[8, 128, 3\] is missing"),
        (
            "mxfp4",
            f"{EXPERTS}.down_proj_scales",
            torch.zeros(8, 96, 3, dtype=torch.uint8),
            r"down_proj_scales has shape \[8, 96, 3\], but config.json requires \[8, 96, 2\]",
        ),
        (
            "mxfp4",
            f"{EXPERTS}.down_proj_scales",
            torch.full((8, 96, 2), 255, dtype=torch.uint8),
            r"down_proj_scales has scales that are not a number",
        ),
        ("mxfp4", f"{EXPERTS}.down_proj_blocks", torch.zeros(8, 96, 2, 16), r"down_proj_blocks is float32"),
        ("fp8", f"{EXPERTS}.3.up_proj.weight_scale_inv", None, r"experts\.3\.up_proj\.weight_scale_inv is missing"),
        (
            "fp8",
            f"{EXPERTS}.3.up_proj.weight_scale_inv",
            torch.ones(1, 2),
            r"weight_scale_inv has shape \[1, 2\], but config.json requires \[2, 2\]",
        ),
        ("fp8", f"{EXPERTS}.0.up_proj.weight", torch.zeros(144, 160), r"up_proj\.weight is float32"),
    ],
)
def test_a_missing_or_odd_tensor_is_named(kind, name, value, message, tmp_path):
    SAVES[kind](tmp_path / "dense", tmp_path / "packed")
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors if value is None else tensors | {name: value}, path)
    with pytest.raises(ModelError, match=message + rf".*; the layer is quantized as {kind} \("):
        load(tmp_path / "packed")


def test_a_scheme_that_experts_do_not_take_is_refused_by_layer_and_scheme():
    def parse(kind, architecture, quantization):
        raw = make_config(kind).to_dict() | {"architectures": [architecture], "quantization_config": quantization}
        return ModelConfig.from_json(raw)

    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.0\.gate_proj is quantized as mxfp4 .*separate"):
        parse("qwen3_moe", "Qwen3MoeForCausalLM", MXFP4_CONFIG)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj is quantized as fp8 .*all experts in one tensor"):
        parse("gpt_oss", "GptOssForCausalLM", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ModelError, match=r"of experts is not supported for linear layers"):
        Mxfp4().make_method()
    with pytest.raises(ModelError, match=r"quantized as fp8 .*this family's experts"):
        parse("granite_moe", "GraniteMoeForCausalLM", {"quant_method": "fp8", "weight_block_size": [128, 128]})


def test_experts_of_one_layer_with_two_schemes_are_refused(tmp_path):
    save_fp8_blocks(tmp_path / "dense", tmp_path / "packed")
    names = [*FP8_CONFIG["modules_to_not_convert"], f"{EXPERTS}.7.down_proj"]
    _edit_config(tmp_path / "packed", quantization_config=FP8_CONFIG | {"modules_to_not_convert": names})
    words = r"experts\.0\.gate_proj is fp8 .* and .*experts\.7\.down_proj is not quantized, .*: all experts of a layer"
    with pytest.raises(ModelError, match=words):
        load(tmp_path / "packed")


@pytest.mark.parametrize(
    ("kind", "architecture", "sizes", "quantization", "message"),
    [
        (
            "gpt_oss", "GptOssForCausalLM", {"hidden_size": 64, "intermediate_size": 96}, MXFP4_CONFIG,
            r"experts\.down_proj: 2 ranks have 48 inputs each, but mxfp4 .* split only at multiples of 32",
        ),
        (
            "qwen3_moe", "Qwen3MoeForCausalLM", {"moe_intermediate_size": 384}, FP8_CONFIG,
            r"down_proj: 2 ranks have 192 inputs each, but fp8 .* split only at multiples of 128",
        ),
    ],
)  # fmt: skip
def test_ranks_that_would_cut_a_block_of_experts_are_refused(kind, architecture, sizes, quantization, message):
    raw = make_config(kind).to_dict() | sizes
    config = ModelConfig.from_json(raw | {"architectures": [architecture], "quantization_config": quantization})
    with pytest.raises(ModelError, match=message):
        config.check_tensor_parallel(2)


def test_random_packed_experts_are_one_model_however_it_is_split():
    raw = make_config("gpt_oss").to_dict() | {"architectures": ["GptOssForCausalLM"], "intermediate_size": 64}
    config = ModelConfig.from_json(raw | {"quantization_config": MXFP4_CONFIG})
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    ranks = [TensorParallel(), *(TensorParallel(r, 2, distributed.GroupMember.NON_GROUP_MEMBER) for r in range(2))]
    whole, *parts = (build(config, w, tp).layers[0].mlp.weights for tp in ranks)
    assert torch.equal(torch.cat([part.down.blocks for part in parts], dim=2), whole.down.blocks)
    gates, ups = zip(*(part.gate_up.blocks.chunk(2, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat(gates + ups, dim=1), whole.gate_up.blocks)
    assert 0.01 < dense_matrix(whole.down, 0, torch.float32).std() < 0.04


def test_random_fp8_experts_have_the_width_of_others():
    raw = make_config("qwen3_moe").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    config = ModelConfig.from_json(raw | {"quantization_config": FP8_CONFIG})
    layers = build(config, Weights.dummy(device=CPU, dtype=torch.float32), TensorParallel()).layers
    assert isinstance(layers[1].mlp.weights.down, Fp8Matrix)
    assert 0.01 < dense_matrix(layers[1].mlp.weights.down, 0, torch.float32).std() < 0.04


def test_published_sizes():
    small = json.loads((PUBLISHED / "gpt-oss-20b-mxfp4" / "config.json").read_text())
    large = ModelConfig.from_json(small | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None})
    assert 60 < large.weight_bytes(torch.bfloat16) / 2**30 < 62
    assert 12 < ModelConfig.from_json(small).weight_bytes(torch.bfloat16) / 2**30 < 13.5
    qwen = json.loads((PUBLISHED / "qwen3-30b-a3b-fp8" / "config.json").read_text())
    assert 28 < ModelConfig.from_json(qwen).weight_bytes(torch.bfloat16) / 2**30 < 30


def _edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
