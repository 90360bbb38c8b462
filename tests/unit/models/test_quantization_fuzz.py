"""Whatever stands in a quantization_config, it is understood or refused in one sentence, never a crash."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import ModelError
from models.fields import Fields
from models.quantization.schemes import FORMATS, parse_quantization
from tests.support import int_checkpoints

FIELDS = (
    *("bits", "w_bit", "group_size", "q_group_size", "version", "format", "zero_point", "modules_to_not_convert"),
    *("checkpoint_format", "desc_act", "sym", "is_marlin_format", "pack_dtype", "lm_head", "dynamic"),
    *("modules_in_block_to_quantize", "config_groups", "ignore", "quantization_status", "sparsity_config"),
    *("fmt", "weight_block_size", "activation_scheme", "ignored_layers", "load_in_4bit", "load_in_8bit"),
    *("packing_format", "block_name_to_quantize", "extra_config", "data_type", "act_bits", "backend"),
    *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules", "llm_int8_threshold"),
)
GROUP_FIELDS = ("targets", "weights", "input_activations", "output_activations", "format")
WEIGHT_FIELDS = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "actorder", "block_structure")
WORDS = st.sampled_from(
    ["gemm", "gptq", "gptq_v2", "group", "channel", "block", "tensor", "int", "float", "re:(", "Linear"]
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from([2**31, 10**400]) | st.floats() | WORDS
VALUES = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=3),
)
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "lm_head")


def check(raw: object) -> None:
    """Parse what a config.json may hold, and use what comes of it."""
    found, refusal = None, "config.json: "
    try:
        found = parse_quantization(Fields({"quantization_config": raw}, "config.json"))
    except ModelError as error:
        refusal = str(error)
    assert refusal.startswith("config.json: ")
    if found is None:
        return
    assert found.describe()
    for layer in LAYERS:
        scheme = found.scheme_of(layer)
        if scheme is not None:
            assert scheme.matrix_bytes(4096, 4096, itemsize=2) > 0
            assert scheme.output_multiple > 0
            assert scheme.input_multiple > 0
            hash(scheme)


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(
    st.sampled_from(
        [
            int_checkpoints.AWQ,
            int_checkpoints.gptq_config(),
            int_checkpoints.packed_config(),
            int_checkpoints.auto_round_config(),
        ]
    )
    | st.builds(lambda method: {"quant_method": method}, st.sampled_from(sorted(FORMATS))),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)
def test_fields_of_any_value(base, changes):
    check(base | changes)


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(
    st.dictionaries(st.sampled_from(GROUP_FIELDS), VALUES, max_size=2),
    st.dictionaries(st.sampled_from(WEIGHT_FIELDS), VALUES, max_size=3),
    st.none() | st.dictionaries(st.sampled_from(WEIGHT_FIELDS), VALUES, max_size=3),
)
def test_groups_of_compressed_tensors_of_any_value(group_changes, weight_changes, activations):
    config = json.loads(json.dumps(int_checkpoints.packed_config()))
    group = config["config_groups"]["group_0"]
    group["weights"] |= weight_changes
    group["input_activations"] = activations
    group |= group_changes
    check(config)


@pytest.mark.parametrize("raw", [7, [], "awq", {"quant_method": None}, {"quant_method": []}, {"quant_method": {}}, {}])
def test_what_is_no_quantization_config(raw):
    with pytest.raises(ModelError, match=r"quantization_config must be an object|quant_method"):
        parse_quantization(Fields({"quantization_config": raw}, "config.json"))
