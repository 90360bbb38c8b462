"""The engine over an int8 pool: the same tokens whatever the schedule, and keys of hundreds that fp8 has not."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV2Config, Gemma3TextConfig, GptOssConfig, Qwen2Config, Qwen2ForCausalLM

from engine.core.local_client import generate
from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.startup.load import load_engine
from kernels.elementwise.reference import FP8, INT8
from models.config.model_config import ModelConfig
from tests.support.checkpoints import TINY
from tests.support.models_harness import PagedRunner, load
from tests.support.nan_checkpoint import NAN_TOKEN, spoil_embedding
from tests.support.reference import save_checkpoint
from tests.support.tiny_llama import VOCAB_SIZE, save_tiny_llama
from tests.unit.engine.test_real_model import make_engine, mixed_params, prompts, tokens

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)
BYTES_PER_BLOCK = 2 * 2 * 2 * (16 + 4) * 4  # k and v, layers, KV heads, head_dim and scale, tokens


def save_biased_qwen2(folder: Path) -> Path:
    """A tiny Qwen2 whose keys have biases of hundreds, as the published models; its text depends on its context."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(0.0, 200.0)
            layer.self_attn.q_proj.weight.mul_(0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_biased_qwen2(tmp_path_factory.mktemp("biased-qwen2"))


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """Each request by itself, its prompt in one step, without a prefix cache."""
    engine, transport = make_engine(
        checkpoint, kv_cache_dtype="int8", enable_prefix_caching=False, overlap_depth=1, max_num_batched_tokens=512
    )
    pairs = zip(prompts(*LENGTHS), mixed_params(len(LENGTHS)), strict=True)
    return [tokens(generate(engine, transport, [prompt], [params]))[0] for prompt, params in pairs]


@pytest.mark.parametrize(
    ("depth", "enable_prefix_caching"),
    [(2, True), *(pytest.param(*row, marks=pytest.mark.full) for row in ((1, True), (1, False), (2, False)))],
)
def test_prompts_in_chunks_and_prefix_hits_give_what_each_request_gives_alone(
    checkpoint: Path, alone: list[list[int]], depth: int, enable_prefix_caching: bool
) -> None:
    engine, transport = make_engine(
        checkpoint, kv_cache_dtype="int8", overlap_depth=depth, enable_prefix_caching=enable_prefix_caching
    )
    inputs = prompts(*LENGTHS)
    assert tokens(generate(engine, transport, inputs, mixed_params(len(LENGTHS)))) == alone
    again = generate(engine, transport, inputs, mixed_params(len(LENGTHS)))
    assert tokens(again) == alone
    assert any(generation.num_cached_tokens for generation in again) == enable_prefix_caching
    assert engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), 2])
def test_preempted_requests_give_what_unpreempted_ones_give(
    checkpoint: Path, alone: list[list[int]], depth: int
) -> None:
    engine, transport = make_engine(
        checkpoint,
        kv_cache_dtype="int8",
        overlap_depth=depth,
        kv_cache_memory_bytes=30 * BYTES_PER_BLOCK,
        max_model_len=100,
    )
    assert tokens(generate(engine, transport, prompts(*LENGTHS), mixed_params(len(LENGTHS)))) == alone
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.kv.pool.num_used == 0


def test_drafts_change_no_token(checkpoint: Path) -> None:
    inputs, greedy = [prompt * 2 for prompt in prompts(20, 31)], [SamplingParams(max_tokens=24, temperature=0.0)] * 2
    found = []
    for speculative in (None, SpeculativeConfig(num_tokens=4, ngram_min=1, ngram_max=3)):
        engine, transport = make_engine(checkpoint, kv_cache_dtype="int8", speculative=speculative)
        found.append(tokens(generate(engine, transport, inputs, greedy)))
    assert found[0] == found[1]


def logits(folder: Path, pool: torch.dtype) -> torch.Tensor:
    """Of a prompt in three steps, the last of one token."""
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder), dtype=pool)
    row, prompt = runner.add_row(), [token % 90 for token in prompts(40)[0]]
    return torch.cat([part for start, stop in ((0, 9), (9, 39), (39, 40))
                      for part in runner.step([(row, prompt[start:stop])])])  # fmt: skip


def error(folder: Path, pool: torch.dtype, whole: torch.Tensor) -> float:
    return float((logits(folder, pool) - whole).norm() / whole.norm())


def test_large_keys_are_kept_well_where_fp8_loses_them(checkpoint: Path) -> None:
    whole = logits(checkpoint, torch.float32)
    assert error(checkpoint, INT8, whole) < 0.3 * error(checkpoint, FP8, whole)


@pytest.mark.parametrize("config", [
    Gemma3TextConfig(**TINY, num_key_value_heads=2, head_dim=16, sliding_window=8, sliding_window_pattern=2),
    GptOssConfig(**TINY, num_key_value_heads=2, head_dim=16, sliding_window=8, num_local_experts=4),
], ids=["windows", "sinks"])  # fmt: skip
def test_other_kinds_of_layers_are_nearly_those_over_a_whole_pool(tmp_path: Path, config: object) -> None:
    save_checkpoint(tmp_path, config)
    assert 0.0 < error(tmp_path, INT8, logits(tmp_path, torch.float32)) < 0.02


def test_only_the_request_with_nan_fails(tmp_path: Path) -> None:
    folder = spoil_embedding(save_tiny_llama(tmp_path))
    inputs = [[3 if token == NAN_TOKEN else token for token in prompt] for prompt in prompts(17, 30, 25)]
    never = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={NAN_TOKEN: -100.0})
    engine, transport = make_engine(folder, kv_cache_dtype="int8")
    expected = tokens(generate(engine, transport, inputs, [never] * 3))
    spoiled = [*inputs[1][:20], NAN_TOKEN, *inputs[1][21:]]
    *good, bad = generate(engine, transport, [*inputs, spoiled], [never] * 4)
    assert bad.error is not None
    assert tokens(good) == expected
    assert tokens(generate(engine, transport, inputs, [never] * 3)) == expected


def test_the_pool_counts_its_scales_and_says_so(checkpoint: Path) -> None:
    config = EngineConfig(
        model=str(checkpoint), device="cpu", kv_cache_dtype="int8", kv_cache_memory_bytes=40 * 4 * BYTES_PER_BLOCK
    )
    loaded = load_engine(config, lambda stage: None)
    assert loaded.scheduler_config.num_pages == 40
    assert loaded.facts["KV cache"].startswith(f"{39 * 16:,} tokens")
    assert loaded.facts["KV cache"].endswith(", int8 with a scale for each token and head")


def test_latents_are_refused(tmp_path: Path) -> None:
    config = DeepseekV2Config(**TINY, q_lora_rank=None, num_experts_per_tok=2, architectures=["DeepseekV2ForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(StartupError) as info:
        load_engine(
            EngineConfig(model=str(tmp_path), device="cpu", kv_cache_dtype="int8", load_format="dummy"),
            lambda stage: None,
        )
    assert info.value.message == (
        "--kv-cache-dtype int8: DeepseekV2ForCausalLM keeps latents, whose kernels read no scales of tokens:"
        " use fp8 or auto."
    )
