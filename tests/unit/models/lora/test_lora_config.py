"""Adapter folders: what PEFT's fields mean, and one sentence for each that is not served."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.lora.adapter import Adapter
from models.lora.config import LoraConfig
from models.lora.linear import check_adapters
from models.parallel import TensorParallel
from tests.support.checkpoints import make_config
from tests.support.lora_adapters import adapter_config, make_tensors, modules, save_adapter
from tests.support.reference import save_checkpoint

Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.up_proj"
A, B = "lora_A.weight", "lora_B.weight"


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({"target_modules": "all-linear"}, {Q, UP}),
        ({"target_modules": None}, {Q, UP}),
        ({"target_modules": ["q_proj"]}, {Q}),
        ({"target_modules": ["self_attn.q_proj", "proj"]}, {Q}),
        ({"target_modules": [UP]}, {UP}),
        ({"target_modules": r".*\.layers\.\d\.(self_attn|mlp)\.(q|up)_proj"}, {Q}),
        ({"target_modules": r"layers\.1\..*"}, set()),  # the whole name must match
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, {UP}),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.11\..*"}, {Q}),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1}, {Q}),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 11], "layers_pattern": "layers"}, {UP}),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": []}, {Q, UP}),
    ],
)
def test_targets_are_those_that_peft_wraps(fields, targets):
    config = LoraConfig.from_json(adapter_config(**fields))
    assert {module for module in (Q, UP) if config.is_target(module)} == targets


@pytest.mark.parametrize(
    ("fields", "q", "up"),
    [
        ({}, 2.0, 2.0),
        ({"use_rslora": True}, 8 / math.sqrt(4), 8 / math.sqrt(4)),
        ({"rank_pattern": {"q_proj": 16}}, 0.5, 2.0),
        ({"rank_pattern": {"q_proj": 16}, "use_rslora": True}, 2.0, 4.0),
        ({"alpha_pattern": {r"layers\.\d\.self_attn\.q_proj": 2}}, 0.5, 2.0),
        ({"alpha_pattern": {"^model.layers.1.self_attn.q_proj": 2}, "rank_pattern": {"up_proj": 2}}, 0.5, 4.0),
        ({"alpha_pattern": {"proj": 2, r".*\.up_proj": 1}}, 2.0, 0.25),  # "proj" is no end of a name at a dot
    ],
)
def test_scales_follow_alpha_rank_and_their_patterns(fields, q, up):
    config = LoraConfig.from_json(adapter_config(**fields))
    assert (config.scale_of(Q), config.scale_of(UP)) == pytest.approx((q, up))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "LOHA"}, ["peft_type", "'LOHA'"]),
        ({"use_dora": True}, ["use_dora", "DoRA is"]),
        ({"bias": "lora_only"}, ["bias", "lora_only"]),
        ({"bias": "all"}, ["bias", "'all'"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out", "weights stored as (inputs, outputs) are"]),
        ({"layer_replication": [[0, 4], [2, 5]]}, ["layer_replication"]),
        ({"trainable_token_indices": [5]}, ["trainable_token_indices"]),
        ({"target_parameters": ["mlp.experts.down_proj"]}, ["target_parameters"]),
        ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens"]),
        ({"lora_bias": True}, ["lora_bias", "biases of adapters are"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights", "path_initial_model_for_weight_conversion"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["target_modules", "lm_head"]),
        ({"target_modules": ["embed_tokens"]}, ["target_modules", "model.embed_tokens"]),
        ({"target_modules": ".*"}, ["target_modules", "embed_tokens"]),
        ({"target_modules": "(q_proj"}, ["target_modules", "(q_proj"]),
        ({"target_modules": [1]}, ["target_modules", "[1]"]),
        ({"target_modules": ".*q_proj", "layers_to_transform": [1]}, ["layers_to_transform", "target_modules"]),
        ({"layers_to_transform": ["1"]}, ["layers_to_transform"]),
        ({"layers_to_transform": [1], "layers_pattern": "h"}, ["layers_pattern", "'h'"]),
        ({"r": 0}, ["r must be", "0"]),
        ({"r": "8"}, ["r must be", "'8'"]),
        ({"lora_alpha": None}, ["lora_alpha is missing"]),
        ({"rank_pattern": {"q_proj": -1}}, ["q_proj", "-1"]),
        ({"rank_pattern": ["q_proj"]}, ["rank_pattern"]),
        ({"rank_pattern": {"(?i)q_proj": 4}}, ["rank_pattern", "(?i)q_proj", "is not a regular expression"]),
        ({"alpha_pattern": {"(": 1}}, ["alpha_pattern", "'('"]),
    ],
)
def test_a_field_that_is_not_served_is_named(fields, words):
    with pytest.raises(ModelError) as error:
        LoraConfig.from_json(adapter_config(**fields), where="some/adapter_config.json")
    message = str(error.value)
    assert message.startswith("some/adapter_config.json: ")
    assert "\n" not in message
    assert all(word in message for word in words)


def test_unknown_fields_are_warned_of_only_where_they_are_set(caplog):
    LoraConfig.from_json(adapter_config(new_thing=None, other={}))
    assert not caplog.records
    LoraConfig.from_json(adapter_config(new_thing=3))
    assert "new_thing" in caplog.text


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, make_config("llama3.1"))
    return folder


QV = modules(("self_attn.q_proj", "self_attn.v_proj"))
CONFIG = adapter_config(target_modules=["q_proj", "v_proj"])


def check(folder, base):
    check_adapters(
        [Adapter("a", folder)], ModelConfig.from_folder(base), dtype=torch.float32, tp=TensorParallel()
    )  # fmt: skip


def changed(tensors, change):
    tensors = dict(tensors)
    change(tensors)
    return tensors


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (put(f"{FIRST}.{A}", 4, 40), CONFIG, [f"{FIRST}.{A}", "[4, 40]", "[4, 32]"]),
        (put(f"{FIRST}.{B}", 32, 5), CONFIG, [f"{FIRST}.{B}", "[32, 5]", "[32, 4]"]),
        (put(f"{FIRST}.{A}", 4), CONFIG, [f"{FIRST}.{A}", "[4]"]),
        (lambda tensors: tensors.pop(f"{FIRST}.{B}"), CONFIG, [f"{FIRST}.{A}", f"not {FIRST}.{B}"]),
        (lambda tensors: tensors.pop(f"{FIRST}.{A}"), CONFIG, [f"{FIRST}.{B}", f"not {FIRST}.{A}"]),
        (lambda tensors: None, CONFIG | {"target_modules": ["q_proj", "v_proj", "o_proj"]}, ["o_proj", "missing"]),
        (lambda tensors: None, CONFIG | {"target_modules": ["q_proj"]}, ["v_proj", "target_modules"]),
        (lambda tensors: None, CONFIG | {"rank_pattern": {"q_proj": 2}}, [f"{FIRST}.{A}", "[4, 32]", "[2, 32]"]),
        (lambda tensors: None, CONFIG | {"layers_to_transform": [0, 1]}, ["layers.2", "target_modules"]),
        (
            lambda tensors: tensors.update(
                {
                    f"base_model.model.model.layers.3.self_attn.q_proj.{A}": torch.zeros(4, 32),
                    f"base_model.model.model.layers.3.self_attn.q_proj.{B}": torch.zeros(32, 4),
                }
            ),
            CONFIG,
            ["2 tensors", "layers.3.self_attn.q_proj.lora_A"],
        ),
        (put("base_model.model.lm_head.weight", 97, 32), CONFIG, ["base_model.model.lm_head.weight"]),
        (put(f"{FIRST}.lora_magnitude_vector", 32), CONFIG, ["lora_magnitude_vector"]),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 97), CONFIG, ["lora_embedding_A"]),
        (put(f"model.layers.0.self_attn.q_proj.{A}", 4, 32), CONFIG, [f"model.layers.0.self_attn.q_proj.{A}"]),
    ],
)
def test_every_tensor_has_its_place_and_shape(base, tmp_path, change, config, words):
    tensors = changed(make_tensors(base, dict.fromkeys(QV, 4)), change)
    folder = save_adapter(tmp_path / "a", tensors, config)
    with pytest.raises(ModelError) as error:
        check(folder, base)
    message = str(error.value)
    assert all(word in message for word in ["adapter_model.safetensors", *words]), message
    assert "\n" not in message


def test_integers_are_no_weights(base, tmp_path):
    tensors = {name: tensor.to(torch.int8) for name, tensor in make_tensors(base, dict.fromkeys(QV, 4)).items()}
    with pytest.raises(ModelError, match="int8"):
        check(save_adapter(tmp_path / "a", tensors, CONFIG), base)


def test_an_adapter_of_a_wider_model_is_refused(base, tmp_path):
    other = tmp_path / "other"
    save_checkpoint(other, make_config("mistral_nemo"))
    folder = save_adapter(tmp_path / "a", make_tensors(other, dict.fromkeys(QV, 4)), CONFIG)
    with pytest.raises(ModelError, match=r"lora_A\.weight has shape \[4, 40\].*\[4, 32\]"):
        check(folder, base)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "malformed JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "JSON object"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "adapter_model.bin is a pickle, which is never read: load it with PEFT and save it again",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a readable safetensors"),
    ],
)
def test_a_broken_folder_is_explained(base, tmp_path, break_it, words):
    folder = save_adapter(tmp_path / "a", make_tensors(base, dict.fromkeys(QV, 4)), CONFIG)
    check(folder, base)
    break_it(folder)
    with pytest.raises(ModelError) as error:
        Adapter("a", folder)
    assert words in str(error.value)
    assert str(folder) in str(error.value)


def test_layers_of_nemotron_have_two_spellings(tmp_path):
    save_checkpoint(tmp_path / "base", make_config("nemotron_h"))
    tensors = make_tensors(tmp_path / "base", {"backbone.layers.0.mixer.in_proj": 4})
    for prefix in ("backbone.", "model."):
        named = {name.replace("backbone.", prefix): tensor for name, tensor in tensors.items()}
        config = adapter_config(target_modules=["in_proj"], layers_to_transform=[0])
        adapter = Adapter("a", save_adapter(tmp_path / prefix, named, config))
        assert adapter.rank_of("backbone.layers.0.mixer.in_proj") == 4
        assert adapter.rank_of("backbone.layers.0.mixer.out_proj") == 0


def test_the_text_of_a_model_that_also_sees_has_two_spellings(base, tmp_path):
    tensors = make_tensors(base, dict.fromkeys(QV, 4))
    for prefix in ("model.language_model.", "language_model.model."):
        renamed = {name.replace("model.layers", f"{prefix}layers"): tensor for name, tensor in tensors.items()}
        folder = tmp_path / prefix
        folder.mkdir()
        save_file(renamed, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
        adapter = Adapter("a", folder)
        assert adapter.rank_of("language_model.model.layers.2.self_attn.v_proj") == 4
        assert adapter.rank_of("language_model.model.layers.2.self_attn.k_proj") == 0
