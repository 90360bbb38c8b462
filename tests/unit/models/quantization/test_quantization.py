"""Which layers are quantised how is read off config.json and the flag, and each layer gets what is its own."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quantization_schemes import SCHEMES
from models.build import build
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.quantization.bitsandbytes import NF4_ON_LOAD, Bnb4Bit, BnbInt8
from models.quantization.config import LayerNames, QuantizationConfig
from models.quantization.fp8 import ON_LOAD as FP8_ON_LOAD
from models.quantization.fp8 import Fp8, Fp8Block
from models.quantization.schemes import FORMATS, ON_LOAD
from models.weights.weights import Weights
from server.config.model_source import DEMO_FOLDER
from server.config.value_types import QUANTIZATION_NAMES
from server.text.tokenizer import load_tokenizer
from tests.support.models_harness import CPU, SINGLE, PagedRunner
from tests.support.quantized_checkpoints import load_model, logits_of
from tests.unit.models.quantization.test_fp8 import compressed

PLAIN = Path(__file__).parents[1] / "bitsandbytes_checkpoints" / "unquantized"
RAW = json.loads((PLAIN / "config.json").read_text())
FP8 = {"quant_method": "fp8"}
BNB = {"quant_method": "bitsandbytes"}


def read(section):
    return ModelConfig.from_json(RAW | {"quantization_config": section})


def changed(section, **fields):
    """With fields of its only group replaced."""
    group = section["config_groups"]["group_0"]
    return section | {"config_groups": {"group_0": group | fields}}


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        (FP8, Fp8("tensor", "token", is_stored=True)),
        (FP8 | {"activation_scheme": "static"}, Fp8("tensor", "static", is_stored=True)),
        (FP8 | {"weight_block_size": [128, 128], "fmt": "e4m3"}, Fp8Block(128, 128)),
        (FP8 | {"weight_block_size": [128, 128], "fmt": "float8_e4m3fn"}, Fp8Block(128, 128)),  # MiniMax-M2
        (compressed(), Fp8("row", "token", is_stored=True)),
        (compressed("tensor", "tensor"), Fp8("tensor", "token", is_stored=True)),
        (compressed("tensor", "tensor", dynamic=False), Fp8("tensor", "static", is_stored=True)),
        (BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, Bnb4Bit("nf4", is_stored=True)),
        (BNB | {"load_in_4bit": True}, Bnb4Bit("fp4", is_stored=True)),
        (BNB | {"load_in_8bit": True, "llm_int8_threshold": 6.0}, BnbInt8(is_stored=True)),
    ],
)
def test_a_checkpoint_says_how_its_layers_are_stored(section, scheme):
    assert read(section).quantization.scheme_of("model.layers.0.mlp.up_proj") == scheme


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "quant_method None is not supported: supported are fp8, bitsandbytes, compressed-tensors"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (FP8 | {"activation_scheme": "later"}, "activation_scheme 'later' is not supported"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size must be two sizes, .*found \[128\]"),
        (FP8 | {"weight_block_size": [128, 48]}, r"second one of 32, 64, 128, found \[128, 48\]"),
        (FP8 | {"weight_block_size": [True, 128]}, "weight_block_size must be two sizes"),
        (FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme 'static'"),
        (FP8 | {"ignored_layers": "lm_head"}, "ignored_layers must be a list of layer names, found 'lm_head'"),
        (FP8 | {"modules_to_not_convert": [3]}, r"modules_to_not_convert must be a list of layer names, found \[3\]"),
        (BNB, "one of load_in_4bit and load_in_8bit must be true"),
        (BNB | {"load_in_4bit": True, "load_in_8bit": True}, "one of load_in_4bit and load_in_8bit"),
        (BNB | {"load_in_4bit": "yes"}, "load_in_4bit must be true or false, found 'yes'"),
        (BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type 'nf5' is not supported"),
        (BNB | {"load_in_4bit": True, "bnb_4bit_quant_storage": "int4"}, "bnb_4bit_quant_storage 'int4'"),
        (BNB | {"load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight is not supported"),
        (compressed() | {"config_groups": {}}, "config_groups must be an object of objects, found {}"),
        (compressed() | {"format": "marlin-24"}, "group_0: format 'marlin-24' is not supported"),
        (compressed() | {"ignore": ["re:("]}, r"ignore: 're:\(' is not a regular expression"),
        (compressed() | {"quantization_status": "frozen"}, "quantization_status 'frozen' is not supported"),
        (compressed() | {"sparsity_config": {"format": "sparse-24"}}, "sparse checkpoints are not supported"),
        (changed(compressed(), targets="Linear"), "group_0: targets must be a list of layer names"),
        (changed(compressed(), targets=None), "group_0: targets must be a list of layer names, found None"),
        (
            compressed() | {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
            "transform_config is not supported: served is null, found {'R4'",
        ),
        (changed(compressed(), weights=None), r"weights \(8-bit int, by tensor, .*\) are not supported"),
        (changed(compressed(), input_activations=None), "without 8-bit activations are not supported"),
        (changed(compressed(), output_activations={}), "output_activations are not supported"),
        (compressed(num_bits=4), r"weights \(4-bit float, by channel"),
        (compressed("group"), "weights .*by group"),
        (compressed(symmetric=False), "symmetric False"),
        (compressed("block", "group"), "block_structure must be two sizes, found None"),
        (compressed("channel", "group"), "input_activations: activations .*by group"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(section, message):
    with pytest.raises(ModelError, match=message):
        read(section)


def test_every_flag_of_the_server_is_a_scheme_or_a_format():
    formats = ("awq", "gptq", "auto-round", "compressed-tensors")  # what a checkpoint may be already
    assert ("auto", "none", *ON_LOAD, *formats) == QUANTIZATION_NAMES
    assert {*formats} < {*FORMATS}


def test_the_flag_quantises_an_unquantised_checkpoint():
    assert read(None).quantized("auto").quantization is None
    assert read(None).quantized("none").quantization is None
    quantization = read(None).quantized("bitsandbytes-nf4").quantization
    assert quantization == QuantizationConfig.of_all("bitsandbytes-nf4", NF4_ON_LOAD, is_on_load=True)
    assert quantization.describe() == "bitsandbytes nf4 (4 bits, scales by 64 inputs), quantized on load"


def test_the_flag_says_again_what_the_checkpoint_is():
    for wanted in ("auto", "fp8"):
        assert read(FP8).quantized(wanted).quantization == read(FP8).quantization


@pytest.mark.parametrize("wanted", ["none", "bitsandbytes-nf4"])
def test_the_flag_does_not_contradict_the_checkpoint(wanted):
    with pytest.raises(ModelError, match=f"--quantization {wanted}: the checkpoint is quantized as fp8 already"):
        read(FP8).quantized(wanted)


def test_a_text_part_keeps_the_quantisation_of_the_whole():
    raw = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": RAW | {"model_type": "mistral"},
        "quantization_config": FP8 | {"modules_to_not_convert": ["vision_tower", "lm_head"]},
    }
    quantization = ModelConfig.from_json(raw).quantization
    assert quantization.scheme_of("language_model.model.layers.0.mlp.up_proj") is not None
    assert quantization.scheme_of("vision_tower.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("mlp", "model.layers.0.mlp.gate_proj", True),
        ("model.layers.1", "model.layers.10.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_proj", True),
        ("re:.*gate_proj", "model.layers.0.mlp.gate_proj", True),
        ("re:gate_proj", "model.layers.0.mlp.gate_proj", False),
        (r"re:.*layers\.[12]\..*", "model.layers.2.mlp.up_proj", True),
        (r"re:.*layers\.[12]\..*", "model.layers.12.mlp.up_proj", False),
    ],
)
def test_layers_are_named_by_components_or_regular_expressions(pattern, name, expected):
    assert (name in LayerNames((pattern,))) is expected


def test_names_decide_before_expressions_and_those_before_all_layers():
    """As in compressed-tensors, match_targets, in whatever order the groups stand."""
    channel, tensor = (compressed(by)["config_groups"]["group_0"] for by in ("channel", "tensor"))
    groups = {
        "all": channel,
        "expression": tensor | {"targets": ["re:.*down_proj"]},
        "name": channel | {"targets": ["model.layers.1.mlp.down_proj"]},
    }
    scheme_of = read(compressed() | {"config_groups": groups}).quantization.scheme_of
    assert scheme_of("model.layers.0.mlp.up_proj").weights == "row"
    assert scheme_of("model.layers.0.mlp.down_proj").weights == "tensor"
    assert scheme_of("model.layers.1.mlp.down_proj").weights == "row"


def test_a_thousand_targets_of_one_scheme_are_one_rule():
    """A layer's name is looked for in every rule, so that a rule for each name takes time by the square of names."""
    targets = [f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in range(1000)]
    quantization = read(changed(compressed("channel"), targets=targets)).quantization
    assert len(quantization.rules) == 1
    assert quantization.scheme_of(targets[-1]).weights == "row"
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
)
FIELDS = [
    *("activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers", "fmt"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "llm_int8_skip_modules"),
    *("config_groups", "format", "ignore"),
]


@given(
    method=st.sampled_from(["fp8", "bitsandbytes", "compressed-tensors"]),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    group=st.dictionaries(st.sampled_from(["targets", "weights", "input_activations", "format"]), JSON, max_size=3),
)
def test_any_section_is_read_or_refused(method, fields, group):
    try:
        config = read({"config_groups": {"group_0": group}} | fields | {"quant_method": method})
    except ModelError:
        return
    assert config.quantization.describe()


def test_ignored_parts_of_a_merged_layer_stay_as_they_are():
    """q is quantised, k is not, v is: three products in one layer, in their order."""
    config = ModelConfig.from_folder(PLAIN)
    ignored = LayerNames(("k_proj", "gate_proj", r"re:.*\.o_proj"))
    quantization = QuantizationConfig.of_all("fp8", FP8_ON_LOAD, ignored=ignored, is_on_load=True)
    config = dataclasses.replace(config, quantization=quantization)
    model = build(config, Weights.from_folder(PLAIN, device=CPU, dtype=torch.float32), SINGLE)
    whole, plain = (load_model(PLAIN, name).layers[0].self_attn for name in ("fp8", "none"))
    attention, x = model.layers[0].self_attn, torch.randn(5, 64)
    q, k, v = attention.qkv_proj(x).split((64, 32, 32), dim=-1)
    assert torch.equal(q, whole.qkv_proj(x)[:, :64])
    torch.testing.assert_close(k, plain.qkv_proj(x)[:, 64:96])
    assert torch.equal(v, whole.qkv_proj(x)[:, 96:])
    assert torch.equal(attention.o_proj(x), plain.o_proj(x))


@pytest.mark.parametrize(
    "section",
    [
        FP8,
        FP8 | {"activation_scheme": "static"},
        FP8 | {"weight_block_size": [64, 32]},
        compressed(),
        BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        BNB | {"load_in_8bit": True},
        *(SCHEMES[name].section for name in ("mxfp4", "nvfp4", "w8a8")),
    ],
)
def test_random_weights_are_quantised_as_the_checkpoint_would_be(section):
    config = read(section)
    model = build(config, Weights.dummy(device=CPU, dtype=torch.float32), SINGLE)
    plain = build(read(None), Weights.dummy(device=CPU, dtype=torch.float32), SINGLE)
    logits, expected = (
        runner.step([(runner.add_row(), [3, 30, 17])])[0]
        for runner in (PagedRunner(model, config), PagedRunner(plain, config))
    )
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, atol=0.4 * float(expected.std()), rtol=0)


CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "What is 12 + 7?"},
]


@pytest.mark.parametrize(
    ("name", "most_kl", "least_agreement"),
    [
        ("fp8", 0.002, 0.95),
        ("w8a8", 0.002, 0.95),
        ("int4", 0.02, 0.95),
        ("bitsandbytes-nf4", 0.02, 0.95),
        ("bitsandbytes-int8", 0.0002, 0.95),
    ],
)
def test_the_demo_model_says_nearly_the_same(name, most_kl, least_agreement):
    tokenizer = load_tokenizer(DEMO_FOLDER)
    prompt = tokenizer.encode_chat(tokenizer.render_chat(CHAT))
    expected, found = (logits_of(DEMO_FOLDER, flag, prompt=prompt).log_softmax(-1) for flag in ("none", name))
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    agreement = (expected.argmax(-1) == found.argmax(-1)).float().mean()
    assert 0.0 < kl < most_kl
    assert agreement >= least_agreement
