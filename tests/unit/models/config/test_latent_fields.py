"""Models with latent attention: published configs, what is refused, and what each layer and rank keeps."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.elementwise.reference import FP8
from models.build import build
from models.config.layer_cache import LayerCache
from models.config.model_config import ModelConfig
from models.config.size import quantized_experts, quantized_matrices
from models.errors import ModelError
from models.layers.rotary import latent_score_factor
from models.parallel import TensorParallel
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2_LITE = SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 60,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
GLM_FLASH = SIZES | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


@pytest.mark.parametrize(
    ("raw", "num_parameters", "active_billions", "bytes_per_token", "num_dense"),
    [
        (V2_LITE, 15_706_484_224, 2.7, 31_104, 1),
        (V2, 235_741_434_880, 21.4, 69_120, 1),
        (V3, 671_026_419_200, 37.6, 70_272, 3),
        (GLM_FLASH, 29_943_393_920, 3.9, 54_144, 1),
    ],
    ids=["V2-Lite", "V2", "V3", "GLM-4.7-Flash"],
)
def test_published_models_have_their_size_and_keep_one_latent_a_layer(
    raw, num_parameters, active_billions, bytes_per_token, num_dense, caplog
):
    config = ModelConfig.from_json(raw)
    assert not caplog.records
    assert config.num_parameters == num_parameters
    assert config.num_active_parameters / 1e9 == pytest.approx(active_billions, abs=0.06)
    assert set(config.caches) == {LayerCache(1, 576, 512, values_in_keys=True)}
    for tp_size in (1, 4):
        assert config.kv_bytes_per_token(tp_size, torch.bfloat16) == bytes_per_token
        config.check_tensor_parallel(tp_size)
        spec = config.attention_spec(tp_size, torch.bfloat16, CPU)
        heads = raw["num_attention_heads"] // tp_size
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.values_dim) == (heads, 1, 576, 512)
        assert spec.has_latents
    assert config.sparse_layers.count(False) == num_dense
    assert config.sparse_layers[num_dense]
    assert config.num_draft_layers == raw.get("num_nextn_predict_layers", 0)


@pytest.mark.parametrize(("rank_scale", "factor"), [(0.0, 1.0), (0.707, 1.5896), (1.0, 1.8738)])
def test_yarn_raises_the_scale_of_scores(rank_scale, factor):
    config = ModelConfig.from_json(V3 | {"rope_scaling": YARN | {"mscale_all_dim": rank_scale}})
    assert config.multipliers.attention == pytest.approx(192**-0.5)
    assert latent_score_factor(config.ropes[0]) == pytest.approx(factor, abs=1e-3)


@pytest.mark.parametrize(
    ("raw", "fields", "message"),
    [
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, found 0"),
        (V3, {"q_lora_rank": "1536"}, "q_lora_rank must be a positive integer, found '1536'"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd, but RoPE rotates pairs"),
        (V3, {"rope_interleave": 1}, "rope_interleave must be true or false, found 1"),
        (V3, {"v_head_dim": None}, "v_head_dim is missing"),
        (V3, {"n_group": 7}, "n_group 7 does not cut 256 experts into groups of 2 or more"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is not supported: served is 'sigmoid'"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is not supported: served is 1"),
        (V3, {"index_topk": 2048, "model_type": "deepseek_v32"}, "model_type 'deepseek_v32' is not supported"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported: served are 'greedy' and"),
        (V2, {"topk_group": 9}, "topk_group 9 of n_group 8 leaves"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob is not supported: served is False or None, found True"),
        (V2, {"rope_interleave": False}, "rope_interleave is not supported: served is True"),
        (GLM_FLASH, {"first_k_dense_replace": 2}, "first_k_dense_replace is not supported: served is 1"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 'dense' and 'sparse' for 47"),
        (V3, {"quantization_config": {"quant_method": "mxfp4"}}, "its experts are quantized"),
    ],
)
def test_what_is_not_served_is_refused_by_name(raw, fields, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_json(raw | fields)


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ModelError, match="num_heads 20 does not split over 8 ranks"):
        ModelConfig.from_json(GLM_FLASH).check_tensor_parallel(8)


def test_layers_that_guess_tokens_are_not_read(tmp_path):
    """transformers writes none, so a tensor of one is added."""
    save_checkpoint(tmp_path, make_config("deepseek_v3"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(tensors, path, metadata={"format": "pt"})
    load(tmp_path)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj"):
        load(tmp_path)


def test_a_quantised_matrix_of_latents_is_expanded(tmp_path):
    """It then takes the bytes of the model's dtype, and the logits are near those of the whole model."""
    save_checkpoint(tmp_path, make_config("deepseek_v2"))
    config = ModelConfig.from_folder(tmp_path).quantized("fp8")
    weights = Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32)
    model = build(config, weights, TensorParallel())
    attention = model.layers[0].self_attn
    assert (attention.to_keys.dtype, attention.to_keys.shape) == (torch.float32, (4, 10, 12))
    exact = load(tmp_path).layers[0].self_attn.to_keys
    error = (attention.to_keys - exact).norm() / exact.norm()
    assert 0 < error < 0.05
    prompt = [3, 90, 17, 4, 55, 8]
    runner = PagedRunner(model, config)
    logits, expected = runner.step([(runner.add_row(), prompt)])[0], reference_logits(tmp_path, prompt)
    assert ((logits - expected).norm() / expected.norm()) < 0.2
    matrices = [matrix for matrix, _ in quantized_matrices(config)]
    matrices += [matrix for matrix, _, count in quantized_experts(config) for _ in range(count)]
    expanded = sum(matrix.out_features * matrix.in_features for matrix in matrices if matrix.is_expanded)
    assert expanded == 3 * 4 * (10 + 6) * 12
    others = sum(matrix.out_features * matrix.in_features for matrix in matrices if not matrix.is_expanded)
    num_scales = sum(matrix.out_features for matrix in matrices if not matrix.is_expanded)
    saved = ModelConfig.from_folder(tmp_path).weight_bytes(torch.bfloat16) - config.weight_bytes(torch.bfloat16)
    assert saved == others - 4 * num_scales


@pytest.mark.parametrize("v_scale", [None, 9.0])
def test_an_fp8_pool_has_one_scale_for_keys_and_the_values_in_them(v_scale, tmp_path):
    save_checkpoint(tmp_path, make_config("deepseek_v3_halves"))
    path = tmp_path / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(0.02) for layer in range(3)}
    if v_scale is not None:
        scales |= {f"model.layers.{layer}.self_attn.v_scale": torch.tensor(v_scale) for layer in range(3)}
    save_file(load_file(path) | scales, path, metadata={"format": "pt"})
    prompt = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = []
    for dtype in (torch.float32, FP8):
        runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path), dtype=dtype)
        row = runner.add_row()
        logits.append(torch.cat([runner.step([(row, part)])[0] for part in (prompt[:9], prompt[9:10], prompt[10:])]))
    exact, stored = logits
    assert 0 < (stored - exact).norm() / exact.norm() < 0.15
