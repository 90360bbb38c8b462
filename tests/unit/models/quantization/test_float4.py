"""Linear layers of 4-bit floats: every form of checkpoint gives what its weights mean, whole and split."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, Qwen3Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks import quantized_weights
from benchmarks.quantized_weights import requantize
from kernels.e2m1 import E2M1_TABLE
from kernels.linear.float4 import dequantize_float4
from kernels.linear.onednn import Int8Matrix
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.quantization.float4 import Float4
from models.quantization.linear_method import LinearPart
from models.weights.weights import Weights
from tests.support.models_harness import CPU, PagedRunner
from tests.support.quantized_checkpoints import PROMPT, edit, load_model, logits_of, relative_error
from tests.support.rank_group import run_ranks
from tests.support.reference import reference_logits, save_checkpoint
from tests.support.tensor_parallel_rank import PROMPT as RANKS_PROMPT
from tests.support.tensor_parallel_rank import run_rank

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LLAMA = LlamaConfig(**SHAPE)
QWEN3 = Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)
PHI3 = Phi3Config(**SHAPE, original_max_position_embeddings=64)
NUM_GREEDY = 8
SHAPES = Path(__file__).parents[4] / "benchmarks" / "shapes"


def compressed(format_, weights, activations=None):
    """A quantization_config as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
MXFP4 = compressed("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32})
NVFP4 = compressed("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16})
NVFP4_ACTIVATIONS = FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
W8A8 = compressed("int-quantized", INT8 | {"strategy": "channel"}, INT8 | {"strategy": "token", "dynamic": True})
W8A8_STATIC = compressed(
    "int-quantized", INT8 | {"strategy": "tensor"}, INT8 | {"strategy": "tensor", "dynamic": False}
)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*lm_head*"]}
QUANT_METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}


def mxfp4(_, weight):
    return quantized_weights.by_mxfp4(weight)


def nvfp4(_, weight):
    return quantized_weights.by_nvfp4(weight)


def nvfp4_with_activations(name, weight):
    return nvfp4(name, weight) | {"input_global_scale": torch.tensor([300.0])}


def modelopt(name, weight):
    tensors = nvfp4(name, weight)
    return {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"],
        "weight_scale_2": tensors["weight_global_scale"].reciprocal()[0],
        "input_scale": torch.tensor(0.01),
    }


def mxfp4_blocks(name, weight):
    tensors = mxfp4(name, weight)
    blocks = tensors["weight_packed"].unflatten(1, (-1, 16)).contiguous()
    return {"weight_blocks": blocks, "weight_scales": tensors["weight_scale"]}


KINDS = {
    "mxfp4": (mxfp4, MXFP4),
    "nvfp4": (nvfp4, NVFP4),
    "nvfp4_with_activations": (
        nvfp4_with_activations,
        compressed("nvfp4-pack-quantized", NVFP4["config_groups"]["group_0"]["weights"], NVFP4_ACTIVATIONS),
    ),
    "modelopt": (modelopt, MODELOPT),
    "quant_method_mxfp4": (mxfp4_blocks, QUANT_METHOD),
    "quant_method_mxfp4_packed": (mxfp4, QUANT_METHOD),
}


def meaning_of(tensors):
    """The dense matrix of a stored one, decoded by others' code, or value by value."""
    codes = next(tensors[name] for name in ("weight_packed", "weight_blocks", "weight") if name in tensors)
    codes = codes.flatten(1)
    if "weight_scale_2" not in tensors and "weight_global_scale" not in tensors:
        scales = tensors.get("weight_scale", tensors.get("weight_scales"))
        blocks = codes.unflatten(1, (-1, 16))
        # it returns inputs × outputs of each expert
        return convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T.contiguous()
    factor = (
        float(tensors["weight_scale_2"]) if "weight_scale_2" in tensors else 1 / float(tensors["weight_global_scale"])
    )
    scales, table = tensors["weight_scale"].float().numpy(), np.array(E2M1_TABLE)
    dense = np.zeros((codes.shape[0], 2 * codes.shape[1]), dtype=np.float32)
    for row, column in itertools.product(*map(range, dense.shape)):
        code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
        dense[row, column] = table[code] * scales[row, column // 16] * factor
    return torch.from_numpy(dense)


def dequantized(store):
    return lambda name, weight: {"weight": meaning_of(dict(store(name, weight)))}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_checkpoint(folder, LLAMA)
    return folder


def greedy(folder):
    runner, tokens = PagedRunner(load_model(folder), ModelConfig.from_folder(folder)), []
    row, ids = runner.add_row(), PROMPT
    for _ in range(NUM_GREEDY):
        ids = [int(runner.step([(row, ids)])[0][-1].argmax())]
        tokens += ids
    return tokens


def assert_exact(source, tmp_path, kind):
    """The logits and greedy tokens that transformers finds for the dequantised weights."""
    store, config = KINDS[kind]
    folder = requantize(source, tmp_path / "quantised", store, config)
    dense = requantize(source, tmp_path / "dense", dequantized(store), None)
    expected = reference_logits(dense, PROMPT)
    assert expected.std() > 0.5  # flat logits would hide errors
    assert relative_error(logits_of(source), expected) > 0.02  # rounding matters
    torch.testing.assert_close(logits_of(folder), expected, atol=2e-4, rtol=0)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    found = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None)
    assert greedy(folder) == found[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_the_logits_and_tokens_of_the_weights_it_means(kind, source, tmp_path):
    assert_exact(source, tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), [(QWEN3, "nvfp4"), (QWEN3, "mxfp4"), (PHI3, "nvfp4"), (PHI3, "mxfp4")])
def test_other_families_and_projections_that_the_checkpoint_has_merged(config, kind, tmp_path):
    save_checkpoint(tmp_path / "source", config)
    assert_exact(tmp_path / "source", tmp_path, kind)


def weights_of(folder, block="mlp"):
    return Weights.from_folder(folder, device=CPU, dtype=torch.float32) / "model.layers.0" / block


def whole_part(name, out_features, in_features=128):
    return LinearPart(name, out_features, in_features, dim=0, rank=0, size=1)


def test_merged_parts_keep_their_own_factors(source, tmp_path):
    def store(name, weight):
        return nvfp4(name, weight * 100 if name.endswith("k_proj") else weight)

    folder = requantize(source, tmp_path / "quantised", store, NVFP4)
    w, method = weights_of(folder, "self_attn"), Float4("nvfp4").make_method()
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    merged = method.load(w, [whole_part(*item) for item in sizes.items()])
    alone = [method.load(w, [whole_part(*item)]) for item in sizes.items()]
    assert len(merged.factors.unique()) == 3
    expected = torch.cat([dequantize_float4(each, torch.float32) for each in alone])
    assert torch.equal(dequantize_float4(merged, torch.float32), expected)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "quant_method_mxfp4"])
@pytest.mark.parametrize(("name", "shape", "dim"), [("gate_proj", (192, 128), 0), ("down_proj", (128, 192), 1)])
def test_ranks_take_shares_of_codes_and_scales(source, tmp_path, name, shape, dim, kind):
    w = weights_of(requantize(source, tmp_path / "quantised", *KINDS[kind]))
    method = Float4("nvfp4" if kind == "nvfp4" else "mxfp4").make_method()

    def dense(rank, size):
        return dequantize_float4(
            method.load(w, [LinearPart(name, *shape, dim=dim, rank=rank, size=size)]), torch.float32
        )

    assert torch.equal(torch.cat([dense(0, 2), dense(1, 2)], dim), dense(0, 1))


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("mxfp4", 4, r"down_proj: 4 ranks have 48 inputs each, but mxfp4 .* only at multiples of 32"),
        ("nvfp4", 8, r"down_proj: 8 ranks have 24 inputs each, but nvfp4 .* only at multiples of 16"),
    ],
)
def test_ranks_that_would_cut_a_block_are_refused(kind, size, message, source, tmp_path):
    raw = json.loads((source / "config.json").read_text()) | {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = ModelConfig.from_json(raw | {"quantization_config": KINDS[kind][1], "head_dim": 64})
    with pytest.raises(ModelError, match=message):
        config.check_tensor_parallel(size)


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(source, tmp_path):
    folders = [requantize(source, tmp_path / kind, *KINDS[kind]) for kind in ("mxfp4", "nvfp4")]
    run_ranks(run_rank, 2, tmp_path / "store", folders)
    for folder in folders:
        expected = logits_of(folder, prompt=RANKS_PROMPT)
        for rank in range(2):
            assert relative_error(torch.load(folder / f"logits-2-{rank}.pt"), expected) < 1e-4


LAYER = r"model\.layers\.0\.mlp\.down_proj"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mxfp4", {"weight_scale": None}, rf"{LAYER}\.weight_scale is missing .* is quantized"),
        ("mxfp4", {"weight_packed": None}, rf"{LAYER}\.weight_packed is missing .* is quantized"),
        ("nvfp4", {"weight_global_scale": None}, rf"{LAYER}\.weight_global_scale is missing .* is quantized"),
        (
            "mxfp4",
            {"weight_scale": torch.ones(128, 5, dtype=torch.uint8)},
            rf"{LAYER}\.weight_scale has shape \[128, 5\]",
        ),
        ("mxfp4", {"weight_scale": torch.ones(128, 6)}, rf"{LAYER}\.weight_scale is float32, but .* uint8"),
        ("nvfp4", {"weight_scale": torch.ones(128, 12)}, rf"{LAYER}\.weight_scale is float32, but .* float8_e4m3fn"),
        (
            "mxfp4",
            {"weight_scale": torch.full((128, 6), 255, dtype=torch.uint8)},
            rf"{LAYER}\.weight_scale has scales that are not a number",
        ),
        (
            "nvfp4",
            {"weight_scale": torch.full((128, 12), -1.0).to(torch.float8_e4m3fn)},
            rf"{LAYER}\.weight_scale has scales that are negative or not a number",
        ),
        (
            "nvfp4",
            {"weight_global_scale": torch.zeros(1)},
            rf"{LAYER}\.weight_global_scale is 0\.0, and a scale must be",
        ),
        (
            "nvfp4_with_activations",
            {"input_global_scale": torch.full((1,), float("inf"))},
            rf"{LAYER}\.input_global_scale is inf, and a scale must be",
        ),
        ("nvfp4", {"weight_packed": torch.zeros(128, 96)}, rf"{LAYER}\.weight_packed is float32, but .* uint8"),
        ("modelopt", {"weight_scale_2": None}, rf"{LAYER}\.weight_global_scale is missing"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(source, tmp_path, kind, change, message):
    folder = requantize(source, tmp_path / "quantised", *KINDS[kind])
    change_layer(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def change_layer(folder, change):
    def apply(tensors):
        for key, tensor in change.items():
            tensors.pop(f"model.layers.0.mlp.down_proj.{key}")
            if tensor is not None:
                tensors[f"model.layers.0.mlp.down_proj.{key}"] = tensor

    edit(folder, apply)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_inputs_that_are_no_whole_blocks_are_refused(kind):
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    with pytest.raises(ModelError, match=rf"o_proj: its 72 inputs are not a multiple of the blocks of \d+ of {kind}"):
        Float4(kind).make_method().load(w, [LinearPart("o_proj", 8, 72, dim=0, rank=0, size=1)])


def read(section):
    raw = LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": section}
    return ModelConfig.from_json(raw)


def with_weights(section, **fields):
    section = json.loads(json.dumps(section))
    section["config_groups"]["group_0"]["weights"] |= fields
    return section


def with_activations(section, activations):
    section = json.loads(json.dumps(section))
    section["config_groups"]["group_0"]["input_activations"] = activations
    return section


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (with_weights(MXFP4, group_size=16), r"weights in format mxfp4 \(4-bit float, by group"),
        (with_weights(NVFP4, group_size=32), r"weights in format nvfp4 \(4-bit float, by tensor_group"),
        (with_weights(NVFP4, type="int"), r"weights in format nvfp4 \(4-bit int"),
        (with_weights(NVFP4, num_bits=8), r"weights in format nvfp4 \(8-bit float"),
        (with_activations(NVFP4, INT8), r"activations with nvfp4 weights \(8-bit int"),
        ({"quant_method": "modelopt"}, "quant_algo None is not supported: supported are NVFP4, FP8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        (MODELOPT | {"ignore": "lm_head"}, "ignore must be a list of layer names"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(section, message):
    with pytest.raises(ModelError, match=message):
        read(section)


def test_layers_are_chosen_by_name():
    up = "model.layers.0.mlp.up_proj"
    assert read(QUANT_METHOD).quantization.scheme_of(up) == Float4("mxfp4")
    assert read({"quant_method": "mxfp4"}).quantization.scheme_of(up) is None
    some = read(MODELOPT | {"ignore": ["model.layers.0*", "lm_head"]}).quantization
    assert some.scheme_of(up) is None
    assert some.scheme_of("lm_head") is None
    assert some.scheme_of("model.layers.1.mlp.up_proj") == Float4("nvfp4")


@pytest.mark.parametrize(("section", "bits"), [(MXFP4, 4.25), (NVFP4, 4.5), (W8A8, 8)])
def test_config_and_loaded_model_agree_on_bytes(section, bits):
    scheme = read(section).quantization.scheme_of("model.layers.0.mlp.up_proj")
    size = 4096 * 4096
    assert scheme.matrix_bytes(4096, 4096, itemsize=2) == size * bits / 8 + 4 * 4096
    params = scheme.make_method().load(
        Weights.dummy(device=CPU, dtype=torch.bfloat16), [LinearPart("up_proj", 24, 128, dim=0, rank=0, size=1)]
    )
    kept = [each for each in vars(params).values() if isinstance(each, torch.Tensor | Int8Matrix)]
    found = sum(each.nbytes for each in kept if each.shape[:1] != (256,))
    assert found == scheme.matrix_bytes(24, 128, itemsize=2)


@pytest.mark.parametrize(("name", "gib"), [("mxfp4", 5.4), ("nvfp4", 5.6), ("w8a8", 8.5), ("fp8-blocks", 8.5)])
def test_published_sizes(name, gib):
    config = ModelConfig.from_folder(SHAPES / f"llama-3.1-8b-{name}")
    assert config.weight_bytes(torch.bfloat16) / 2**30 == pytest.approx(gib, abs=0.1)
    config.check_tensor_parallel(2)
