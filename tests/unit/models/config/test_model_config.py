"""config.json is understood in its old and new spellings; what is not understood is refused by name."""

import json

import pytest
import torch

from kernels.attention.base import AttentionSpec
from models.config.model_config import ModelConfig, ModelError
from models.config.rope import RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def parse(**changes):
    return ModelConfig.from_json({**LLAMA, **changes})


def qwen(**changes):
    return parse(architectures=["Qwen3ForCausalLM"], num_hidden_layers=4, sliding_window=100, **changes)


def test_llama_8b_is_read_as_published():
    config = parse(rope_scaling=LLAMA3_SCALING)
    assert config.num_parameters == 8_030_261_248
    assert (config.head_dim, config.num_kv_heads, config.dtype) == (128, 8, "bfloat16")
    assert config.eos_token_ids == (128001, 128009)
    assert config.bos_token_id == 128000
    assert config.sliding_windows == (None,) * 32
    assert config.ropes[0].type == "llama3"
    assert config.ropes[0].theta == 500000.0
    assert config.ropes[0].original_max_position_embeddings == 8192
    assert config.max_context_len == 131072


def test_new_spelling_means_the_same_as_the_old():
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "torch_dtype")}
    new |= {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert ModelConfig.from_json(new) == parse(rope_scaling=LLAMA3_SCALING)


def test_old_key_type_is_rope_type():
    config = parse(rope_scaling={"type": "linear", "factor": 4})
    expected = RopeConfig(theta=500000.0, type="linear", factor=4.0, original_max_position_embeddings=131072)
    assert set(config.ropes) == {expected}
    assert config.max_context_len == 4 * 131072


def test_yarn_stretches_the_context_it_was_trained_for():
    config = parse(
        max_position_embeddings=32768,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert config.max_context_len == 131072


def test_defaults_are_those_of_transformers():
    bare = {key: LLAMA[key] for key in list(LLAMA)[:6]} | {"max_position_embeddings": 64}
    config = ModelConfig.from_json(bare)
    assert (config.num_kv_heads, config.rms_norm_eps, config.dtype) == (32, 1e-6, "float32")
    assert config.ropes[0] == RopeConfig(theta=10000.0)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "qkv_bias", "output_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, True, False),
        ("LlamaForCausalLM", False, False, False, False),
        ("MistralForCausalLM", True, False, False, False),
        ("Qwen2ForCausalLM", False, True, False, False),
        ("Qwen3ForCausalLM", True, True, True, True),
    ],
)
def test_biases_follow_the_architecture(architecture, attention_bias, qkv_bias, output_bias, qk_norm):
    config = parse(architectures=[architecture], attention_bias=attention_bias)
    assert (config.has_qkv_bias, config.has_output_bias, config.qk_norm == "head") == (qkv_bias, output_bias, qk_norm)


def test_sliding_windows_per_layer():
    mistral = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 4}
    assert parse(**mistral, sliding_window=100).sliding_windows == (100,) * 4
    assert parse(**mistral, sliding_window=None).sliding_windows == (None,) * 4
    assert qwen().sliding_windows == (None,) * 4
    assert qwen(use_sliding_window=True, max_window_layers=3).sliding_windows == (None, None, None, 100)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert qwen(use_sliding_window=True, layer_types=kinds).sliding_windows == (100, None, 100, None)
    assert parse(sliding_window=100).sliding_windows == (None,) * 32  # Llama knows no window


def test_attention_spec_and_kv_bytes_are_per_rank():
    config, device = parse(), torch.device("cpu")
    assert config.kv_bytes_per_token(1, torch.bfloat16) == 2 * 32 * 8 * 128 * 2
    assert config.kv_bytes_per_token(4, torch.bfloat16) == 2 * 32 * 2 * 128 * 2
    assert config.kv_bytes_per_token(16, torch.bfloat16) == 2 * 32 * 1 * 128 * 2
    expected = AttentionSpec(16, 4, 128, torch.bfloat16, device, block_size=16, value_head_dim=128)
    assert config.attention_spec(2, torch.bfloat16, device, 16) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; quire models lists"),
        ({"architectures": None}, "architectures must be a list of one name, found None"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"vocab_size": "big"}, "vocab_size must be a positive integer, found 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
        ({"num_attention_heads": 24}, "hidden_size 4096 is not divisible by num_attention_heads 24, and head_dim"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not divisible by num_key_value_heads 5"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"rope_scaling": {"type": "xpos", "factor": 2}}, "rope type 'xpos' is not supported: supported are"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a non-negative number, found '2'"),
        ({"rope_scaling": 4}, "rope_scaling must be an object, found 4"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, r"per layer type \(full_attention\)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, found 'no'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quant_method 'hqq' is not supported: supported are fp8"),
        ({"quantization_config": 8}, "quantization_config must be an object, found 8"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported"),
        (
            {"rope_scaling": {"type": "linear", "factor": float("inf")}},
            "factor must be a non-negative number, found inf",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor 0.0 times 131072 positions is not from 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e30}}, "rope factor 1e[+]30 times 131072"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1e308}},
            "beta_fast 1e[+]308 is not from 1/2147483647",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 5e-324}},
            "beta_slow 5e-324 is not from 1/2147483647",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, found nan"),
        ({"vocab_size": 2**31}, "vocab_size 2147483648 is larger than 2147483647"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, found 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, found '</s>'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        parse(**changes)


def test_layer_types_that_fit_no_layer_are_refused():
    with pytest.raises(ModelError, match="layer_types has 1 entries for 4 layers"):
        qwen(use_sliding_window=True, layer_types=["full_attention"])
    with pytest.raises(ModelError, match="chunked"):
        qwen(use_sliding_window=True, layer_types=["chunked_attention"] * 4)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size", "message"),
    [
        (32, 8, 3, "num_heads 32 does not split over 3 ranks"),
        (24, 6, 4, "num_kv_heads 6 neither splits over 4 ranks nor divides them"),
        (32, 8, 64, "num_heads 32 does not split over 64 ranks"),
    ],
)
def test_splits_that_leave_heads_over_are_refused(num_heads, num_kv_heads, tp_size, message):
    config = parse(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=128)
    with pytest.raises(ModelError, match=message):
        config.check_tensor_parallel(tp_size)


def test_folder_errors_name_the_folder(tmp_path):
    with pytest.raises(ModelError, match=rf"{tmp_path}: no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(ModelError, match=rf"{tmp_path}/config\.json: malformed JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="expected a JSON object, found list"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path).num_layers == 32


@pytest.mark.parametrize("wrong", [{"layer_types": 5}, {"layer_types": [1, None, {}, 2]}, {"max_window_layers": "x"}])
def test_window_fields_of_a_wrong_type_are_named(wrong):
    with pytest.raises(ModelError, match=next(iter(wrong))):
        qwen(use_sliding_window=True, **wrong)
