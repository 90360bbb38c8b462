"""What single families read of their config.json: patterns of layers, names of fields, rotary positions."""

import json

import pytest
import torch
import transformers

from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.registry import is_served
from tests.support.checkpoints import TINY
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"


def parse(architecture, **fields):
    return ModelConfig.from_json(
        {"architectures": [f"{architecture}ForCausalLM"], **TINY, "num_key_value_heads": 2, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [1, 1, 1, 0, 1, 1]),
        ({"sliding_window_pattern": 2}, [1, 0, 1, 0, 1, 0]),
        ({"sliding_window_pattern": "LLG"}, [1, 1, 0, 1, 1, 0]),
        ({"sliding_window_pattern": "LLLG"}, [1, 1, 1, 0, 1, 0]),  # the last layer is full
        ({"sliding_window_pattern": "LLLG", "layer_types": [FULL] * 5 + [SLIDING]}, [0, 0, 0, 0, 0, 1]),
    ],
)
def test_exaone_rotates_where_it_has_a_window(fields, windows):
    sizes = {"num_hidden_layers": 6, "sliding_window": 8}
    config = parse("Exaone4", **sizes, **fields)
    assert config.sliding_windows == tuple(8 if slides else None for slides in windows)
    assert [rope is not None for rope in config.ropes] == [bool(slides) for slides in windows]
    if "layer_types" in fields:
        return
    config = parse("Exaone4", **sizes | {"sliding_window": None}, **fields)
    assert config.sliding_windows == (None,) * 6
    assert None not in config.ropes


def test_command_a_rotates_in_sliding_layers_even_if_its_window_is_the_whole_context():
    config = parse("Cohere2", num_hidden_layers=4, sliding_window=4096)
    assert config.sliding_windows == (None,) * 4
    assert [rope is not None for rope in config.ropes] == [True, True, True, False]


def test_published_fields_of_command_a_are_understood_and_other_values_refused(caplog):
    fields = {
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
        "sliding_window_pattern": 4,
    }
    assert parse("Cohere2", **fields) == parse("Cohere2")
    assert not caplog.records
    for name, value in {"rotary_pct": 0.5, "use_parallel_block": False, "use_qk_norm": True}.items():
        with pytest.raises(ModelError, match=name):
            parse("Cohere2", **fields | {name: value})


def test_olmo_3_extends_the_context_of_full_attention_alone():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}
    config = parse("Olmo3", num_hidden_layers=4, rope_scaling=yarn, rope_theta=5e5)
    assert [rope.type for rope in config.ropes] == ["default"] * 3 + ["yarn"]
    assert [rope.theta for rope in config.ropes] == [5e5] * 4
    assert config.max_context_len == 128
    both = {FULL: yarn | {"rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 5e5}}
    assert parse("Olmo3", num_hidden_layers=4, rope_parameters=both) == config


def test_alpha_of_hunyuan_changes_the_base_whatever_the_length():
    scaling = {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    config = parse("HunYuanDenseV1", head_dim=128, rope_scaling=scaling, rope_theta=10000.0)
    assert {rope.type for rope in config.ropes} == {"default"}
    assert config.ropes[0].theta == pytest.approx(10000.0 * 1000 ** (128 / 126))
    assert config.max_context_len == TINY["max_position_embeddings"]
    config = parse("HunYuanDenseV1", head_dim=128, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert config.ropes[0].type == "dynamic"


def test_llama_4_attends_within_chunks_in_layers_that_rotate_or_are_listed():
    sizes = {"num_hidden_layers": 8, "max_position_embeddings": 10_485_760, "head_dim": 8, "no_rope_layers": []}
    config = parse("Llama4", **sizes, intermediate_size_mlp=40, attn_temperature_tuning=4)
    assert config.max_context_len == 10_485_760
    assert [cache.chunk for cache in config.caches] == [8192, 8192, 8192, None] * 2
    assert [cache.kind for cache in config.caches[2:4]] == ["window", "full"]
    assert config.attention_spec(1, torch.bfloat16, torch.device("cpu")).has_chunks
    assert [rope is not None for rope in config.ropes] == [True, True, True, False] * 2
    assert (config.intermediate_size, config.experts.intermediate_size) == (40, TINY["intermediate_size"])
    assert config.multipliers.query_growth == 0.1
    config = parse("Llama4", **sizes, attention_chunk_size=100, interleave_moe_layer_step=2, attn_temperature_tuning=0)
    assert [cache.reach for cache in config.caches] == [100, 100, 100, None] * 2
    short = parse("Llama4", **sizes | {"max_position_embeddings": 8192})
    listed = parse("Llama4", **sizes, layer_types=["full_attention", "chunked_attention"] * 4)
    assert {cache.chunk for cache in short.caches} == {None}
    assert [cache.chunk for cache in listed.caches] == [None, 8192] * 4
    assert not short.attention_spec(1, torch.bfloat16, torch.device("cpu")).has_chunks
    assert config.sparse_layers == (False, True) * 4
    assert config.multipliers.query_growth == 0


def test_lists_of_equal_numbers_of_experts_are_one_number():
    fields = {"head_dim": 8, "num_experts": [4, 4, 4], "moe_topk": [2] * 3, "use_qk_norm": True, "cla_share_factor": 2}
    config = parse("HunYuanMoEV1", **fields)
    assert (config.experts.num_experts, config.experts.num_experts_per_tok) == (4, 2)
    assert config.experts.shared_intermediate_size == TINY["intermediate_size"]


UNCUT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Exaone4", {"sliding_window_pattern": "LLX"}, "sliding_window_pattern must be a number or of the letters L"),
        ("Exaone4", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer, found 0"),
        ("Exaone4", {"layer_types": [FULL]}, "layer_types has 1 entries for 3 layers"),
        ("Cohere2", {"layer_types": [FULL, FULL, "chunked"]}, r"layer_types \['chunked'\] are not supported"),
        ("Cohere2", {"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
        ("Cohere2", {"layer_norm_eps": 0}, "layer_norm_eps must be a positive number, found 0"),
        ("Cohere2", {"logit_scale": "x"}, "logit_scale must be a positive number, found 'x'"),
        ("Olmo3", {"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
        ("Olmo3", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta 500000.0 is not supported"),
        ("Olmo3", {"rope_parameters": {FULL: UNCUT_YARN}}, "truncate False is not supported in rope_parameters of"),
        ("Gemma4", {"rope_parameters": {FULL: UNCUT_YARN, SLIDING: {}}}, "truncate False is not supported in rope_p"),
        ("Mistral4", {"head_dim": 6}, "head_dim 6 is not supported: served is 128, the sum of qk_nope_head_dim and"),
        ("Ministral", {"layer_types": "full"}, "layer_types must be a list of names"),
        ("Ernie4_5", {"use_bias": 2}, "use_bias must be true or false, found 2"),
        ("SeedOss", {"attention_out_bias": "yes"}, "attention_out_bias must be true or false"),
        ("Arcee", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported: supported is 'relu2'"),
        ("Glm4", {"partial_rotary_factor": 0.04}, "partial_rotary_factor 0.04 would rotate 5 of 128"),
        ("HunYuanDenseV1", {"rope_scaling": {"type": "dynamic", "alpha": -1}}, "alpha must be a positive number"),
        ("HunYuanDenseV1", {"rope_scaling": {"type": "dynamic", "alpha": 1e300}}, "alpha 1e[+]300 of a dynamic rope"),
        ("Glm4Moe", GLM | {"n_group": 3}, "n_group 3 does not cut 8 experts into groups"),
        ("Glm4Moe", GLM | {"n_group": 8, "topk_group": 4}, "n_group 8 does not cut 8 experts into groups of 2 or more"),
        ("Glm4Moe", GLM | {"n_group": 4, "topk_group": 5}, "topk_group 5 of n_group 4 leaves 8 experts"),
        ("Glm4Moe", GLM | {"n_group": 4, "topk_group": 1}, "topk_group 1 of n_group 4 leaves 2 experts for"),
        ("Glm4Moe", {"n_routed_experts": 2}, "num_experts_per_tok 8 is more than n_routed_experts 2"),
        ("Glm4Moe", GLM | {"scoring_func": "softmax"}, "scoring_func is not supported: served is 'sigmoid' or None"),
        ("Glm4Moe", GLM | {"first_k_dense_replace": "x"}, "first_k_dense_replace must be the index of a layer"),
        ("Ernie4_5_Moe", {"moe_k": 0}, "moe_k must be a positive integer, found 0"),
        ("Ernie4_5_Moe", {"moe_layer_end_index": -2}, "moe_layer_end_index must be the index of a layer, found -2"),
        ("HunYuanMoEV1", {"num_experts": [4, 8, 4]}, "num_experts must be one number, the same in all 3 layers"),
        ("HunYuanMoEV1", {"moe_topk": [1]}, "moe_topk must be one number, the same in all 3 layers"),
        ("HunYuanMoEV1", {"use_cla": True}, "use_cla is not supported"),
        ("Phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok 4 is not supported: this router chooses 2"),
        ("Phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ("Mellum", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must be a list of 'dense' and 'sparse'"),
        ("GraniteMoe", {"shared_intermediate_size": 8}, "shared_intermediate_size is not supported"),
        (
            "Llama4",
            {"layer_types": ["sliding_attention"] * 3},
            r"layer_types \['sliding_attention'\] are not supported",
        ),
        ("Llama4", {"attention_chunk_size": 0}, "attention_chunk_size must be a positive integer, found 0"),
        ("Llama4", {"moe_layers": [3]}, r"moe_layers must be indices of the 3 layers, found \[3\]"),
        ("Llama4", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 0 and 1 for 3 layers"),
        ("Llama4", {"attn_temperature_tuning": "on"}, "attn_temperature_tuning must be true, false or a whole number"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(architecture, fields, message):
    with pytest.raises(ModelError, match=message):
        parse(architecture, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("InternLM3", {"qkv_bias": True, "bias": True, "num_key_value_heads": 2}),
        ("InternLM3", {"head_dim": None, "tie_word_embeddings": True}),
        ("IQuestCoder", {"head_dim": 12, "num_key_value_heads": 2}),
        ("IQuestCoder", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ],
)
def test_models_that_llamas_class_computes_have_its_logits_under_both_names(name, fields, tmp_path):
    """transformers saves them as LlamaForCausalLM; published files have a name of their own, and omit other fields."""
    save_checkpoint(tmp_path, getattr(transformers, f"{name}Config")(**TINY, pad_token_id=None, **fields))
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    for omitted in ("rms_norm_eps", *(("head_dim",) if saved["head_dim"] == 128 else ())):
        del saved[omitted]
    prompt = [3, 90, 17, 4, 55, 8, 8, 61]
    assert is_served(f"{name}ForCausalLM")
    for architecture in ("LlamaForCausalLM", f"{name}ForCausalLM"):
        path.write_text(json.dumps(saved | {"architectures": [architecture]}))
        config = ModelConfig.from_folder(tmp_path)
        assert config.rms_norm_eps == 1e-5
        runner = PagedRunner(load(tmp_path), config)
        logits = runner.step([(runner.add_row(), prompt)])[0]
        torch.testing.assert_close(logits, reference_logits(tmp_path, prompt), atol=1e-4, rtol=0)


def test_names_of_biases_in_published_files_of_internlm3():
    config = parse("InternLM3", model_type="internlm3", qkv_bias=True, bias=False, head_dim=8)
    assert (config.has_qkv_bias, config.has_mlp_bias, config.num_kv_heads) == (True, False, 2)
    with pytest.raises(ModelError, match="clip_qkv is not supported: served is None, found 6"):
        parse("IQuestCoder", model_type="iquestcoder", clip_qkv=6)
    with pytest.raises(ModelError, match="model_type 'llama' is not supported for this architecture"):
        parse("InternLM3", model_type="llama")
