"""Embeddings are transformers' hidden states, however prompts are cut, batched, preempted or cached."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from engine.core.local_client import GenerationResult, generate
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.embedding_folder import write_embedding_files
from tests.support.engine_harness import Harness

pytestmark = pytest.mark.slow

VOCAB_SIZE = 320
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
KV_BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 4  # k and v, layers, KV heads, head_dim, float32, tokens
LENGTHS = (61, 17, 1, 30, 40, 23)


def save(folder: Path, kind: str) -> Path:
    """A tiny random checkpoint: a generator, an embedding model with or without prefixes, tied or not."""
    torch.manual_seed(0)
    if kind == "llama":
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
        return folder
    config = Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=kind == "qwen3-tied")
    model = Qwen3Model(config) if kind == "qwen3-bare" else Qwen3ForCausalLM(config)
    if kind == "qwen3-headless":  # as Qwen3-Embedding-8B: a generator's name, the bare model's tensors
        model.config.architectures = ["Qwen3ForCausalLM"]
        model.model.save_pretrained(folder)
        text = (folder / "config.json").read_text().replace('"Qwen3Model"', '"Qwen3ForCausalLM"')
        (folder / "config.json").write_text(text)
    else:
        model.save_pretrained(folder)
    write_embedding_files(folder, pooling="lasttoken")
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3-bare", "qwen3-headless", "qwen3-tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama")


def load(folder: Path, **changes: object) -> OfflineEngine:
    settings = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 8, "device": "cpu"} | changes
    return OfflineEngine.load(EngineConfig(model=str(folder), **settings))


def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts; the first ten tokens of all are the same."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(0, VOCAB_SIZE, (10,), generator=generator).tolist()
    return [(shared + torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist())[:n] for n in lengths]


def reference(folder: Path, inputs: list[list[int]], kind: str) -> list[np.ndarray]:
    """Pool the last hidden states that transformers computes."""
    model = LlamaForCausalLM if "LlamaForCausalLM" in (folder / "config.json").read_text() else Qwen3ForCausalLM
    inner = model.from_pretrained(folder).eval().model
    with torch.inference_mode():
        states = [inner(torch.tensor([prompt])).last_hidden_state[0] for prompt in inputs]
    return [(hidden[-1] if kind == "last" else hidden.mean(dim=0)).numpy() for hidden in states]


def vectors(generations: list[GenerationResult]) -> list[np.ndarray]:
    assert all(generation.error is None for generation in generations)
    assert all(generation.token_ids == [] and generation.finish_reason == "stop" for generation in generations)
    return [np.frombuffer(generation.embedding, dtype=np.float32) for generation in generations]


def check(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for vector, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, wanted, atol=1e-4)
        np.testing.assert_allclose(vector / np.linalg.norm(vector), wanted / np.linalg.norm(wanted), atol=1e-4)


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("budget", [8, 200])
def test_a_batch_has_the_embeddings_of_transformers(folder: Path, kind: str, budget: int) -> None:
    inputs = prompts(*LENGTHS)
    expected = reference(folder, inputs, kind)
    for depth in (1, 2):
        offline = load(folder, overlap_depth=depth, max_num_batched_tokens=budget)
        offline.self_test()
        first = offline.embed(inputs, kind)
        check(vectors(first), expected)
        again = offline.embed(inputs, kind)  # now every prompt is in the prefix cache
        check(vectors(again), expected)
        cached = [generation.num_cached_tokens for generation in again]
        assert cached == ([0] * len(inputs) if kind == "mean" else [60, 16, 0, 28, 36, 20])
        assert offline.engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_embeddings_and_answers_share_batches_and_cache(llama: Path, depth: int) -> None:
    offline = load(llama, overlap_depth=depth, max_num_batched_tokens=16)
    inputs = prompts(*LENGTHS)
    params = [SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=1 if i == 1 else None) for i in range(6)]
    alone = [offline.generate([prompt], [wanted])[0] for prompt, wanted in zip(inputs, params, strict=True)]
    kinds = [None, None, "mean", "last", None, "mean"]
    for _ in range(2):
        mixed = generate(offline.engine, offline.transport, inputs, params, kinds)
        for place, kind in enumerate(kinds):
            if kind is None:
                assert mixed[place].token_ids == alone[place].token_ids
                assert len(mixed[place].prompt_logprobs) == (16 if place == 1 else 0)
            else:
                check(vectors([mixed[place]]), reference(llama, [inputs[place]], kind))


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_preempted_prompts_are_pooled_once(llama: Path, kind: str) -> None:
    pool = {"kv_cache_memory_bytes": 34 * KV_BYTES_PER_BLOCK, "max_model_len": 100}
    inputs = prompts(40, 61, 40, 61, 40, 61)
    expected = reference(llama, inputs, kind)
    num_preemptions = 0
    for depth in (1, 2):
        offline = load(llama, overlap_depth=depth, max_num_batched_tokens=8, **pool)
        params = [SamplingParams(max_tokens=50, temperature=0.0)] * 6
        kinds = [None, kind, None, kind, None, kind]
        mixed = generate(offline.engine, offline.transport, inputs, params, kinds)
        check(vectors(mixed[1::2]), expected[1::2])
        num_preemptions += offline.engine.scheduler.num_preemptions
    assert num_preemptions > 0


def test_a_prompt_may_fill_the_context(llama: Path) -> None:
    offline = load(llama)
    (whole,) = offline.embed(prompts(128), "last")
    check(vectors([whole]), reference(llama, prompts(128), "last"))
    (longer,) = offline.embed(prompts(129), "last")
    assert longer.error is not None
    assert longer.error.code == "context_length_exceeded"
    assert "129" in longer.error.message
    assert "128" in longer.error.message


def test_a_model_without_a_head_generates_nothing(tmp_path: Path) -> None:
    offline = load(save(tmp_path, "qwen3-bare"))
    (refused,) = offline.generate([[1, 2]], [SamplingParams(max_tokens=1)])
    assert refused.error is not None
    assert refused.error.code == "unsupported_feature"
    assert "no language-model head" in refused.error.message


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_abort_between_chunks_leaves_nothing_behind(depth: int, pooling: str) -> None:
    ends = []
    for turns in range(1, 8):
        harness = Harness(depth=depth, max_num_batched_tokens=8)
        harness.add("a", list(range(30)), 1, pooling=pooling)
        harness.add("b", list(range(30)), 3)
        harness.turn(turns)
        harness.abort("a")
        harness.drain()
        ends += harness.seen["a"].ends
    assert ends[:3] == ["abort"] * 3
    assert ends[-1] == "stop"


def test_what_is_embedded_is_counted() -> None:
    harness = Harness()
    harness.add("a", list(range(30)), 1, pooling="mean")
    harness.drain()
    delta = harness.metrics.drain()
    assert delta.counters["prompt_tokens_total", ""] == 30
    assert delta.counters["requests_finished_total", "stop"] == 1
    assert not delta.counters.get(("generation_tokens_total", ""))
    assert sum(delta.histograms["request_prefill_time_seconds"].counts) == 1
    assert "request_decode_time_seconds" not in delta.histograms
