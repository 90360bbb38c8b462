"""Log-probabilities of prompts: transformers' own, however the prompt is cut, batched, preempted or cached."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core.local_client import GenerationResult, generate
from engine.device import prompt_outputs as prompt_logprobs
from engine.device.prompt_outputs import token_logprobs
from engine.interface.protocol import SamplingParams, TokenLogprobs
from tests.support.engine_harness import Harness
from tests.unit.engine.test_real_model import (  # noqa: F401  (a fixture)
    KV_BYTES_PER_BLOCK,
    checkpoint,
    make_engine,
    prompts,
)

PARAMS = [
    SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=3, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.8, seed=5),
    SamplingParams(max_tokens=1, prompt_logprobs=0),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.3, logprobs=3),
    SamplingParams(max_tokens=4, temperature=1.0, seed=3, prompt_logprobs=20),
]
LENGTHS = (61, 17, 30, 40, 23)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[torch.Tensor]:  # noqa: F811
    """Return transformers' log-probabilities [P - 1, V] of every prompt."""
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1) for prompt in prompts(*LENGTHS)]


def check(generation: GenerationResult, prompt: list[int], count: int | None, logprobs: torch.Tensor) -> None:
    assert generation.error is None
    if count is None:
        assert generation.prompt_logprobs == []
        return
    assert len(generation.prompt_logprobs) == len(prompt) - 1
    for place, (token_id, entry) in enumerate(zip(prompt[1:], generation.prompt_logprobs, strict=True)):
        row = logprobs[place]
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token_id]).sum())
        assert entry.top_token_ids == row.topk(count).indices.tolist()
        assert entry.top_logprobs == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        if token_id in entry.top_token_ids:
            assert entry.logprob == entry.top_logprobs[entry.top_token_ids.index(token_id)]  # bit-equal


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [8, 24, 200])
def test_a_mixed_batch_has_the_scores_of_transformers(
    checkpoint: Path,  # noqa: F811
    expected: list[torch.Tensor],
    depth: int,
    budget: int,
) -> None:
    engine, transport = make_engine(checkpoint, overlap_depth=depth, max_num_batched_tokens=budget)
    inputs = prompts(*LENGTHS)
    for _ in range(2):  # the second time every prompt is in the prefix cache
        generations = generate(engine, transport, inputs, PARAMS)
        for generation, prompt, params, logprobs in zip(generations, inputs, PARAMS, expected, strict=True):
            check(generation, prompt, params.prompt_logprobs, logprobs)
            if params.prompt_logprobs is not None:
                assert generation.num_cached_tokens == 0
    assert generations[1].num_cached_tokens > 0  # others still read what those have written


def test_the_tokens_are_those_of_requests_that_do_not_ask(checkpoint: Path) -> None:  # noqa: F811
    engine, transport = make_engine(checkpoint)
    inputs = prompts(*LENGTHS)
    plain = [
        SamplingParams(**{name: getattr(p, name) for name in p.__struct_fields__ if name != "prompt_logprobs"})
        for p in PARAMS
    ]
    asked = [generation.token_ids for generation in generate(engine, transport, inputs, PARAMS)]
    assert asked == [generation.token_ids for generation in generate(engine, transport, inputs, plain)]


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_prompts_are_scored_once(checkpoint: Path, expected: list[torch.Tensor], depth: int) -> None:  # noqa: F811
    engine, transport = make_engine(
        checkpoint, overlap_depth=depth, kv_cache_memory_bytes=34 * KV_BYTES_PER_BLOCK, max_model_len=100
    )
    params = [SamplingParams(max_tokens=30, temperature=0.0, prompt_logprobs=2)] * len(LENGTHS)
    inputs = prompts(*LENGTHS)
    for generation, prompt, logprobs in zip(generate(engine, transport, inputs, params), inputs, expected, strict=True):
        check(generation, prompt, 2, logprobs)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.kv.pool.num_used == 0


def test_a_chunk_is_scored_in_pieces(
    checkpoint: Path,  # noqa: F811
    expected: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_logprobs, "_MIN_PIECE_ROWS", 7)
    monkeypatch.setattr(prompt_logprobs, "_MAX_PIECE_BYTES", 0)
    sizes = []
    real = token_logprobs
    monkeypatch.setattr(
        prompt_logprobs, "token_logprobs", lambda logits, *rest: sizes.append(len(logits)) or real(logits, *rest)
    )
    engine, transport = make_engine(checkpoint, max_num_batched_tokens=200)
    inputs = prompts(*LENGTHS)
    for generation, prompt, params, logprobs in zip(
        generate(engine, transport, inputs, PARAMS), inputs, PARAMS, expected, strict=True
    ):
        check(generation, prompt, params.prompt_logprobs, logprobs)
    assert max(sizes) == 7


def test_a_prompt_of_one_token_has_nothing_to_score(checkpoint: Path) -> None:  # noqa: F811
    engine, transport = make_engine(checkpoint)
    (generation,) = generate(engine, transport, [[5]], [SamplingParams(max_tokens=2, prompt_logprobs=1)])
    assert generation.prompt_logprobs == []
    assert len(generation.token_ids) == 2


def test_equal_logprobs_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    for token_id, rank in ((0, 3), (1, 1), (2, 1), (3, 4)):
        assert token_logprobs(logits, torch.tensor([token_id]), 0)[1].tolist() == [rank]


@pytest.mark.parametrize("depth", [1, 2])
def test_scores_of_a_long_prompt_come_chunk_by_chunk(depth: int) -> None:
    harness = Harness(depth=depth, max_num_batched_tokens=8)
    harness.add("a", list(range(30)), 3, prompt_logprobs=1)
    harness.drain()
    counts = [sum(map(len, message.prompt_logprobs.values())) for _, message in harness.messages]
    assert [count for count in counts if count] == [8, 8, 8, 5]
    assert harness.seen["a"].ends == ["length"]


def test_an_abort_between_chunks_leaves_nothing_behind() -> None:
    harness = Harness(depth=2, max_num_batched_tokens=8)
    harness.add("a", list(range(30)), 3, prompt_logprobs=1)
    harness.turn(2)
    harness.abort("a")
    harness.drain()
    assert harness.seen["a"].ends == ["abort"]
    assert all(isinstance(entry, TokenLogprobs) for entry in harness.seen["a"].prompt_logprobs)
