"""No field of a config.json that changes the computation is dropped: each is read, known to change nothing, or refused.

Transformers' config classes say which fields there are. A release that adds one fails here, by class and field: read it
in models/config, or add it to a table of models/config/unread_fields.py.
"""

import json
import logging
import math

import pytest
import transformers
from transformers import GenerationConfig, Mistral3Config
from transformers.modeling_rope_utils import RopeParameters

from models.config import unread_fields
from models.config.model_config import ModelConfig
from models.config.unread_fields import find_unknown
from models.errors import ModelError
from models.registry import ARCHITECTURES
from tests.support.checkpoints import MINISTRAL3_ROPE, TINY, make_configs

pytestmark = pytest.mark.slow

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, **TINY}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **TINY}
READ_ELSEWHERE = {"architectures", "bos_token_id", "eos_token_id"}  # generation_config.json and the tokenizer have ids
EXPERTS = {
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
}
REQUIRED = {*TINY, *EXPERTS}
# No size follows from others, and one layer of four has attention
WIDE = TINY | {"num_attention_heads": 64, "hidden_size": 1024, "num_hidden_layers": 4}
# What these classes need: their own defaults give no head, no layer with attention, or layers by number alone
NEEDED = {
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 6},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "KimiLinearForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}
WRAPPED = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}


def as_file(architecture: str, config: transformers.PreTrainedConfig) -> dict:
    """Return config.json with every field that the class knows."""
    text = config.to_json_string(use_diff=False)
    # transformers reads the spelling of infinity that it writes from a file alone, not from a dict
    fields = json.loads(text, object_hook=lambda value: math.inf if "__float__" in value else value)
    return fields | {"architectures": [architecture]}


def class_of(architecture: str) -> type[transformers.PreTrainedConfig]:
    return getattr(transformers, architecture).config_class


def every_config():
    for architecture in ARCHITECTURES:
        needed = NEEDED.get(architecture, {})
        sizes = {"num_hidden_layers": 4} if "layer_types" in needed else {}
        yield architecture, class_of(architecture)(**sizes, **needed)
    yield "Mistral3ForConditionalGeneration", Mistral3Config(text_config={"model_type": "ministral3"})
    models = {class_of(architecture): architecture for architecture in ARCHITECTURES}
    for config in make_configs().values():
        yield models[type(config)], config


@pytest.fixture
def unknown(monkeypatch):
    """Names that from_json neither reads nor knows, whatever their values."""
    names, find = [], unread_fields.find_unknown
    monkeypatch.setattr(unread_fields, "find_unknown", lambda raw, known: names.extend(find(raw, known)) or [])
    return names


@pytest.mark.parametrize(("architecture", "config"), [*every_config()])
def test_each_field_of_transformers_class_is_read_or_known(architecture, config, unknown):
    ModelConfig.from_json(as_file(architecture, config))
    assert not unknown, f"{type(config).__name__} has fields that models/config neither reads nor knows: {unknown}"


@pytest.mark.parametrize("value", [None, False, 1.5])
def test_a_field_that_a_release_adds_is_found(value, unknown):
    ModelConfig.from_json(LLAMA | {"residual_gain": value})
    assert unknown == ["residual_gain"]


@pytest.mark.parametrize("name", RopeParameters.__annotations__)
def test_each_rotary_field_of_transformers_is_known(name):
    rope = {"rope_type": "default"}
    ModelConfig.from_json(LLAMA | {"rope_parameters": rope | {name: rope.get(name, 1)}})


def test_parameters_of_generation_are_known():
    # a config.json may have them, where nobody reads them
    assert not find_unknown(GenerationConfig._get_default_generation_params(), set())


def with_and_without_windows():
    """Architectures, with the windows of those that can do without them."""
    for architecture, row in ARCHITECTURES.items():
        if row.text_config is None:
            yield architecture, False
            if hasattr(class_of(architecture)(), "use_sliding_window"):
                yield architecture, True


@pytest.mark.parametrize(("architecture", "has_windows"), with_and_without_windows())
def test_a_field_that_is_left_out_has_the_default_of_transformers(architecture, has_windows):
    config_class = class_of(architecture)
    windows = {"use_sliding_window": has_windows, "max_window_layers": 2}
    known = {name: value for name, value in windows.items() if hasattr(config_class(), name)}
    needed = NEEDED.get(architecture, {})
    full = as_file(architecture, config_class(**WIDE, **known, **needed))
    if "layer_types" not in needed:
        full.pop("layer_types", None)
    different = []
    for name in full.keys() - READ_ELSEWHERE - needed.keys():
        kept = {other: value for other, value in full.items() if other != name}
        row = ARCHITECTURES[architecture]
        defaults = {*row.defaults, *row.harmless}
        is_older_known = name == "num_local_experts" and "num_experts" in defaults
        if name in REQUIRED and full[name] is not None and name not in defaults and not is_older_known:
            with pytest.raises(ModelError, match="is missing"):
                ModelConfig.from_json(kept)
            continue
        theirs = as_file(architecture, config_class.from_dict(kept))
        if ModelConfig.from_json(kept) != ModelConfig.from_json(theirs):
            different.append(name)
    assert not different, f"{config_class.__name__} has other defaults than models/registry.py: {different}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_layer_config": {"0": {"head_dim": 4}}},
            "per_layer_config is not supported: served is {} or None, found",
        ),
        ({"is_causal": False}, "is_causal is not supported: served is True or None, found False"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is not supported: served is False or None, found True"),
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported for this architecture: served is 'llama'"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is not supported: served is 'full_attention'"),
        ({"key_multiplier": 0.5}, "key_multiplier 0.5 is unknown and looks like part of the computation: remove it"),
        ({"logits_scaling": 8.0}, "logits_scaling 8.0 is unknown"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is unknown"),
        ({"attn_temperature_tuning": 4}, "attn_temperature_tuning 4 is unknown"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling {'beta': 0.1} is unknown"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size 8192 is unknown"),
        ({"no_rope_layers": [1, 1, 0]}, r"no_rope_layers \[1, 1, 0\] is unknown"),
        ({"use_rope": False}, "use_rope False is unknown"),
        ({"use_qk_norm": True}, "use_qk_norm True is unknown"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 256 is unknown"),
        ({"scoring_func": "sigmoid"}, "scoring_func is not supported: served is 'softmax' or None, found 'sigmoid'"),
        ({"clip_qkv": 8}, "clip_qkv 8 is unknown"),
        ({"rope_parameters": MINISTRAL3_ROPE}, "llama_4_scaling_beta 0.4 is not supported among the fields of rotary"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "alpha 1000.0 is not supported among the fields"),
    ],
)
def test_a_field_that_would_change_the_computation_is_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_json(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"per_layer_config": {}, "is_causal": True, "is_encoder_decoder": None, "use_rope": None, "use_qk_norm": False},
        {"key_multiplier": 1.0, "final_logit_softcapping": None, "attn_logit_softcapping": 0, "clip_qkv": None},
        {"layer_types": ["full_attention"] * 3, "no_rope_layers": None},
        {
            "properties": None,
            "initializer_factor": 2.0,
            "_name_or_path": "x",
            "unsloth_version": "1",
            "attention_dropout": 0.1,
            "image_token_index": 9,
            "top_k": 5,
        },
        {"use_fused_rope": True, "use_flash_attn": True, "rope_interleaved": False, "is_llama_config": True},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True, "mrope_section": [1, 1, 2]}},
        {"rope_parameters": {"rope_type": "default", "factor": 8.0, "llama_4_scaling_beta": None}},
    ],
)
def test_a_field_that_changes_nothing_is_no_error_and_no_warning(changes, caplog):
    assert ModelConfig.from_json(LLAMA | changes).num_layers == 3
    assert not caplog.records


def test_other_unknown_fields_are_named_in_one_warning(caplog):
    ModelConfig.from_json(LLAMA | {"my_note": "x", "sliding_window": 4096, "another": [1], "empty": {}, "off": False})
    assert [record.getMessage() for record in caplog.records] == [
        "file=config.json fields=another,my_note,sliding_window are unknown and have no effect"
    ]


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_fields_beside_and_in_a_text_part_are_checked_alike(kind, caplog):
    text = TINY | {"model_type": kind, "num_key_value_heads": 2}
    ModelConfig.from_json(WRAPPED | {"text_config": text | {"note": 1}, "mark": 2, "vision_config": {"x_scale": 3}})
    assert [record.getMessage().split()[1] for record in caplog.records] == ["fields=mark", "fields=note"]
    with pytest.raises(ModelError, match="text_scale 2 is unknown"):
        ModelConfig.from_json(WRAPPED | {"text_config": text, "text_scale": 2})
    with pytest.raises(ModelError, match="text_scale 2 is unknown"):
        ModelConfig.from_json(WRAPPED | {"text_config": text | {"text_scale": 2}})


def test_a_cap_that_transformers_applies_to_gemma_3_alone_is_refused_for_a_text_part():
    text = {**GEMMA3, "final_logit_softcapping": 30.0}
    assert ModelConfig.from_json(text).multipliers.logits_softcap == 30
    with pytest.raises(ModelError, match="final_logit_softcapping is not supported: served is None, found 30"):
        ModelConfig.from_json({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})


def test_a_text_part_of_another_class_is_refused():
    with pytest.raises(ModelError, match=r"model_type 'llama' .* served is 'mistral' or 'ministral3' or 'mistral4'"):
        ModelConfig.from_json(WRAPPED | {"text_config": TINY | {"model_type": "llama"}})


def test_layers_of_two_kinds_are_refused_where_all_are_of_one():
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match="layer_types is not supported: served is 'sliding_attention', found"):
        ModelConfig.from_json(mistral | {"layer_types": kinds})
    with pytest.raises(ModelError, match="use_sliding_window false is not supported: set sliding_window to null"):
        ModelConfig.from_json(mistral | {"use_sliding_window": False})
    assert ModelConfig.from_json(mistral | {"layer_types": kinds[:2] + kinds[:1]}).sliding_windows == (8, 8, 8)


def test_rotary_fields_outside_the_two_kinds_of_gemma_3_are_refused():
    with pytest.raises(ModelError, match="rope_type 'linear' is not supported among the fields of rotary"):
        ModelConfig.from_json(GEMMA3 | {"rope_parameters": {"rope_type": "linear", "factor": 8.0}})


def test_the_old_spelling_of_rotary_fields_wins_as_in_transformers():
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    rope = ModelConfig.from_json(LLAMA | both).ropes[0]
    theirs = transformers.LlamaConfig.from_dict(TINY | both).rope_parameters
    assert (rope.type, rope.factor) == (theirs["rope_type"], theirs["factor"]) == ("linear", 2.0)


@pytest.fixture(autouse=True)
def _every_warning(caplog):
    caplog.set_level(logging.WARNING, logger="models")
