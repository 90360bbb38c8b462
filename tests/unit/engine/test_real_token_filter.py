"""bad_words and allowed_token_ids through the real sampler on CPU: the tokens are those of transformers."""

import re

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from server.config.model_source import DEMO_FOLDER
from server.structured_output.grammar_spec import regex_grammar
from tests.unit.engine.test_real_grammar import KINDS, PROMPT, TOKENIZER, run

LENGTH = 24


@pytest.fixture(
    scope="module",
    params=[(1, 0), (2, 4), *(pytest.param(pair, marks=pytest.mark.full) for pair in [(2, 0), (1, 4)])],
    ids=lambda pair: "depth {} drafts {}".format(*pair),
)
def offline(request: pytest.FixtureRequest) -> OfflineEngine:
    depth, num_drafts = request.param
    speculative = SpeculativeConfig(num_tokens=num_drafts, ngram_min=1, ngram_max=3) if num_drafts else None
    return OfflineEngine.load(
        EngineConfig(
            model=str(DEMO_FOLDER), device="cpu", dtype="float32", overlap_depth=depth, speculative=speculative
        )
    )


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()


def said_by(oracle: torch.nn.Module, **constraints: object) -> list[int]:
    """Return what transformers' greedy search says after PROMPT."""
    with torch.inference_mode():
        ids = oracle.generate(
            torch.tensor([PROMPT]), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, **constraints
        )
    return ids[0, len(PROMPT) :].tolist()


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, temperature=0.0, **fields)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(offline, oracle):
    free = said_by(oracle)
    num_tokens = oracle.config.vocab_size
    words = [[[free[0]]], [free[2:4]], [free[5:8], free[1:3], [free[4]]], [free[:2], free[:1]]]
    expected = [said_by(oracle, bad_words_ids=some) for some in words]
    allowed = sorted(set(free[::2]) | set(range(40, num_tokens, 3)))
    banned = sorted(set(range(num_tokens)) - set(allowed))
    expected += [said_by(oracle, suppress_tokens=banned)]
    expected += [said_by(oracle, suppress_tokens=banned, bad_words_ids=[free[0:1]])]
    kinds = [greedy(bad_words=some) for some in words]
    kinds += [greedy(allowed_token_ids=allowed), greedy(allowed_token_ids=allowed, bad_words=[free[0:1]])]
    eos = [oracle.config.eos_token_id] if isinstance(oracle.config.eos_token_id, int) else oracle.config.eos_token_id
    kinds = [replace(kind, stop_token_ids=eos, min_tokens=LENGTH) for kind in kinds]
    replies = run(offline, [(kind, None) for kind in [*kinds, greedy(stop_token_ids=eos, min_tokens=LENGTH)]])
    assert [reply.token_ids for reply in replies] == [*expected, free]
    assert len({tuple(token_ids) for token_ids in [*expected, free]}) > 4


@pytest.mark.slow
def test_every_kind_of_sampling_keeps_to_both_and_its_neighbours_do_not_notice(offline):
    allowed = list(range(3, 200))
    free = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, logprobs=3 if i % 2 else None) for i in range(4)]
    alone = run(offline, [(params, None) for params in free])
    filters = {"allowed_token_ids": allowed, "bad_words": [[5], [9, 9], [60, 61]]}
    bound = [replace(kind, max_tokens=40, min_tokens=0, **filters) for kind in KINDS]
    replies = run(offline, [(params, None) for params in [*free, *bound]])
    assert [reply.token_ids for reply in replies[:4]] == [reply.token_ids for reply in alone]
    for reply in replies[4:]:
        assert len(reply.token_ids) == 40
        assert set(reply.token_ids) <= set(allowed) - {5}
        assert (9, 9) not in set(zip(reply.token_ids, reply.token_ids[1:], strict=False))


def test_logprobs_are_of_the_distribution_without_the_filter(offline):
    free, bound = run(offline, [(greedy(logprobs=5), None), (greedy(logprobs=5, allowed_token_ids=[40]), None)])
    assert set(bound.token_ids) == {40}
    assert bound.logprobs[0].top_token_ids == free.logprobs[0].top_token_ids
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_grammar_holds_beside_a_filter(offline):
    banned = [TOKENIZER.token_to_id(digit) for digit in "56789"]
    kinds = [replace(kind, bad_words=[[id_] for id_ in banned]) for kind in KINDS]
    for reply in run(offline, [(kind, regex_grammar("page [0-9]{3}\\.")) for kind in kinds]):
        assert reply.finish_reason == "stop"
        assert re.fullmatch(r"page [0-9]{3}\.", TOKENIZER.decode(reply.token_ids))
        assert not set(reply.token_ids) & set(banned)
