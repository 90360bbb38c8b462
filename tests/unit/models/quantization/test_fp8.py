"""FP8 checkpoints of every kind are read as they were written, and give what their weights would give unquantised."""

import itertools

import pytest
import torch
from torch import distributed
from transformers import LlamaConfig, OlmoHybridConfig, Phi3Config, Qwen3_5TextConfig, Qwen3NextConfig

from benchmarks import quantized_weights
from benchmarks.quantized_weights import requantize
from kernels.linear import eight_bits, rounding
from kernels.linear import reference as quant_fp8
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.layers.linear import ColumnLinear, RowLinear
from models.parallel import TensorParallel
from models.quantization.fp8 import Fp8, Fp8Block
from models.quantization.linear_method import LinearPart
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU
from tests.support.quantized_checkpoints import edit, load_model, logits_of, relative_error
from tests.support.rank_group import run_ranks
from tests.support.reference import save_checkpoint
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
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": None}
STATIC = FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(weights="channel", activations="token", *, dynamic=True, **fields):
    """A quantization_config as llm-compressor writes it."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": weights, "symmetric": True, "dynamic": False} | fields,
        "input_activations": {"num_bits": 8, "type": "float", "strategy": activations, "dynamic": dynamic},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def by_row(_, weight):
    values, scales = quant_fp8.quantize_rows(weight)
    return {"weight": values, "weight_scale": scales[:, None].bfloat16()}


def by_tensor(_, weight):
    return quantized_weights.by_tensor(weight)


def by_tensor_static(name, weight):
    input_scale = torch.tensor(0.02 if name.endswith(("o_proj", "down_proj")) else 0.01)
    return by_tensor(name, weight) | {"input_scale": input_scale}


def by_tensor_as_transformers(name, weight):
    tensors = by_tensor_static(name, weight)
    return {
        "weight": tensors["weight"],
        "weight_scale_inv": tensors["weight_scale"].squeeze(),
        "activation_scale": tensors["input_scale"],
    }


def by_block(_, weight):
    return quantized_weights.by_block(weight)


KINDS = {
    "fp8_tensor": (by_tensor, FP8),
    "fp8_static": (by_tensor_static, STATIC),
    "fp8_static_as_transformers": (by_tensor_as_transformers, STATIC),
    "fp8_blocks": (by_block, BLOCKS),
    "compressed_channel": (by_row, compressed()),
    "compressed_tensor": (by_tensor, compressed("tensor", "tensor")),
    "compressed_static": (by_tensor_static, compressed("tensor", "tensor", dynamic=False)),
    "compressed_blocks": (by_block, compressed("block", "group", block_structure=[128, 128])),
}
KINDS["compressed_blocks"][1]["config_groups"]["group_0"]["input_activations"]["group_size"] = 128


def dequantized(store):
    """The same values as dense matrices."""

    def stored(name, weight):
        tensors = dict(store(name, weight))
        scale = tensors.get("weight_scale", tensors.get("weight_scale_inv")).float()
        if store is by_block:
            return {"weight": quant_fp8.dequantize_blocks(tensors["weight"], scale, 128, 128)}
        return {"weight": tensors["weight"].float() * scale}

    return stored


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_checkpoint(folder, LlamaConfig(**SHAPE))
    return folder


def linears_of(folder):
    """Name and function of each linear layer, and its inputs."""
    model = load_model(folder)
    for name, module in model.named_modules():
        if isinstance(module, ColumnLinear | RowLinear):
            yield name, module, 192 if name.endswith("down_proj") else 128


@pytest.mark.parametrize("kind", [*KINDS, "on load"])
def test_inputs_that_the_op_before_rounds_give_the_same_logits(source, tmp_path, kind, monkeypatch):
    folder, quantization = source, "fp8"
    if kind != "on load":
        store, config = KINDS[kind]
        folder, quantization = requantize(source, tmp_path / "fp8", store, config), "auto"
    num_rounded = []
    round_before = rounding.round_rows
    monkeypatch.setattr(rounding, "round_rows", lambda *args: num_rounded.append(1) or round_before(*args))
    logits = logits_of(folder, quantization)
    assert not num_rounded  # the CPU's product rounds
    monkeypatch.setattr(eight_bits, "rounds_before", lambda _: True)
    assert torch.equal(logits_of(folder, quantization), logits)
    assert len(num_rounded) == 5  # norms, less the first layer's before attention, and activations


# Norms behind the first layer's, and activations, of one step
NUM_ROUNDED = {"qwen3_5": 11, "kimi_linear": 6, "lfm2": 11, "granite_hybrid": 7, "nemotron_h": 4, "deepseek_v3": 6}


@pytest.mark.parametrize("kind", NUM_ROUNDED)
def test_norms_before_recurrences_and_latents_round(kind, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, make_config(kind))
    logits = logits_of(tmp_path, "fp8")
    num_rounded = []
    round_before = rounding.round_rows
    monkeypatch.setattr(rounding, "round_rows", lambda *args: num_rounded.append(1) or round_before(*args))
    monkeypatch.setattr(eight_bits, "rounds_before", lambda _: True)
    assert torch.equal(logits_of(tmp_path, "fp8"), logits)
    assert len(num_rounded) == NUM_ROUNDED[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_checkpoint_give_what_their_weights_give_but_for_the_rounding_of_activations(
    source, tmp_path, kind
):
    store, config = KINDS[kind]
    folder = requantize(source, tmp_path / "fp8", store, config)
    dense = requantize(source, tmp_path / "dense", dequantized(store), None)
    for (name, linear, size), (_, expected, _) in zip(linears_of(folder), linears_of(dense), strict=True):
        x = torch.randn(16, size)
        assert 0.0 < relative_error(linear(x), expected(x)) < 0.035, name


# Heads of 96 and 48 end within blocks of 128 rows
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 48,
    "num_hidden_layers": 4,
}
DELTA_NETS = {
    "grouped": Qwen3NextConfig(
        **SHAPE | DELTA_NET, head_dim=64, mlp_only_layers=[0, 1, 2, 3], num_experts=2, num_experts_per_tok=1
    ),
    "flat": Qwen3_5TextConfig(**SHAPE | DELTA_NET, head_dim=64),
    "separate": OlmoHybridConfig(**SHAPE | DELTA_NET, eos_token_id=None),
}


@pytest.mark.parametrize("kind", ["fp8_blocks", "fp8_tensor", "compressed_channel"])
@pytest.mark.parametrize("layout", DELTA_NETS)
def test_layers_of_the_delta_rule_take_their_bands_of_a_checkpoint(layout, kind, tmp_path):
    save_checkpoint(tmp_path / "source", DELTA_NETS[layout])
    store, config = KINDS[kind]
    folder = requantize(tmp_path / "source", tmp_path / "fp8", store, config)
    dense = requantize(tmp_path / "source", tmp_path / "dense", dequantized(store), None)
    mixers = (
        [getattr(layer.self_attn, "branch", layer.self_attn) for layer in load_model(each).layers]
        for each in (folder, dense)
    )
    names = ("in_proj", "out_proj", "qkv_proj", "o_proj")
    seen = set()
    for (mixer, expected), name in itertools.product(zip(*mixers, strict=True), names):
        if hasattr(mixer, name):
            x = torch.randn(16, {"out_proj": 192, "o_proj": 128 if layout == "separate" else 256}.get(name, 128))
            assert 0.0 < relative_error(getattr(mixer, name)(x), getattr(expected, name)(x)) < 0.035, name
            seen.add(name)
    assert seen == set(names)


def test_a_checkpoint_with_a_scale_per_row_is_what_quantising_on_load_makes(source, tmp_path):
    def by_row_fp32(_, weight):
        values, scales = quant_fp8.quantize_rows(weight)
        return {"weight": values, "weight_scale": scales[:, None]}

    folder = requantize(source, tmp_path / "fp8", by_row_fp32, compressed())
    assert torch.equal(logits_of(folder), logits_of(source, "fp8"))


def test_merged_projections_of_a_checkpoint_are_read_as_bands(tmp_path):
    config = Phi3Config(**SHAPE, original_max_position_embeddings=64)
    save_checkpoint(tmp_path / "phi3", config)
    for name, store, settings in (("row", by_row, compressed()), ("tensor", by_tensor, FP8)):
        folder = requantize(tmp_path / "phi3", tmp_path / name, store, settings)
        assert relative_error(logits_of(folder), logits_of(tmp_path / "phi3")) < 0.2
    # q, k, v begin at rows 0, 128, 192 of one matrix, gate and up at 0 and 192: within blocks
    folder = requantize(tmp_path / "phi3", tmp_path / "blocks", by_block, BLOCKS)
    assert relative_error(logits_of(folder), logits_of(tmp_path / "phi3")) < 0.2


def weights_of(folder):
    return Weights.from_folder(folder, device=CPU, dtype=torch.float32) / "model.layers.0.mlp"


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_take_shares_of_matrix_and_scales(source, tmp_path, dim):
    w = weights_of(requantize(source, tmp_path / "fp8", by_row, compressed()))
    name, shape = ("gate_proj", (192, 128)) if dim == 0 else ("down_proj", (128, 192))
    method = Fp8("row", "token", is_stored=True)
    whole = method.load(w, [LinearPart(name, *shape, dim=dim, rank=0, size=1)])
    shares = [method.load(w, [LinearPart(name, *shape, dim=dim, rank=rank, size=2)]) for rank in range(2)]
    assert torch.equal(torch.cat([share.weight.float() for share in shares], dim), whole.weight.float())
    for rank, share in enumerate(shares):
        assert torch.equal(share.scales, whole.scales.chunk(2)[rank] if dim == 0 else whole.scales)


@pytest.mark.parametrize(("name", "shape", "dim"), [("gate_proj", (192, 128), 0), ("down_proj", (128, 256), 1)])
def test_ranks_take_shares_of_blocks(tmp_path, name, shape, dim):
    save_checkpoint(tmp_path / "source", LlamaConfig(**SHAPE | {"intermediate_size": 192 if dim == 0 else 256}))
    w = weights_of(requantize(tmp_path / "source", tmp_path / "fp8", by_block, BLOCKS))
    method = Fp8Block(128, 128)

    def dense(rank, size):
        share = method.load(w, [LinearPart(name, *shape, dim=dim, rank=rank, size=size)])
        return quant_fp8.dequantize_blocks(share.weight, share.scales, share.rows, 128)

    assert torch.equal(torch.cat([dense(0, 2), dense(1, 2)], dim), dense(0, 1))


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(source, tmp_path):
    """Static scales are the same on every rank, so that nothing but the order of sums differs."""
    folder = requantize(source, tmp_path / "fp8", *KINDS["fp8_static"])
    dynamic = requantize(source, tmp_path / "dynamic", *KINDS["compressed_channel"])
    run_ranks(run_rank, 2, tmp_path / "store", [folder, dynamic])
    for checkpoint, tolerance in ((folder, 2e-3), (dynamic, 0.1)):
        expected = logits_of(checkpoint, prompt=RANKS_PROMPT)
        for rank in range(2):
            assert relative_error(torch.load(checkpoint / f"logits-2-{rank}.pt"), expected) < tolerance


def test_ranks_that_would_cut_groups_of_columns_are_refused(source, tmp_path):
    folder = requantize(source, tmp_path / "fp8", by_block, BLOCKS)
    with pytest.raises(ModelError, match=r"self_attn\.o_proj: 2 ranks have 64 inputs each, .*only at multiples of 128"):
        load_model(folder, tp=TensorParallel(0, 2, distributed.GroupMember.NON_GROUP_MEMBER))


def test_one_scale_of_activations_for_merged_parts_is_their_largest(source, tmp_path):
    def store(name, weight):
        return by_tensor(name, weight) | {"input_scale": torch.tensor(0.5 if name.endswith("up_proj") else 0.25)}

    w = weights_of(requantize(source, tmp_path / "fp8", store, STATIC))
    parts = [LinearPart(name, 192, 128, dim=0, rank=0, size=1) for name in ("gate_proj", "up_proj")]
    assert Fp8("tensor", "static", is_stored=True).load(w, parts).input_scale == 0.5


LAYER = r"model\.layers\.0\.mlp\.down_proj"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("compressed_channel", {"weight_scale": None}, rf"{LAYER}\.weight_scale is missing .* is quantized"),
        ("fp8_blocks", {"weight_scale_inv": None}, rf"{LAYER}\.weight_scale_inv is missing"),
        ("fp8_static", {"input_scale": None}, rf"{LAYER}\.input_scale is missing"),
        (
            "compressed_channel",
            {"weight": torch.zeros(128, 192)},
            rf"{LAYER}\.weight is float32, but .* float8_e4m3fn",
        ),
        (
            "compressed_channel",
            {"weight": torch.zeros(128, 96).to(torch.float8_e4m3fn)},
            rf"{LAYER}\.weight has shape \[128, 96\], but config\.json requires \[128, 192\]",
        ),
        (
            "compressed_channel",
            {"weight_scale": torch.ones(127)},
            rf"{LAYER}\.weight_scale has shape \[127\], but config\.json requires \[128\]",
        ),
        ("fp8_tensor", {"weight_scale": torch.ones(2)}, rf"{LAYER}\.weight_scale has shape \[2\]"),
        ("fp8_blocks", {"weight_scale_inv": torch.ones(1, 1)}, rf"{LAYER}\.weight_scale_inv has shape \[1, 1\]"),
        (
            "fp8_static",
            {"input_scale": torch.zeros(1)},
            rf"{LAYER}\.input_scale is 0\.0, and a scale must be a positive",
        ),
        (
            "fp8_tensor",
            {"weight_scale": torch.tensor(float("nan"))},
            rf"{LAYER}\.weight_scale is nan, and a scale must",
        ),
        ("fp8_tensor", {"weight_scale": torch.ones((), dtype=torch.int32)}, rf"{LAYER}\.weight_scale is int32"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(source, tmp_path, kind, change, message):
    folder = requantize(source, tmp_path / "fp8", *KINDS[kind])

    def apply(tensors):
        for key, tensor in change.items():
            tensors.pop(f"model.layers.0.mlp.down_proj.{key}")
            if tensor is not None:
                tensors[f"model.layers.0.mlp.down_proj.{key}"] = tensor

    edit(folder, apply)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_an_unquantised_matrix_is_not_read_from_8_bit_floats(source, tmp_path):
    folder = requantize(source, tmp_path / "fp8", by_tensor, FP8)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(
        ModelError, match=r"lm_head\.weight is float8_e4m3fn, but config\.json requires a float of 16 bits"
    ):
        load_model(folder)


def test_bytes_of_weights_are_counted_as_stored(source, tmp_path):
    linear = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 192 * 128)
    dense = ModelConfig.from_folder(source).weight_bytes(torch.bfloat16)
    rows = 2 * (128 + 2 * 64 + 128 + 2 * 192 + 128)
    assert ModelConfig.from_folder(source).quantized("fp8").weight_bytes(torch.bfloat16) == dense - linear + 4 * rows
