"""Configs of quant_method auto-round: which layers are quantised and how, and what is refused by name."""

import pytest

from models.errors import ModelError
from models.fields import Fields
from models.quantization.auto_round import parse
from models.quantization.awq import Awq
from models.quantization.config import QuantizationConfig
from models.quantization.gptq import Gptq

LAYER = "model.layers.3.mlp.up_proj"
FOUR, EIGHT = (Gptq(bits, 128, has_order=False, is_v2=False) for bits in (4, 8))
CONFIG = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "autoround_version": "0.9.2", "iters": 200,
}  # fmt: skip


def parsed(**changed: object) -> QuantizationConfig:
    return parse(Fields({**CONFIG, **changed}, "config.json: quantization_config"))


@pytest.mark.parametrize(
    ("changed", "scheme"),
    [
        ({}, FOUR),
        ({"bits": 8}, EIGHT),
        ({"sym": False, "group_size": -1}, Gptq(4, None, has_order=False, is_v2=False, is_symmetric=False)),
        ({"packing_format": "auto_round:auto_awq"}, Awq(128)),
        ({"packing_format": None, "backend": "auto"}, FOUR),
        ({"act_bits": 16}, FOUR),
    ],
)
def test_a_packing_is_that_of_gptq_or_awq(changed, scheme):
    assert parsed(**changed).scheme_of(LAYER) == scheme


@pytest.mark.parametrize(
    "blocks",
    ["model.layers", "other, model.layers.3", ["model.layers"], [["model.layers.3.self_attn"], ["model.layers.3.mlp"]]],
)
@pytest.mark.parametrize("field", ["block_name_to_quantize", "to_quant_block_names"])
def test_layers_whose_names_begin_otherwise_are_not_quantised(field, blocks):
    quantization = parsed(**{field: blocks})
    assert quantization.scheme_of(LAYER) == FOUR
    assert quantization.scheme_of(f"visual.{LAYER}") is None


def test_names_decide_before_expressions_and_these_before_blocks():
    extra = {
        r".*layers\.(1|3)\..*": {"bits": 8},
        "layers.2.mlp.*": {"bits": 16, "data_type": "float"},
        "model.layers.3.mlp.down_proj": {"bits": 4, "group_size": 32},
        "model.layers.1.mlp.gate_proj": {"bits": 16, "data_type": "float"},
        "model.layers.4.mlp.up_proj": {"sym": False},
        "lm_head": {"bits": 16},
    }
    quantization = parsed(extra_config=extra, block_name_to_quantize="model.layers")
    layers = "model.layers"
    assert quantization.scheme_of(LAYER) == EIGHT
    assert quantization.scheme_of(f"{layers}.3.mlp.down_proj") == Gptq(4, 32, has_order=False, is_v2=False)
    assert quantization.scheme_of(f"{layers}.1.mlp.gate_proj") is None
    assert quantization.scheme_of(f"{layers}.1.mlp.up_proj") == EIGHT
    assert quantization.scheme_of(f"{layers}.2.mlp.up_proj") is None
    assert quantization.scheme_of(f"{layers}.2.self_attn.q_proj") == FOUR
    assert quantization.scheme_of(f"{layers}.4.mlp.up_proj").is_symmetric is False


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"packing_format": "auto_round:nv_fp"}, r"packing_format 'auto_round:nv_fp' .* 'auto_round:auto_awq'"),
        ({"packing_format": None, "backend": "auto_round:exllamav2"}, "packing_format None is not supported"),
        ({"packing_format": ["auto_round:auto_gptq"]}, "packing_format .* is not supported"),
        ({"bits": 2}, "bits 2 is not supported: supported are 4, 8"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "bits 8 is not supported: supported are 4"),
        ({"bits": 16}, "bits 16 is not supported for all layers"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": 0}, "group_size"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported: supported is 'int'"),
        ({"act_bits": 8}, "act_bits 8 is not supported: supported is 16"),
        ({"modules_to_not_convert": ["mlp"]}, "modules_to_not_convert is not supported with auto-round"),
        ({"dynamic": {"-:mlp": {}}}, "dynamic is not supported with auto-round"),
        ({"lm_head": True}, "lm_head is quantized"),
        ({"extra_config": {"lm_head": {"bits": 8}}}, "lm_head is quantized"),
        ({"extra_config": {LAYER: {"bits": 3}}}, rf"extra_config {LAYER}: bits 3 is not supported"),
        ({"extra_config": {LAYER: {"data_type": "fp"}}}, rf"extra_config {LAYER}: data_type 'fp'"),
        ({"extra_config": [LAYER]}, "extra_config must be an object of objects"),
        ({"extra_config": {"layers.(": {"bits": 8}}}, "is not a regular expression"),
        ({"extra_config": {"mlp.*": {"bits": 16}, LAYER: {"bits": 8}}}, rf"{LAYER} is quantized, but .*mlp"),
        ({"block_name_to_quantize": 3}, "block_name_to_quantize must be a list of layer names, found 3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changed, message):
    with pytest.raises(ModelError, match=message):
        parsed(**changed)


def test_ten_thousand_names_of_one_kind_are_one_rule():
    extra = {f"model.layers.0.mlp.experts.{expert}.up_proj": {"bits": 8} for expert in range(10_000)}
    quantization = parsed(extra_config=extra)
    assert len(quantization.rules) == 2
    assert quantization.scheme_of("model.layers.0.mlp.experts.9999.up_proj") == EIGHT
