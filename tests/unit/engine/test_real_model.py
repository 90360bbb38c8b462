"""The whole engine on a real tiny checkpoint: outputs equal transformers', and each other's whatever the schedule."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core.engine import Engine
from engine.core.local_client import GenerationResult, LocalTransport, generate
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.tiny_llama import VOCAB_SIZE, save_tiny_llama

KV_BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 4  # k and v, layers, KV heads, head_dim, float32, tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def make_engine(checkpoint: Path, **changes: object) -> tuple[Engine, LocalTransport]:
    """An engine over the checkpoint, with blocks of 4 tokens and steps of 24."""
    settings = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 8, "device": "cpu"} | changes
    offline = OfflineEngine.load(EngineConfig(model=str(checkpoint), **settings))
    return offline.engine, offline.transport


def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts; the first ten tokens of all are the same."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(0, VOCAB_SIZE, (10,), generator=generator).tolist()
    return [(shared + torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist())[:n] for n in lengths]


def mixed_params(count: int) -> list[SamplingParams]:
    """Every kind of request the sampler knows, in turn."""
    kinds = [
        SamplingParams(max_tokens=24, temperature=0.0),
        SamplingParams(max_tokens=24, temperature=0.8, seed=5),
        SamplingParams(max_tokens=24, temperature=1.3, seed=6, top_k=20, top_p=0.8),
        SamplingParams(max_tokens=24, temperature=1.0, seed=7, min_p=0.1, presence_penalty=0.7, frequency_penalty=0.4),
        SamplingParams(max_tokens=24, temperature=0.7, seed=8, repetition_penalty=1.4, logit_bias={3: 4.0, 5: -100.0}),
        SamplingParams(max_tokens=24, temperature=1.0, seed=9, stop_token_ids=list(range(0, 320, 9)), min_tokens=6),
        SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.3, logprobs=3),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


def tokens(generations: list[GenerationResult]) -> list[list[int]]:
    """Only the token ids; no request may have failed."""
    assert all(generation.error is None for generation in generations)
    return [generation.token_ids for generation in generations]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """Each mixed request served by itself, without a prefix cache: what every other way must equal."""
    engine, transport = make_engine(checkpoint, enable_prefix_caching=False, overlap_depth=1)
    pairs = zip(prompts(5, 17, 30, 61, 12, 40, 23, 35), mixed_params(8), strict=True)
    return [tokens(generate(engine, transport, [prompt], [params]))[0] for prompt, params in pairs]


def test_greedy_text_equals_transformers(checkpoint: Path) -> None:
    engine, transport = make_engine(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    inputs = prompts(3, 30, 70)
    params = [SamplingParams(max_tokens=60, temperature=0.0)] * 3
    for prompt, token_ids in zip(inputs, tokens(generate(engine, transport, inputs, params)), strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None)
        assert token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_batch_gives_what_each_request_gives_alone(
    checkpoint: Path, alone: list[list[int]], depth: int, enable_prefix_caching: bool
) -> None:
    engine, transport = make_engine(checkpoint, overlap_depth=depth, enable_prefix_caching=enable_prefix_caching)
    inputs = prompts(5, 17, 30, 61, 12, 40, 23, 35)
    assert tokens(generate(engine, transport, inputs, mixed_params(8))) == alone
    again = generate(engine, transport, inputs, mixed_params(8))
    assert tokens(again) == alone
    assert any(generation.num_cached_tokens for generation in again) == enable_prefix_caching
    assert engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_give_what_unpreempted_ones_give(
    checkpoint: Path, alone: list[list[int]], depth: int
) -> None:
    pool = 30 * KV_BYTES_PER_BLOCK
    engine, transport = make_engine(checkpoint, overlap_depth=depth, kv_cache_memory_bytes=pool, max_model_len=100)
    assert tokens(generate(engine, transport, prompts(5, 17, 30, 61, 12, 40, 23, 35), mixed_params(8))) == alone
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.kv.pool.num_used == 0


def test_logprobs_are_those_of_transformers(checkpoint: Path) -> None:
    engine, transport = make_engine(checkpoint)
    (prompt,) = prompts(20)
    (generation,) = generate(engine, transport, [prompt], [SamplingParams(max_tokens=5, temperature=0.0, logprobs=4)])
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generation.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for step, entry in enumerate(generation.logprobs):
        assert entry.logprob == pytest.approx(float(expected[step, generation.token_ids[step]]), abs=1e-4)
        assert entry.top_token_ids == expected[step].topk(4).indices.tolist()
        assert entry.top_logprobs == pytest.approx(expected[step].topk(4).values.tolist(), abs=1e-4)


def test_min_tokens_bans_stop_tokens_until_then(checkpoint: Path) -> None:
    engine, transport = make_engine(checkpoint)
    every_token = list(range(1, VOCAB_SIZE))
    params = [SamplingParams(max_tokens=9, temperature=0.0, min_tokens=6, stop_token_ids=every_token)]
    (generation,) = generate(engine, transport, prompts(8), params)
    assert generation.token_ids[:6] == [0] * 6
    assert len(generation.token_ids) == 7
    assert generation.finish_reason == "stop"


def test_decoding_rows_are_not_rebuilt_while_nothing_changes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, transport = make_engine(checkpoint, block_size=64)
    made = []
    real = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or real(*args, **kwargs))
    counts = []
    for max_tokens in (4, 4, 40):
        made.clear()
        params = [SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=1)]
        params += [SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, stop_token_ids=[7])]
        generate(engine, transport, prompts(4, 4), params)
        counts.append(len(made))
    assert counts[1] == counts[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 1000}, ["--max-model-len 1000", "512"]),
        ({"max_model_len": 256, "kv_cache_memory_bytes": 10_000}, ["256", "--max-model-len", "--kv-cache-memory"]),
        ({"attention_backend": "nonsense"}, ["nonsense", "torch"]),
    ],
)
def test_a_start_that_cannot_work_says_why(checkpoint: Path, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(StartupError) as error:
        make_engine(checkpoint, **changes)
    assert all(word in error.value.message for word in words)
    assert "\n" not in error.value.message


def test_memory_fits_itself(checkpoint: Path) -> None:
    engine, _ = make_engine(checkpoint, kv_cache_memory_bytes=40 * KV_BYTES_PER_BLOCK)
    assert engine.scheduler.config.max_model_len == 39 * 4
