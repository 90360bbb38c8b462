"""Each model family through the whole engine: greedy text equals transformers', and random weights run in bf16."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from engine.core.local_client import generate
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from models.config.model_config import ModelConfig
from tests.support.checkpoints import make_config
from tests.support.reference import attention_of, save_checkpoint

NUM_TOKENS = 100
PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (4, 47)
]
# One checkpoint per family, and what turns positions in a way of its own beyond the original length
ATTENTION_KINDS = (
    "llama3.1",
    "dynamic_rope",
    "yarn_rope",
    "mistral",
    "mistral_nemo",
    "ministral3",
    "qwen2",
    "qwen3",
    "smollm3",
    "smollm3_windows",
    "phi3",
    "phi3_long",
    "granite",
    "olmo2",
    "olmo3",
    "seed_oss",
    "arcee",
    "apertus",
    "ernie4_5",
    "glm4",
    "hunyuan",
    "exaone4",
    "cohere2",
    "ministral",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_linear",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "granite_moe",
    "granite_moe_shared",
    "phimoe",
    "ernie4_5_moe",
    "hunyuan_moe",
    "mellum",
    "glm4_moe",
    "glm4_moe_groups",
    "llama4",
    "llama4_no_norm",
    "gpt_oss",
    "gemma4",
    "gemma4_unified",
    "gemma4_shared",
    "gemma4_experts",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "minimax_m2",
    "dots1",
    "dots1_windows",
    "solar_open",
    "exaone_moe",
    "cohere2_moe",
    "cohere2_moe_prefix",
    "mistral4",
    "mistral4_groups",
)
# tests/unit/engine/test_recurrent_families.py has them in every schedule
RECURRENT = (
    "qwen3_next",
    "qwen3_next_steps",
    "lfm2",
    "lfm2_biases",
    "lfm2_moe",
    "granite_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_h1_norm",
    "nemotron_h",
    "nemotron_3",
    "nemotron_3_latent",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "olmo_hybrid_rope",
    "kimi_linear",
    "kimi_linear_groups",
)
KINDS = (*ATTENTION_KINDS, *RECURRENT)


def config_of(kind: str) -> transformers.PreTrainedConfig:
    config = make_config(kind)
    config.max_position_embeddings = 60 if kind == "dynamic_rope" else 160
    return config


def their_greedy_text(folder: Path, prompt: list[int], *, attention: str) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    input_ids = torch.tensor([prompt])
    output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.table(most=5)
@pytest.mark.slow
def test_greedy_text_equals_transformers(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of(kind))
    # Prompts longer than a step are cut
    settings = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 4, "device": "cpu"}
    offline = OfflineEngine.load(EngineConfig(model=str(tmp_path), **settings))
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)] * len(PROMPTS)
    attention = attention_of(config_of(kind))
    for prompt, generation in zip(PROMPTS, offline.generate(PROMPTS, params), strict=True):
        assert generation.token_ids == their_greedy_text(tmp_path, prompt, attention=attention)
        assert len(set(generation.token_ids)) > 3


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.table(most=2)
@pytest.mark.slow
def test_16_requests_that_share_a_prefix_and_are_preempted_have_the_text_of_each_alone(
    kind: str, tmp_path: Path
) -> None:
    config = config_of(kind)
    save_checkpoint(tmp_path, config)
    model = ModelConfig.from_folder(tmp_path)
    settings = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 16, "max_model_len": 60}
    prompts = [[*PROMPTS[1][:13], 10 + i, 3 * i] for i in range(16)]
    params = [SamplingParams(max_tokens=24, temperature=0.0)]
    alone = OfflineEngine.load(EngineConfig(model=str(tmp_path), device="cpu", max_model_len=60))
    expected = [alone.generate([prompt], params)[0].token_ids for prompt in prompts]
    reaches = [cache.reach for cache in model.caches if cache is not None]
    scarce = 100 if any(reaches) else 200  # tokens; windows hold fewer
    num_preemptions = 0
    for num_tokens in (2000, scarce):
        settings["kv_cache_memory_bytes"] = num_tokens * model.kv_bytes_per_token(1, torch.float32)
        offline = OfflineEngine.load(EngineConfig(model=str(tmp_path), device="cpu", **settings))
        first = offline.generate(prompts[:1], params)[0]
        together = offline.generate(prompts, params * 16)
        assert first.token_ids == expected[0]
        assert [generation.token_ids for generation in together] == expected
        if num_tokens != scarce:  # where nothing that was cached is lent to others
            block = max(group.block_tokens for group in offline.loaded.scheduler_config.cache_groups)
            hits = [generation.num_cached_tokens for generation in together]
            assert hits[1:] == [12 // block * block] * 15
            assert hits[0] >= hits[1]  # its whole prompt was there before
        num_preemptions += offline.engine.scheduler.num_preemptions
    assert num_preemptions > 0


def test_longrope_turns_by_the_short_factors_where_only_short_requests_are_served(tmp_path: Path) -> None:
    config = config_of("phi3_long")
    config.original_max_position_embeddings = config.rope_parameters["original_max_position_embeddings"] = 150
    save_checkpoint(tmp_path, config)
    bytes_per_block = 2 * 3 * 8 * 4 * 4  # k and v, layers, head_dim, float32, tokens
    texts = []
    # The longest request as asked for, and as the pool's size leaves it
    for limit in ({"max_model_len": 150}, {"kv_cache_memory_bytes": 38 * bytes_per_block}, {"max_model_len": 160}):
        offline = OfflineEngine.load(EngineConfig(model=str(tmp_path), device="cpu", block_size=4, **limit))
        (generation,) = offline.generate(PROMPTS[1:], [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)])
        texts.append(generation.token_ids)
    assert texts[0] == texts[1] == their_greedy_text(tmp_path, PROMPTS[1], attention="sdpa")
    assert texts[2] != texts[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.table(most=4)
def test_random_weights_of_a_config_run_in_bf16(kind: str, tmp_path: Path) -> None:
    config = config_of(kind)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    settings = {"load_format": "dummy", "dtype": "bfloat16", "device": "cpu", "max_model_len": 80}
    offline = OfflineEngine.load(EngineConfig(model=str(tmp_path), **settings))
    params = [SamplingParams(max_tokens=5, temperature=0.0, logprobs=2)]
    (generation,) = generate(offline.engine, offline.transport, PROMPTS[1:], params)
    assert len(generation.token_ids) == 5
    assert all(-20 < entry.logprob <= 0 for entry in generation.logprobs)
