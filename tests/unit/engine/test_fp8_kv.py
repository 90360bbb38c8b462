"""The engine over an fp8 pool: the same tokens whatever the schedule, nearly those of a whole pool, twice the room."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.demo_model.corpus.mixture import examination
from benchmarks.demo_model.score import choose, encode
from engine.core.local_client import generate
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.device_choice import resolve_kv_dtype
from engine.startup.load import load_engine
from kernels.elementwise.reference import FP8, INT8
from server.cli import main
from server.config.model_source import DEMO_FOLDER
from server.config.value_types import KV_CACHE_DTYPES
from server.text.tokenizer import load_tokenizer
from tests.support.tiny_llama import save_tiny_llama
from tests.unit.engine.test_real_model import make_engine, mixed_params, prompts, tokens

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4  # k and v, layers, KV heads, head_dim, tokens
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """Each request by itself, its prompt in one step, without a prefix cache."""
    engine, transport = make_engine(
        checkpoint, kv_cache_dtype="fp8", enable_prefix_caching=False, overlap_depth=1, max_num_batched_tokens=512
    )
    pairs = zip(prompts(*LENGTHS), mixed_params(len(LENGTHS)), strict=True)
    return [tokens(generate(engine, transport, [prompt], [params]))[0] for prompt, params in pairs]


def test_rounding_shows(checkpoint: Path, alone: list[list[int]]) -> None:
    engine, transport = make_engine(checkpoint)
    assert tokens(generate(engine, transport, prompts(*LENGTHS), mixed_params(len(LENGTHS)))) != alone


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_prompts_in_chunks_and_prefix_hits_give_what_each_request_gives_alone(
    checkpoint: Path, alone: list[list[int]], depth: int, enable_prefix_caching: bool
) -> None:
    engine, transport = make_engine(
        checkpoint, kv_cache_dtype="fp8", overlap_depth=depth, enable_prefix_caching=enable_prefix_caching
    )
    inputs = prompts(*LENGTHS)
    assert tokens(generate(engine, transport, inputs, mixed_params(len(LENGTHS)))) == alone
    again = generate(engine, transport, inputs, mixed_params(len(LENGTHS)))
    assert tokens(again) == alone
    assert any(generation.num_cached_tokens for generation in again) == enable_prefix_caching
    assert engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_give_what_unpreempted_ones_give(
    checkpoint: Path, alone: list[list[int]], depth: int
) -> None:
    engine, transport = make_engine(
        checkpoint,
        kv_cache_dtype="fp8",
        overlap_depth=depth,
        kv_cache_memory_bytes=30 * BYTES_PER_BLOCK,
        max_model_len=100,
    )
    assert tokens(generate(engine, transport, prompts(*LENGTHS), mixed_params(len(LENGTHS)))) == alone
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_the_pool_holds_twice_the_tokens_of_bf16_and_says_so(checkpoint: Path, name: str) -> None:
    facts, num_blocks = {}, {}
    for kv_cache_dtype in ("auto", name):
        config = EngineConfig(
            model=str(checkpoint),
            device="cpu",
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=40 * 4 * BYTES_PER_BLOCK * 2,
        )
        loaded = load_engine(config, lambda stage: None)
        facts[kv_cache_dtype] = loaded.facts["KV cache"]
        num_blocks[kv_cache_dtype] = loaded.scheduler_config.num_pages
    assert num_blocks == {"auto": 40, name: 80}
    assert facts["auto"].startswith(f"{39 * 16:,} tokens")
    assert facts[name].startswith(f"{79 * 16:,} tokens")
    assert facts[name].endswith(", fp8")
    assert "fp8" not in facts["auto"]


def demo_tokens(kv_cache_dtype: str, *, device: str = "cpu") -> list[list[int]]:
    """What the demo model says to 20 questions of its examination, greedily, 50 tokens or to its end."""
    tokenizer = load_tokenizer(DEMO_FOLDER)
    questions = choose(examination(0), 1)[:20]
    engine = OfflineEngine.load(
        EngineConfig(
            model=str(DEMO_FOLDER), device=device, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=64 * 2**20
        )
    )
    params = SamplingParams(max_tokens=50, temperature=0.0, stop_token_ids=[tokenizer.eos_id])
    inputs = [encode(tokenizer, question) for question in questions]
    return tokens(engine.generate(inputs, [params] * len(inputs)))


@pytest.mark.full
def test_the_demo_model_says_nearly_the_same() -> None:
    whole, fp8 = demo_tokens("auto"), demo_tokens("fp8")
    pairs = [pair for texts in zip(whole, fp8, strict=True) for pair in zip(*texts, strict=False)]
    assert len(whole) == 20
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.9


def test_a_value_that_is_none_is_refused_with_the_choices(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError) as info:
        make_engine(checkpoint, kv_cache_dtype="int4")
    assert info.value.message == "--kv-cache-dtype int4 is not known: choose from auto, fp8, fp8_e4m3, int8."
    dtypes = {name: resolve_kv_dtype(name, torch.bfloat16, CPU) for name in KV_CACHE_DTYPES}
    assert dtypes == {"auto": torch.bfloat16, "fp8": FP8, "fp8_e4m3": FP8, "int8": INT8}
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "--kv-cache-dtype", "fp4"])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "--kv-cache-dtype" in error
    assert all(name in error for name in ("fp4", *KV_CACHE_DTYPES))


@pytest.mark.parametrize(("device", "capability", "words"), [
    ("cuda", (8, 0), ["needs a GPU of compute capability 8.9 or higher", "8.0", "use int8 or auto"]),
    ("cuda", (8, 6), ["8.6"]),
    ("mps", None, ["Apple", "use int8 or auto"]),
])  # fmt: skip
def test_a_device_without_fp8_is_named(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int] | None, words: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(StartupError) as info:
        resolve_kv_dtype("fp8", torch.bfloat16, torch.device(device))
    assert info.value.message.startswith("--kv-cache-dtype fp8")
    assert all(word in info.value.message for word in words)
    assert resolve_kv_dtype("auto", torch.bfloat16, torch.device(device)) == torch.bfloat16
    assert resolve_kv_dtype("int8", torch.bfloat16, torch.device(device)) == INT8


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_with_fp8_take_it(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_kv_dtype("fp8", torch.bfloat16, torch.device("cuda")) == FP8


@pytest.fixture
def make_biased(tmp_path: Path) -> Callable[[float], Path]:
    """A tiny Qwen2 whose keys all have that bias."""

    def make(bias: float) -> Path:
        config = Qwen2Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.bias.fill_(-bias)
        model.save_pretrained(tmp_path / str(bias))
        return tmp_path / str(bias)

    return make


def test_a_model_whose_keys_are_too_large_for_fp8_is_warned_of(
    make_biased: Callable[[float], Path], caplog: pytest.LogCaptureFixture
) -> None:
    for bias, kv_cache_dtype, is_warned in ((200.0, "fp8", True), (200.0, "auto", False), (10.0, "fp8", False)):
        caplog.clear()
        folder = make_biased(bias)
        load_engine(EngineConfig(model=str(folder), device="cpu", kv_cache_dtype=kv_cache_dtype), lambda stage: None)
        assert ("use --kv-cache-dtype int8, or auto largest_key_bias=200" in caplog.text) == is_warned
