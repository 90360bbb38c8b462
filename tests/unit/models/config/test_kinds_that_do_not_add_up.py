"""Kinds of layers that contradict each other in a config.json are refused, with the names of the fields."""

import json
from functools import cache
from typing import Any

import pytest
import transformers

from models.config.model_config import ModelConfig
from models.errors import ModelError
from tests.support.checkpoints import make_configs

LISTED = ["sliding_attention", "full_attention", "sliding_attention"]
FULL = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
NEAR = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
# No window, and layers that have one by the architecture's rule
WINDOWLESS = ["gemma2", "gemma3", "gemma4", "cohere2", "olmo3", "gpt_oss", "mellum", "cohere2_moe", "exaone_moe"]


@cache
def published() -> dict[str, dict[str, Any]]:
    """The tiny configs, as save_pretrained writes them."""
    classes = transformers.AutoModelForCausalLM._model_mapping
    found = {}
    for name, config in make_configs().items():
        raw = json.loads(json.dumps(config.to_dict(), default=str))
        found[name] = raw | {"architectures": [classes[type(config)].__name__]}
    return found


def read(name: str, *, without: tuple[str, ...] = (), **changes: object) -> ModelConfig:
    raw = {**published()[name], **changes}
    return ModelConfig.from_json({key: value for key, value in raw.items() if key not in without})


@pytest.mark.parametrize("name", [*WINDOWLESS, "exaone4", "ministral"])
def test_listed_windows_without_a_window_name_both_fields(name):
    types = list(published()[name]["layer_types"])
    types[0] = "sliding_attention"
    with pytest.raises(ModelError, match=r"layer_types has 'sliding_attention', but sliding_window is null"):
        read(name, sliding_window=None, layer_types=types)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4", "cohere2", "olmo3"])
def test_a_rule_of_windows_without_a_window_names_the_field(name):
    with pytest.raises(ModelError, match="sliding_window is null, but without layer_types some layers"):
        read(name, sliding_window=None, without=("layer_types",))


@pytest.mark.parametrize("name", ["mistral", "ministral3", "phi3", "mixtral"])
def test_null_is_full_attention_where_a_family_says_so(name):
    assert set(read(name, sliding_window=None, without=("layer_types",)).sliding_windows) == {None}


def test_a_qwen2_that_does_not_use_its_window_has_none():
    found = read("qwen2", sliding_window=None, use_sliding_window=False)
    assert set(found.sliding_windows) == {None}


@pytest.mark.parametrize("without", [(), ("layer_types",)])
def test_llama_4_without_the_size_of_its_chunks_is_refused(without):
    with pytest.raises(ModelError, match=r"(layer_types|no_rope_layers) .*attention_chunk_size is null"):
        read("llama4", attention_chunk_size=None, without=without)


@pytest.mark.parametrize(
    ("name", "entries", "missing"),
    [("gemma4", FULL, "sliding"), ("gemma4", NEAR, "full"), ("mellum", FULL, "sliding"), ("mellum", NEAR, "full")],
)
def test_positions_of_every_kind_of_layer_must_be_given(name, entries, missing):
    with pytest.raises(ModelError, match=f"rope_parameters has no entry '{missing}_attention'"):
        read(name, rope_parameters=entries)


def test_positions_that_are_not_used_may_be_left_out():
    types = ["full_attention"] * 3
    assert read("mellum", layer_types=types, rope_parameters=FULL).ropes[0].theta == 1e4


def test_null_positions_of_gemma_4_are_the_default_of_its_class():
    kinds = {(rope.type, rope.theta) for rope in read("gemma4", rope_parameters=None).ropes}
    assert kinds == {("default", 1e4), ("proportional", 1e6)}


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_families_with_a_default_for_each_kind_take_it(name):
    assert read(name, rope_parameters=FULL).ropes[-1] is not None


@pytest.mark.parametrize(
    ("field", "value"), [("num_global_key_value_heads", 3), ("global_head_dim", 15), ("global_head_dim", 0)]
)
def test_wrong_heads_of_gemma_4s_full_layers_name_their_field(field, value):
    with pytest.raises(ModelError, match=field):
        read("gemma4", attention_k_eq_v=True, without=("per_layer_config",), **{field: value})
