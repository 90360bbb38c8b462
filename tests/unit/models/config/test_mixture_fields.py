"""MiniMax-M2, dots.llm1, K-EXAONE, Command A+ and Mistral 4: published configs, and what is refused by name."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config.model_config import ModelConfig
from models.config.size import quantized_experts, quantized_matrices
from models.errors import ModelError
from models.registry import find_architecture, is_served
from tests.support.checkpoints import TINY, make_config
from tests.support.models_harness import PagedRunner, load
from tests.support.packed_experts import save_fp8_blocks
from tests.support.reference import reference_logits, save_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
PROMPT = [3, 90, 17, 4, 55, 8, 8, 61]
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
# Its first files have other names: is_moe_layer, first_last_k_dense_replace
EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"],
    "first_last_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "is_moe_layer": [False] + [True] * 47,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 12,
    "max_position_embeddings": 262144,
    "model_type": "exaone_moe",
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "topk_group": 1,
    "vocab_size": 153600,
}


def parse(architecture, **fields):
    return ModelConfig.from_json(
        {"architectures": [f"{architecture}ForCausalLM"], **TINY, "num_key_value_heads": 2, **fields}
    )


def test_minimax_m2_is_read_as_published(caplog):
    config = ModelConfig.from_json(MINIMAX)
    assert not caplog.records
    assert config.num_parameters == pytest.approx(229e9, rel=2e-3)
    assert config.num_active_parameters == pytest.approx(11e9, rel=1e-2)
    assert {rope.rotary_dim(128) for rope in config.ropes} == {64}
    assert {rope.theta for rope in config.ropes} == {5e6}
    assert config.num_draft_layers == 3
    assert config.kv_bytes_per_token(1, torch.bfloat16) == 253_952
    quantized = [matrix.name for matrix, _ in quantized_matrices(config)]
    assert sorted({name.rpartition(".")[2] for name in quantized}) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    experts = list(quantized_experts(config))
    assert {count for _, _, count in experts} == {256}
    assert len(experts) == 62 * 3
    assert config.weight_bytes(torch.bfloat16) == pytest.approx(config.num_parameters, rel=0.02)
    config.check_tensor_parallel(4)
    with pytest.raises(ModelError, match=r"8 ranks have 192 inputs each, but .* is split only at multiples of 128"):
        config.check_tensor_parallel(8)


def test_first_files_of_k_exaone_are_read_as_later_ones(caplog):
    config = ModelConfig.from_json(EXAONE)
    assert not caplog.records
    assert config.num_parameters == pytest.approx(236.6e9, rel=2e-3)
    later = {
        name: value for name, value in EXAONE.items() if name not in ("is_moe_layer", "first_last_k_dense_replace")
    }
    later |= {"architectures": ["ExaoneMoeForCausalLM"], "mlp_layer_types": ["dense"] + ["sparse"] * 47}
    assert ModelConfig.from_json(later) == config
    assert config.architecture == "ExaoneMoeForCausalLM"
    assert is_served("ExaoneMoEForCausalLM")
    assert find_architecture("ExaoneMoEForCausalLM") == find_architecture("ExaoneMoeForCausalLM")
    assert [rope is not None for rope in config.ropes] == [True, True, True, False] * 12


@pytest.mark.parametrize(
    ("fields", "windows", "rotates", "sparse"),
    [
        # North Mini Code: dense layers have full attention with rotary positions
        ({"first_k_dense_replace": 1}, [0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1]),
        (
            {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2},
            [1, 0, 1, 1, 0, 1],
            [1, 0, 1, 1, 0, 1],
            [0, 0, 1, 1, 1, 1],
        ),
        ({"layer_types": [FULL] * 5 + [SLIDING]}, [0] * 5 + [1], [0] * 5 + [1], [1] * 6),
        (
            {"mlp_layer_types": ["sparse"] * 5 + ["dense"], "layer_types": [FULL] * 6},
            [0] * 6,
            [0] * 5 + [1],
            [1] * 5 + [0],
        ),
    ],
)
def test_layers_of_command_a_plus(fields, windows, rotates, sparse):
    config = parse("Cohere2Moe", num_hidden_layers=6, sliding_window=8, sliding_window_pattern=3, **fields)
    assert config.sliding_windows == tuple(8 if slides else None for slides in windows)
    assert [rope is not None for rope in config.ropes] == list(map(bool, rotates))
    assert list(config.sparse_layers) == list(map(bool, sparse))


def test_widths_and_norm_of_command_a_plus():
    config = parse("Cohere2Moe", prefix_dense_intermediate_size=40, num_shared_experts=3)
    assert (config.intermediate_size, config.experts.intermediate_size) == (40, TINY["intermediate_size"])
    assert config.experts.shared_intermediate_size == 3 * TINY["intermediate_size"]
    assert (config.norm, config.rms_norm_eps) == ("layer", 1e-5)
    config = parse("Cohere2Moe", rms_norm_eps=1e-6)
    assert (config.norm, config.rms_norm_eps) == ("llama", 1e-6)
    assert config.intermediate_size == TINY["intermediate_size"]


MISTRAL4 = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_the_rotated_share_of_mistral_4_is_its_size():
    for partial in ({}, {"partial_rotary_factor": 0.25}):
        config = parse("Mistral4", **MISTRAL4, rope_parameters=YARN | partial | {"llama_4_scaling_beta": 0.2})
        assert config.ropes[0].rotary_dim(8) == 8
        assert (config.multipliers.query_growth, config.multipliers.query_growth_length) == (0.2, 16)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("MiniMaxM2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list must be a list of 1 .* found \[1, 0, 1\]"),
        ("MiniMaxM2", {"attn_type_list": [1]}, r"attn_type_list must be .* for 3 layers, found \[1\]"),
        ("MiniMaxM2", {"rotary_dim": 130}, "partial_rotary_factor 1.015625 would rotate 130 of 128"),
        ("MiniMaxM2", {"rotary_dim": 0}, "rotary_dim must be a positive integer, found 0"),
        ("MiniMaxM2", {"use_qk_norm": False}, "use_qk_norm is not supported: served is True or None, found False"),
        ("MiniMaxM2", {"qk_norm_type": "per_head"}, "qk_norm_type is not supported: served is 'per_layer'"),
        ("MiniMaxM2", {"use_routing_bias": False}, "use_routing_bias is not supported"),
        ("MiniMaxM2", {"shared_intermediate_size": 8}, "shared_intermediate_size is not supported: served is 0"),
        ("MiniMaxM2", {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta is not supported: served is 1"),
        ("MiniMaxM2", {"num_local_experts": 4}, "num_experts_per_tok 8 is more than num_local_experts 4"),
        ("Dots1", {}, "n_routed_experts is missing"),
        ("Dots1", {"n_routed_experts": 8}, "num_experts_per_tok is missing"),
        ("Dots1", {"sliding_window": None, "layer_types": [SLIDING] * 3}, "layer_types is not supported: served is"),
        ("ExaoneMoe", {"is_moe_layer": [1, 2, 3]}, "is_moe_layer must be a list of true and false for 3 layers"),
        ("ExaoneMoe", {"mlp_layer_types": ["dense", "moe", "dense"]}, "mlp_layer_types must be a list of 'dense' and"),
        ("ExaoneMoe", {"n_group": 3}, "n_group 3 does not cut 64 experts into groups"),
        ("ExaoneMoe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a positive integer, found -1"),
        ("Cohere2Moe", {"expert_selection_fn": "top"}, "expert_selection_fn 'top' is not supported: served are"),
        ("Cohere2Moe", {"shared_expert_combination_strategy": 1}, "shared_expert_combination_strategy 1 is not"),
        ("Cohere2Moe", {"prefix_dense_sliding_window_pattern": 0}, "prefix_dense_sliding_window_pattern must be a"),
        ("Cohere2Moe", {"use_parallel_block": False}, "use_parallel_block is not supported"),
        ("Cohere2Moe", {"rope_scaling": {"type": "linear", "factor": 2.5}}, "rope_scaling is not supported: served is"),
        ("Cohere2Moe", {"num_shared_experts": -1}, "num_shared_experts must be a positive integer, found -1"),
        ("Mistral4", {"n_group": 128}, "n_group 128 does not cut 128 experts into groups of 2 or more"),
        ("Mistral4", {"q_lora_rank": 0}, "q_lora_rank must be a positive integer, found 0"),
        (
            "Mistral4",
            MISTRAL4 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 would rotate 16 of 32 dimensions, but qk_rope_head_dim is 8",
        ),
        (
            "Mistral4",
            {"quantization_config": MINIMAX["quantization_config"]},
            "its experts are quantized .* of this family's experts: use the bf16 checkpoint",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(architecture, fields, message):
    with pytest.raises(ModelError, match=message):
        parse(architecture, **fields)


@pytest.mark.slow
def test_whole_fp8_checkpoints_of_minimax_m2_have_the_logits_of_what_they_mean(tmp_path):
    """Attention and experts in blocks, as published; its router and its norms are not."""
    save_fp8_blocks(tmp_path / "dense", tmp_path / "packed", kind="minimax_m2")
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    names = {name.split(".", 3)[3] for name in tensors if name.endswith("_scale_inv")}
    assert {name.rpartition(".experts.")[0] for name in names} == {"block_sparse_moe"}
    config_path = tmp_path / "packed" / "config.json"
    raw = json.loads(config_path.read_text())
    ignored = [*MINIMAX["quantization_config"]["modules_to_not_convert"], "self_attn", "model.layers.0"]
    raw["quantization_config"]["modules_to_not_convert"] = ignored
    config_path.write_text(json.dumps(raw))
    runner = PagedRunner(load(tmp_path / "packed"), ModelConfig.from_folder(tmp_path / "packed"))
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    torch.testing.assert_close(logits, reference_logits(tmp_path / "dense", PROMPT), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        ("minimax_m2", {"num_mtp_modules": 2, "use_mtp": True}, "model.layers.4.self_attn.q_proj"),
        ("minimax_m2", {"num_mtp_modules": 1}, "model.layers.3.block_sparse_moe.gate"),
        ("exaone_moe", {"num_nextn_predict_layers": 1}, "mtp.layers.0.mlp.gate"),
    ],
)
def test_layers_that_guess_tokens_are_not_read(kind, fields, name, tmp_path, caplog):
    save_checkpoint(tmp_path, make_config(kind))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {f"{name}.weight": torch.ones(2)}, weights)
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert "guesses of further tokens are not read: tensors=1" in caplog.text
    save_file(tensors | {"model.layers.5.mlp.gate.weight": torch.ones(2)}, weights)
    with pytest.raises(ModelError, match=r"1 tensors have no place in the model: model\.layers\.5"):
        load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("deepseek_v3", {"n_shared_experts": 0}),
        ("glm4_moe", {"n_shared_experts": 0}),
        ("granite_hybrid", {"shared_intermediate_size": 0}),
        ("ernie4_5_moe", {"use_bias": True}),
    ],
)
def test_shared_experts_may_have_no_width_or_biases(kind, fields, tmp_path):
    """transformers saves shared experts without width as tensors without values."""
    config = make_config(kind)
    for name, value in fields.items():
        setattr(config, name, value)
    save_checkpoint(tmp_path, config)
    parsed = ModelConfig.from_folder(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert parsed.num_parameters == sum(tensor.numel() for tensor in stored.values())
    runner = PagedRunner(load(tmp_path), parsed)
    logits = runner.step([(runner.add_row(), PROMPT)])[0]
    torch.testing.assert_close(logits, reference_logits(tmp_path, PROMPT), atol=1e-4, rtol=0)
