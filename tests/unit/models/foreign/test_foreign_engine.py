"""Architectures that only transformers knows, through the whole engine: greedy text equals generate's."""

from pathlib import Path

import pytest
import torch
import transformers

from engine.interface.config import EngineConfig, LoraSource, SpeculativeConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from kernels.attention.torch_ref import TorchAttention
from models.foreign.choose import read_config
from models.foreign.load import load_foreign
from tests.support.reference import save_checkpoint

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 97}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
}
OLD_SIZES = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 160}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**OLD_SIZES, **TOKENS),  # learned positions
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(**OLD_SIZES, **TOKENS),  # one key head
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 6}, **TOKENS),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=160,
        word_embed_proj_dim=48,
        **TOKENS,
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES, **TOKENS, sliding_window=20),
    "phi": lambda: transformers.PhiConfig(**SIZES, **TOKENS),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, **TOKENS, num_experts=4, num_experts_per_tok=2),
    "diffllama": lambda: transformers.DiffLlamaConfig(**SIZES, **TOKENS),  # two attentions in each layer
    "vaultgemma": lambda: transformers.VaultGemmaConfig(
        **SIZES, **TOKENS, head_dim=8, sliding_window=20, attn_logit_softcapping=4.0, final_logit_softcapping=3.0
    ),
    # keys of 24 beside values of 16, from one latent
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 6},
        **TOKENS,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    ),
    # its head reads a field of its own output class
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        **TOKENS,
        head_dim=8,
        global_head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=97,
        num_kv_shared_layers=0,
    ),
    # its head has the name of a decoder
    "modernbert-decoder": lambda: transformers.ModernBertDecoderConfig(
        **SIZES, **TOKENS, local_attention=20, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "granite_swa": lambda: transformers.GraniteSWAConfig(**SIZES, **TOKENS, sliding_window=20),  # sinks
}
PROMPTS = [
    torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (4, 47, *range(5, 19))
]
SETTINGS = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 16, "device": "cpu"}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


def their_text(folder: Path, prompt: list[int]) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def load(folder: Path, **settings: object) -> OfflineEngine:
    return OfflineEngine.load(EngineConfig(model=str(folder), **{**SETTINGS, **settings}))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.table(most=3)
@pytest.mark.slow
def test_greedy_text_of_sixteen_requests_in_cut_steps_equals_transformers(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIGS[kind]())
    offline = load(tmp_path, model_impl="transformers" if kind in ("deepseek_v3", "gemma4") else "auto")
    assert "transformers' own class" in offline.loaded.facts["Computed by"]
    texts = [generation.token_ids for generation in offline.generate(PROMPTS, [GREEDY] * len(PROMPTS))]
    assert texts[:2] == [their_text(tmp_path, prompt) for prompt in PROMPTS[:2]]
    # Again, from the prefix cache, and one by one: the same texts
    assert [offline.generate([prompt], [GREEDY])[0].token_ids for prompt in PROMPTS[:4]] == texts[:4]
    assert offline.engine.scheduler.kv.num_hit_tokens > 0


def test_a_small_pool_and_drafts_change_no_token(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIGS["starcoder2"]())
    wanted = [generation.token_ids for generation in load(tmp_path).generate(PROMPTS, [GREEDY] * len(PROMPTS))]
    bytes_per_block = 2 * 3 * 2 * 8 * 4 * 4  # keys and values, layers, heads, their size, float32, tokens
    small = load(tmp_path, kv_cache_memory_bytes=60 * bytes_per_block, speculative=SpeculativeConfig())
    assert [generation.token_ids for generation in small.generate(PROMPTS, [GREEDY] * len(PROMPTS))] == wanted
    assert small.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("pool", ["auto", "int8"])
def test_quires_own_layers_and_transformers_class_write_the_same_text(tmp_path: Path, pool: str) -> None:
    save_checkpoint(tmp_path, transformers.Qwen3Config(**SIZES, **TOKENS, head_dim=8))
    engines = [load(tmp_path, model_impl=name, kv_cache_dtype=pool) for name in ("quire", "transformers")]
    texts = [engine.generate(PROMPTS[:4], [GREEDY] * 4) for engine in engines]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]


def test_an_own_implementation_is_preferred_and_can_be_required(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "own", transformers.Qwen3Config(**SIZES, **TOKENS, head_dim=8))
    assert "Computed by" not in load(tmp_path / "own").loaded.facts
    save_checkpoint(tmp_path / "other", CONFIGS["gpt2"]())
    with pytest.raises(StartupError, match=r"GPT2LMHeadModel.*is not supported"):
        load(tmp_path / "other", model_impl="quire")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 2}, "does not split over 2 ranks"),
        ({"quantization": "fp8"}, "--quantization fp8 needs Quire's own layers"),
        ({"loras": [LoraSource("style", "nowhere")]}, "LoRA adapters need Quire's own layers"),
    ],
)
def test_what_transformers_classes_cannot_do_is_refused(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    save_checkpoint(tmp_path, CONFIGS["gpt2"]())
    with pytest.raises(StartupError, match=words):
        load(tmp_path, **settings)


def test_the_load_shows_no_progress_bar_of_transformers(tmp_path: Path, capfd) -> None:
    save_checkpoint(tmp_path, CONFIGS["gpt2"]())
    capfd.readouterr()
    load(tmp_path)
    assert "Loading weights" not in "".join(capfd.readouterr())
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_checkpoint(tmp_path, CONFIGS["gpt2"]())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"1 tensors are missing, such as transformer\.h\.1\.mlp\.c_fc\.weight"):
        load(tmp_path)


def test_the_embedding_of_the_padding_token_is_the_one_in_the_file(tmp_path: Path) -> None:
    """transformers' class of Youtu zeroes it after loading, and with it a row of the head."""
    from safetensors.torch import load_file

    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = transformers.YoutuConfig(**{**SIZES, "num_key_value_heads": 6}, **TOKENS, **sizes)
    save_checkpoint(tmp_path, config)
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    model = load_foreign(
        read_config(tmp_path),
        tmp_path,
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend=TorchAttention(),
    )
    assert torch.equal(model.decoder.embed_tokens.weight, stored)


def test_random_weights_of_a_config(tmp_path: Path) -> None:
    config = CONFIGS["olmoe"]()
    config.architectures = ["OlmoeForCausalLM"]
    config.save_pretrained(tmp_path)
    (generation,) = load(tmp_path, load_format="dummy", dtype="bfloat16").generate(PROMPTS[:1], [GREEDY])
    assert len(generation.token_ids) == NUM_TOKENS
