"""Config fields of models with short convolutions and Mamba-2: spellings of layers, published shapes, refusals."""

import json
import math
from pathlib import Path

import pytest
import torch

from models.config.mamba2 import Mamba2Config
from models.config.model_config import ModelConfig
from models.errors import ModelError
from tests.support.checkpoints import TINY

SIZES = {name: size for name, size in TINY.items() if name != "num_hidden_layers"}
SHAPES = Path("benchmarks/shapes")
GRANITE = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
KV_HEADS = {"num_key_value_heads": 2}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "num_key_value_heads": 2, "head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "num_key_value_heads": 2}


def parse(architecture, **fields):
    return ModelConfig.from_json({"architectures": [f"{architecture}ForCausalLM"], **SIZES, **fields})


def nemotron(pattern="ME*", **fields):
    return parse("NemotronH", **NEMOTRON | {"hybrid_override_pattern": pattern} | fields)


def test_null_is_false_for_a_flag_that_is_true_if_it_is_missing():
    """As in transformers, whose classes ask for the truth of the value."""
    for fields, is_first in (({}, True), ({"mamba_norm_before_gate": None}, False)):
        recurrence = parse("FalconH1", **MAMBA, num_hidden_layers=2, mamba_d_ssm=64, **fields).recurrence
        assert recurrence.has_norm_first is is_first


def test_a_null_multiplier_of_attention_is_refused():
    for fields in ({}, {"attention_multiplier": 0.5}):
        parse("GraniteMoeHybrid", **GRANITE, num_hidden_layers=3, **fields)
    with pytest.raises(ModelError, match="attention_multiplier None is not supported: served are positive numbers"):
        parse("GraniteMoeHybrid", **GRANITE, num_hidden_layers=3, attention_multiplier=None)


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_active", "kv_bytes", "state_mib", "num_rehearsed"),
    [
        ("nemotron-3-nano-30b-a3b", 31_577_940_288, 3_580_076_352, 6144, 47.6, 4),
        ("granite-4-h-small", 32_207_337_984, 8_803_121_664, 16384, 147.5, 3),
        ("lfm2-1.2b", 1_170_340_608, 1_170_340_608, 12288, 0.16, 3),
    ],
)
def test_published_shapes_have_the_stated_sizes(name, num_parameters, num_active, kv_bytes, state_mib, num_rehearsed):
    config = ModelConfig.from_folder(SHAPES / name)
    assert (config.num_parameters, config.num_active_parameters) == (num_parameters, num_active)
    assert config.kv_bytes_per_token(1, torch.bfloat16) == kv_bytes
    assert config.state_bytes / 2**20 == pytest.approx(state_mib, abs=0.05)
    assert config.one_layer_of_each_kind().num_layers == num_rehearsed
    config.check_tensor_parallel(4)


def test_published_shapes_are_understood_without_a_warning(caplog):
    for name in ("nemotron-3-nano-30b-a3b", "granite-4-h-small", "lfm2-1.2b"):
        ModelConfig.from_folder(SHAPES / name)
    assert not caplog.records


def test_layers_of_nemotron_are_spelled_as_letters_or_as_names():
    letters = nemotron("M-*E", n_routed_experts=4)
    for kinds in (["mamba", "mlp", "attention", "moe"], ["linear_attention", "mlp", "full_attention", "moe"]):
        fields = {"num_hidden_layers": 4, "n_routed_experts": 4}
        assert nemotron(None, layers_block_type=kinds, **fields) == letters
    assert [state is not None for state in letters.states] == [True, False, False, False]
    assert [cache is not None for cache in letters.caches] == [False, False, True, False]
    assert [letters.has_dense_mlp(layer) for layer in range(4)] == [False, True, False, False]
    assert (letters.sparse_layers, set(letters.ropes)) == ((False, False, False, True), {None})
    assert letters.one_layer_of_each_kind().num_layers == 4


def test_layers_of_granite_are_spelled_in_two_ways():
    old = parse("GraniteMoeHybrid", **GRANITE | {"num_hidden_layers": 3})
    new = ["linear_attention", "full_attention", "linear_attention"]
    assert parse("GraniteMoeHybrid", **GRANITE | {"num_hidden_layers": 3, "layer_types": new}) == old
    named = {name: value for name, value in GRANITE.items() if name != "layer_types"}
    assert parse("GraniteMoeHybrid", **named, num_hidden_layers=3, layers_block_type=new) == old
    assert [state is None for state in old.states] == [False, True, False]


def test_granite_has_positions_only_if_its_config_says_so():
    sizes = GRANITE | {"num_hidden_layers": 3}
    for kind, has_positions in (("rope", True), ("nope", False), (None, False)):
        config = parse("GraniteMoeHybrid", **sizes, position_embedding_type=kind)
        assert [rope is not None for rope in config.ropes] == [False, has_positions, False]


def test_granite_without_experts_has_the_shared_mlp_alone():
    config = parse("GraniteMoeHybrid", **GRANITE | {"num_hidden_layers": 3}, num_local_experts=0)
    assert (config.experts, config.intermediate_size) == (None, 1024)


@pytest.mark.parametrize("limit", [math.inf, {"__float__": "Infinity"}])
def test_infinity_may_be_bare_or_an_object(limit, tmp_path):
    fields = {"architectures": ["BambaForCausalLM"], **TINY, **MAMBA, "num_hidden_layers": 3}
    fields |= {"attn_layer_indices": [1], "time_step_limit": [0.5, limit]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    recurrence = ModelConfig.from_folder(tmp_path).recurrence
    assert isinstance(recurrence, Mamba2Config)
    assert recurrence.time_step_limits == (0.5, math.inf)


def test_the_older_names_of_nemotron_win_as_in_transformers():
    old = nemotron(mamba_n_groups=4, mamba_d_conv=3, mamba_conv_bias=False, mamba_dt_limit=[0.0, math.inf])
    new = nemotron(n_groups=4, conv_kernel=3, use_conv_bias=False, time_step_limit=[0.0, math.inf])
    assert old.recurrence == new.recurrence


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "mtp_hybrid_override_pattern"])
def test_layers_that_guess_tokens_change_nothing(field, caplog):
    value = 1 if field.startswith("num") else "*E"
    assert nemotron(**{field: value}) == nemotron()
    assert not caplog.records


def test_attention_of_lfm2_is_listed_in_two_ways_and_its_width_is_adjusted():
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "block_multiple_of": 8}
    old = parse("Lfm2", **sizes, full_attn_idxs=[1, 3])
    assert parse("Lfm2", **sizes, layer_types=["conv", "full_attention"] * 2) == old
    assert parse("Lfm2", **sizes, full_attn_idxs=[1, 3], block_ff_dim=96).intermediate_size == 64
    whole = parse("Lfm2", **sizes, full_attn_idxs=[1, 3], block_auto_adjust_ff_dim=False)
    assert (old.intermediate_size, whole.intermediate_size) == (32, TINY["intermediate_size"])
    assert not parse("Lfm2", **sizes, full_attn_idxs=[1], tie_embedding=False).tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Lfm2", KV_HEADS | {"conv_L_cache": 1}, "conv_L_cache must be at least 2, found 1"),
        ("Lfm2", KV_HEADS | {"conv_L_cache": 65}, "conv_L_cache 65 is larger than 64"),
        ("Lfm2", KV_HEADS | {"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier times .* is no width"),
        (
            "Lfm2",
            KV_HEADS | {"layer_types": ["conv", "mamba", "conv"]},
            "layer_types must be a list of 'conv' and 'full_att",
        ),
        ("Lfm2", KV_HEADS | {"full_attn_idxs": [3]}, "full_attn_idxs must be indices of the 3 layers, found"),
        ("Lfm2", KV_HEADS | {"full_attn_idxs": []}, "none of its 3 layers has attention"),
        (
            "Lfm2",
            KV_HEADS | {"full_attn_idxs": [0], "intermediate_size": 1},
            "intermediate_size 1 gives an MLP of width 0",
        ),
        ("Lfm2", KV_HEADS | {"full_attn_idxs": [0], "block_use_swiglu": False}, "block_use_swiglu is not supported"),
        ("Bamba", MAMBA | {"attn_layer_indices": [-1]}, "attn_layer_indices must be indices of the 3 layers"),
        ("Bamba", MAMBA | {"attn_layer_indices": None}, "none of its 3 layers has attention"),
        (
            "Bamba",
            MAMBA | {"attn_layer_indices": [0], "partial_rotary_factor": 1.0},
            "partial_rotary_factor is not supported: served is 0.5",
        ),
        ("Bamba", MAMBA | {"mamba_d_head": 9}, "mamba_n_heads 8 of mamba_d_head 9 are not the 64 channels"),
        ("Bamba", MAMBA | {"mamba_n_groups": 3}, "mamba_n_groups 3 does not divide the 8 heads"),
        ("Bamba", MAMBA | {"mamba_d_conv": 1}, "mamba_d_conv must be at least 2, found 1"),
        ("Bamba", MAMBA | {"mamba_d_state": 257}, "mamba_d_state 257 is larger than 256"),
        (
            "NemotronH",
            NEMOTRON | {"hybrid_override_pattern": "ME*", "ssm_state_size": 512},
            "ssm_state_size 512 is larger than 256",
        ),
        ("Bamba", MAMBA | {"mamba_d_state": 0}, "mamba_d_state must be a positive integer, found 0"),
        ("Bamba", MAMBA | {"time_step_limit": [1]}, "time_step_limit must be a list of two numbers"),
        ("Bamba", MAMBA | {"time_step_limit": [1, 0]}, "time_step_limit must be two numbers from 0, the larger"),
        ("Bamba", MAMBA | {"time_step_limit": ["a", 0]}, "time_step_limit must be two numbers from 0"),
        ("GraniteMoeHybrid", GRANITE | {"layer_types": ["mamba"]}, "layer_types has 1 entries for 3 layers"),
        ("GraniteMoeHybrid", GRANITE | {"layer_types": ["moe"] * 3}, "layer_types 'moe' is not supported: served are"),
        ("GraniteMoeHybrid", GRANITE | {"layer_types": [["mamba"]] * 3}, "is not supported: served are"),
        ("GraniteMoeHybrid", GRANITE | {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not"),
        ("FalconH1", MAMBA | {"mamba_d_ssm": 60}, "are not the 60 channels of"),
        ("FalconH1", MAMBA | {"mamba_d_ssm": 64, "ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5"),
        ("FalconH1", MAMBA | {"mamba_d_ssm": 64, "mlp_multipliers": [1, 0]}, "mlp_multipliers must be a positive"),
        ("FalconH1", MAMBA | {"mamba_d_ssm": 64, "key_multiplier": "x"}, "key_multiplier must be a positive number"),
        ("FalconH1", MAMBA | {"mamba_d_ssm": 64, "mamba_use_mlp": False}, "mamba_use_mlp is not supported"),
        (
            "NemotronH",
            NEMOTRON | {"hybrid_override_pattern": "ME*", "time_step_limit": [0.1, 1]},
            r"time_step_limit is not supported: served is \[0, Inf",
        ),
        (
            "NemotronH",
            NEMOTRON | {"hybrid_override_pattern": "ME*", "time_step_min": 0.5},
            "time_step_min 0.5 is not supported: served is at most 0.001",
        ),
        ("NemotronH", NEMOTRON, "layer_types must be a list with the kind of each layer, found None"),
        ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "MX*"}, "must be letters of M[*]-E, found 'X'"),
        ("NemotronH", NEMOTRON | {"hybrid_override_pattern": 3}, "must be letters of M[*]-E, found 3"),
        ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "M*"}, "has 2 layers, but num_hidden_layers is 3"),
        ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "M-M"}, "none of its 3 layers has attention"),
        (
            "NemotronH",
            NEMOTRON | {"layers_block_type": ["mamba", "window", "attention"]},
            "layers_block_type 'window' is not supported",
        ),
        (
            "Lfm2",
            KV_HEADS | {"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [0]},
            r"full_attn_idxs \[0\] are not the layers \[1\] that layer_types has",
        ),
        (
            "NemotronH",
            NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp"], "hybrid_override_pattern": "M-*"},
            "layers_block_type and hybrid_override_pattern name other kinds of layers: remove one",
        ),
        (
            "GraniteMoeHybrid",
            GRANITE | {"layers_block_type": ["attention", "mamba", "mamba"]},
            "layers_block_type and layer_types name other kinds of layers: remove one",
        ),
        ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "ME*", "n_shared_experts": 2}, "n_shared_experts is not"),
        ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "ME*", "mlp_hidden_act": "silu"}, "'silu' is not supp"),
        ("NemotronH", NEMOTRON | {"hybrid_override_pattern": "ME*", "n_group": 3}, "n_group 3 does not cut 8 experts"),
    ],
)
def test_what_a_hybrid_cannot_be_is_refused_by_name(architecture, fields, message):
    with pytest.raises(ModelError, match=message):
        parse(architecture, **{"num_hidden_layers": 3} | fields)


@pytest.mark.parametrize(
    ("fields", "tp_size", "message"),
    [
        ({}, 2, None),
        ({}, 4, None),  # two ranks for each group
        ({"mamba_num_heads": 6, "n_groups": 1}, 4, "heads of Mamba-2 6 does not split over 4 ranks"),
        ({"mamba_num_heads": 12, "n_groups": 3}, 4, "3 groups of Mamba-2 neither split over 4 ranks nor divide them"),
    ],
)
def test_heads_and_groups_of_mamba_split_over_ranks(fields, tp_size, message):
    config = parse("NemotronH", **NEMOTRON | {"hybrid_override_pattern": "M-*"} | fields)
    if message is None:
        config.check_tensor_parallel(tp_size)
        return
    with pytest.raises(ModelError, match=message):
        config.check_tensor_parallel(tp_size)
