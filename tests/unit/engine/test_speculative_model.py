"""Speculation on a real tiny checkpoint: the same tokens as one by one, drawn as the model's own distribution says."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core.engine import Engine
from engine.core.local_client import LocalTransport, generate
from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.tiny_llama import save_tiny_llama
from tests.unit.engine.test_real_model import KV_BYTES_PER_BLOCK, mixed_params, tokens

VOCAB_SIZE = 40  # few tokens, so that a text soon repeats itself
TINY_VOCAB_SIZE = 6
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("repeating"), vocab_size=VOCAB_SIZE, spread=0.15)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=TINY_VOCAB_SIZE, spread=0.08)


def make_engine(checkpoint: Path, *, num_tokens: int = 4, **changes: object) -> tuple[Engine, LocalTransport]:
    """An engine over the checkpoint that speculates; num_tokens 0: one that does not."""
    speculative = SpeculativeConfig(num_tokens=num_tokens, ngram_min=1, ngram_max=3) if num_tokens else None
    settings = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "device": "cpu"} | changes
    offline = OfflineEngine.load(EngineConfig(model=str(checkpoint), speculative=speculative, **settings))
    return offline.engine, offline.transport


def repeating_prompts(count: int) -> list[list[int]]:
    """Prompts that go round, each at another length and period; all begin alike."""
    return [([3, 1, 4, 1, 5] + list(range(7, 9 + 2 * i)) * 6)[: 17 + 5 * i] for i in range(count)]


@DEPTHS
@pytest.mark.parametrize("num_tokens", [1, 4, 11])
@pytest.mark.table
@pytest.mark.slow
def test_greedy_tokens_are_equal_with_and_without(checkpoint: Path, depth: int, num_tokens: int) -> None:
    inputs, params = repeating_prompts(8), [SamplingParams(max_tokens=100, temperature=0.0)] * 8
    plain, transport = make_engine(checkpoint, num_tokens=0, overlap_depth=depth)
    expected = generate(plain, transport, inputs, params)
    engine, transport = make_engine(checkpoint, num_tokens=num_tokens, overlap_depth=depth)
    for _ in range(2):  # the second time over the prefix cache that drafts were written beside
        assert tokens(generate(engine, transport, inputs, params)) == tokens(expected)
    assert engine.scheduler.drafts.num_accepted > 100
    assert engine.scheduler.kv.num_hit_tokens > 0
    assert engine.scheduler.kv.pool.num_used == 0
    assert plain.scheduler.drafts.num_tokens == 0


@DEPTHS
@pytest.mark.slow
def test_every_kind_of_request_gives_what_it_gives_without(checkpoint: Path, depth: int) -> None:
    kinds = [params for params in mixed_params(7) if not params.stop_token_ids]
    kinds += [SamplingParams(max_tokens=60, temperature=0.3, seed=11, logit_bias={2: 1.5, 9: -100.0}, logprobs=2)]
    kinds += [SamplingParams(max_tokens=60, temperature=0.0, min_tokens=9, stop_token_ids=list(range(0, 40, 3)))]
    kinds += [SamplingParams(max_tokens=60, temperature=0.4, seed=i, prompt_logprobs=1, logprobs=0) for i in range(3)]
    inputs = repeating_prompts(len(kinds))
    plain, transport = make_engine(checkpoint, num_tokens=0, overlap_depth=1)
    expected = generate(plain, transport, inputs, kinds)
    engine, transport = make_engine(checkpoint, overlap_depth=depth)
    answers = generate(engine, transport, inputs, kinds)
    assert tokens(answers) == tokens(expected)
    assert engine.scheduler.drafts.num_accepted > 0
    for answer, wanted in zip(answers, expected, strict=True):
        assert (answer.finish_reason, answer.stop_token_id) == (wanted.finish_reason, wanted.stop_token_id)
        assert len(answer.logprobs) == len(wanted.logprobs)
        for entry, other in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert entry.top_token_ids == other.top_token_ids
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(answer.prompt_logprobs) == len(wanted.prompt_logprobs)
        for entry, other in zip(answer.prompt_logprobs, wanted.prompt_logprobs, strict=True):
            assert (entry.rank, entry.top_token_ids) == (other.rank, other.top_token_ids)
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


@DEPTHS
@pytest.mark.slow
def test_preempted_requests_give_the_same(checkpoint: Path, depth: int) -> None:
    inputs, params = repeating_prompts(8), [SamplingParams(max_tokens=60, temperature=0.0)] * 8
    plain, transport = make_engine(checkpoint, num_tokens=0)
    expected = tokens(generate(plain, transport, inputs, params))
    pool = {"kv_cache_memory_bytes": 40 * KV_BYTES_PER_BLOCK, "max_model_len": 120}
    engine, transport = make_engine(checkpoint, overlap_depth=depth, **pool)
    assert tokens(generate(engine, transport, inputs, params)) == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.drafts.num_accepted > 0
    assert engine.scheduler.kv.pool.num_used == 0


@DEPTHS
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_a_repeating_answer_takes_fewer_steps(checkpoint: Path, depth: int, max_num_seqs: int) -> None:
    params = [SamplingParams(max_tokens=201, temperature=0.0, logit_bias={5: 100.0})]
    engine, transport = make_engine(checkpoint, overlap_depth=depth, max_num_seqs=max_num_seqs)
    (answer,) = generate(engine, transport, [[7, 5, 5, 5]], params)
    assert answer.token_ids == [5] * 201
    assert engine.scheduler.committed_step_id + 1 == 1 + 200 / 5  # four of five tokens were guessed


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=4, temperature=1.0),
        SamplingParams(max_tokens=4, temperature=1.6, top_k=4, top_p=0.9, logit_bias={2: 1.0}),
    ],
)
@pytest.mark.full
def test_drawn_tokens_are_distributed_as_the_model_says(tiny: Path, params: SamplingParams) -> None:
    """Pearson's chi-square over the second and third token, which drafts stood for; the seeds are fixed."""
    prompt, num_draws = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2], 6000
    engine, transport = make_engine(tiny, num_tokens=3, max_num_seqs=64, max_num_batched_tokens=512)
    answers = tokens(
        generate(engine, transport, [prompt] * num_draws, [seeded(params, seed) for seed in range(num_draws)])
    )
    assert engine.scheduler.drafts.num_accepted > num_draws / 20
    assert engine.scheduler.drafts.num_accepted < engine.scheduler.drafts.num_tokens * 0.9
    expected = num_draws * pair_probabilities(tiny, prompt, params)
    observed = torch.zeros(TINY_VOCAB_SIZE, TINY_VOCAB_SIZE, dtype=torch.float64)
    for answer in answers:
        observed[answer[1], answer[2]] += 1
    assert not observed[expected == 0].any()
    is_common = expected >= 5
    cells = [(observed[is_common], expected[is_common]), (observed[~is_common].sum(), expected[~is_common].sum())]
    statistic = sum(float(((seen - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()) for seen, wanted in cells)
    degrees = torch.tensor(int(is_common.sum()), dtype=torch.float64)
    p_value = float(torch.special.gammaincc(degrees / 2, torch.tensor(statistic / 2, dtype=torch.float64)))
    assert p_value > 0.001, f"chi-square {statistic:.1f} at {int(degrees)} degrees of freedom"


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        logit_bias=params.logit_bias,
        seed=seed * 7919 + 1,
    )


def pair_probabilities(checkpoint: Path, prompt: list[int], params: SamplingParams) -> torch.Tensor:
    """P(second token, third token) [V, V] by transformers and plain arithmetic."""
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()

    def following(prefixes: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + prefix for prefix in prefixes])).logits[:, -1].double()
        for token_id, value in params.logit_bias.items():
            logits[:, token_id] += value
        return torch.stack([processed(row, params) for row in logits / params.temperature])

    ids = range(TINY_VOCAB_SIZE)
    first = following([[]])[0]
    second = following([[a] for a in ids])
    third = following([[a, b] for a, b in itertools.product(ids, ids)]).view(len(ids), len(ids), -1)
    return torch.einsum("a,ab,abc->bc", first, second, third)


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities [V] that top-k, then top-p leave."""
    order = logits.argsort(descending=True)[: params.top_k or len(logits)]
    probs = logits[order].softmax(0)
    is_kept = probs.cumsum(0) - probs < params.top_p
    kept = torch.zeros_like(logits)
    kept[order[is_kept]] = probs[is_kept]
    return kept / kept.sum()
