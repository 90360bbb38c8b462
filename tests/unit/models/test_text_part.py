"""The text part of a model that also sees: its config, its tensors, its logits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from models.config.model_config import ModelConfig
from models.errors import ModelError
from tests.support.checkpoints import MINISTRAL3_ROPE, TINY
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import delta_rule_token_by_token
from tests.support.vision_checkpoints import (
    QWEN_VISION,
    VISION,
    VISION_MODELS,
    fill,
    make_qwen2_5_vl,
    make_qwen3_vl_mixture,
)

PROMPT = [3, 80, 17, 4, 55, 8, 8, 61, 2, 0, 42, 7, 7]
# Of google/gemma-3-4b-it: all else is left to the defaults of transformers' class
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}


def make_gemma(**options):
    text = TINY | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 2}
    tokens = options | {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=VISION, **tokens))


def make_mistral(*, is_tied=False):
    text = TINY | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None}
    vision = VISION | {"model_type": "pixtral", "head_dim": 8}
    options = {"image_token_index": 90, "tie_word_embeddings": is_tied}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, **options))


def make_ministral():
    text = TINY | {"model_type": "ministral3", "num_key_value_heads": 2, "head_dim": 12}
    vision = VISION | {"model_type": "pixtral", "head_dim": 8}
    options = {"image_token_index": 90, "tie_word_embeddings": False}
    text["rope_parameters"] = MINISTRAL3_ROPE
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, **options))


def make_mistral4():
    """With vision of another size; its experts are in one tensor."""
    sizes = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
    text = TINY | sizes | {"model_type": "mistral4", "num_key_value_heads": 4, "n_routed_experts": 8}
    text |= {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "pad_token_id": None}
    text["rope_parameters"] = dict(MINISTRAL3_ROPE)
    vision = VISION | {"model_type": "pixtral", "head_dim": 8}
    options = {"image_token_index": 90, "tie_word_embeddings": False}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, **options))


def make_command_a(*, model_type="cohere2", **experts):
    """Without a factor on the logits: transformers' class of the whole model leaves it out."""
    text = TINY | {"model_type": model_type, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None, **experts}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
    text["logit_scale"] = 1.0
    vision = VISION | {"model_type": "siglip_vision_model"}
    options = {"downsample_factor": 2, "image_token_id": 90}
    return Cohere2VisionForConditionalGeneration(
        Cohere2VisionConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **options)
    )


def make_command_a_plus():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2, "expert_selection_fn": "sigmoid"}
    return make_command_a(model_type="cohere2_moe", **experts)


def make_gemma4():
    """With tensors that a published checkpoint has and no layer uses: keys of layers that read those of another."""
    text = TINY | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6, "num_hidden_layers": 12}
    text |= {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 6, "pad_token_id": 0}
    text |= {"num_kv_shared_layers": 4, "global_head_dim": 16}
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 8}
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision))
    model.model.language_model.layers[11].self_attn.k_norm = torch.nn.RMSNorm(16)
    return model


def make_gemma4_unified():
    text = TINY | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6, "num_hidden_layers": 6}
    text |= {"global_head_dim": 16, "pad_token_id": 0}
    vision = {"mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 16, "patch_size": 4}
    return Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(text_config=text, vision_config=vision))


def make_llama():
    text = TINY | {"num_key_value_heads": 2, "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 4}
    text |= {"interleave_moe_layer_step": 2, "attention_chunk_size": 64, "pad_token_id": None}
    vision = VISION | {"vision_output_dim": 16, "projector_input_dim": 64, "projector_output_dim": 16}
    tokens = {"boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92}
    return Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision, **tokens))


QWEN_TEXT = {
    **TINY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def make_qwen():
    """With a layer that guesses further tokens, as published checkpoints have it."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    text = QWEN_TEXT | {"rope_parameters": rope}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=QWEN_VISION))
    model.mtp = torch.nn.ModuleDict({"fc": torch.nn.Linear(64, 32, bias=False)})
    return model


def make_qwen_mixture():
    text = {name: value for name, value in QWEN_TEXT.items() if name != "intermediate_size"}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text |= {"shared_expert_intermediate_size": 40}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=QWEN_VISION))


def make_gemma_with_a_head():
    return make_gemma(tie_word_embeddings=False)


def make_tied_mistral():
    return make_mistral(is_tied=True)


def make_mistral_that_says_it_is_tied():
    model = make_mistral()
    model.config.tie_word_embeddings = True
    return model


MODELS = [
    make_gemma,
    make_mistral,
    make_ministral,
    make_llama,
    make_gemma_with_a_head,
    make_tied_mistral,
]
MODELS += [make_gemma4, make_qwen, make_qwen_mixture, make_mistral4, make_command_a, make_command_a_plus]
MODELS += [make_gemma4_unified, make_mistral_that_says_it_is_tied]
MODELS += VISION_MODELS


def save(make, folder):
    """Save a model with wide random weights; return its logits."""
    torch.manual_seed(0)
    model = make().eval()
    fill(model)
    model.save_pretrained(folder)
    with torch.inference_mode(), delta_rule_token_by_token(model.config.get_text_config()):
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.fixture(params=MODELS)
def checkpoint(request, tmp_path):
    return tmp_path, save(request.param, tmp_path)


@pytest.mark.table(most=8)
def test_logits_for_text_are_those_of_transformers(checkpoint):
    check_logits(*checkpoint)


def check_logits(folder, expected):
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
    row = runner.add_row()
    logits = runner.step([(row, PROMPT[:8])]) + [runner.step([(row, [token_id])])[0] for token_id in PROMPT[8:]]
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.table(most=8)
def test_its_vision_is_left_unread_but_nothing_else(checkpoint, caplog):
    folder, _ = checkpoint
    load(folder)
    assert "tensors of pictures, sounds and guesses of further tokens are not read" in caplog.text
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors have no place in the model: audio_tower\.weight"):
        load(folder)


def test_gemma_3_4b_is_read_as_published():
    config = ModelConfig.from_json(GEMMA_3_4B)
    assert config.num_parameters == 3_880_263_168  # 4 300 079 472 with its vision
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.sliding_windows[:6] == (1024,) * 5 + (None,)
    assert (config.ropes[5].type, config.ropes[5].factor, config.max_context_len) == ("linear", 8.0, 131072)
    assert config.eos_token_ids == (1, 106)
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("text_config", [None, {}, 3])
def test_a_config_without_its_text_part_is_refused(text_config):
    with pytest.raises(ModelError, match=r"hidden_size is missing|text_config must be an object"):
        ModelConfig.from_json(json.loads(json.dumps(GEMMA_3_4B | {"text_config": text_config})))


def test_experts_of_qwen3_vl_are_read_as_published_which_is_transposed(tmp_path):
    logits = save(make_qwen3_vl_mixture, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    assert len(experts) == 4
    save_file(tensors | experts, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        torch.testing.assert_close(theirs(torch.tensor([PROMPT])).logits[0], logits)
    check_logits(tmp_path, logits)


def test_qwen2_5_vl_is_read_as_published_with_the_fields_of_its_text_beside_those_of_vision(tmp_path, caplog):
    logits = save(make_qwen2_5_vl, tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    text = whole.pop("text_config")
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    del text["layer_types"], whole["dtype"]  # newer than these files
    path.write_text(json.dumps(text | whole | {"sliding_window": 32, "torch_dtype": "float32"}))
    theirs = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        torch.testing.assert_close(theirs(torch.tensor([PROMPT])).logits[0], logits)
    caplog.clear()
    config = ModelConfig.from_folder(tmp_path)
    assert (config.bos_token_id, config.eos_token_ids, config.sliding_windows) == (1, (2,), (None,) * 3)
    assert not [record for record in caplog.records if record.name.startswith("models.")]
    check_logits(tmp_path, logits)
    # as some versions of transformers save it
    both = {**whole, **text, "text_config": text, "model_type": "qwen2_5_vl"}
    assert ModelConfig.from_json(both).ropes == config.ropes


def test_llava_1_5_has_the_sizes_of_its_texts_class():
    text = {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064}
    raw = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    raw |= {"ignore_index": -100, "image_token_index": 32000, "pad_token_id": 32001, "projector_hidden_act": "gelu"}
    raw |= {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "torch_dtype": "float16"}
    config = ModelConfig.from_json(raw)
    assert config.num_parameters == 6_738_939_904
    assert (config.num_layers, config.num_kv_heads, config.max_context_len) == (32, 32, 4096)
