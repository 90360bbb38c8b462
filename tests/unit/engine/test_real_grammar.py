"""Constrained rows through the real sampler on CPU: masks win; neighbours and logprobs know nothing of them."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from engine.core.grammars import Grammars
from engine.core.local_client import GenerationResult, _apply
from engine.grammar.compiler import GrammarCompiler
from engine.interface.config import EngineConfig
from engine.interface.protocol import AddRequest, GrammarSpec, SamplingParams, pack_token_ids
from engine.offline import OfflineEngine
from server.config.model_source import DEMO_FOLDER
from server.structured_output.grammar_spec import choice_grammar, json_schema_grammar, regex_grammar

TOKENIZER = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
PROMPT = TOKENIZER.encode("The answer as JSON:").ids
KINDS = [
    SamplingParams(max_tokens=150, temperature=0.0),
    SamplingParams(max_tokens=150, temperature=1.0, seed=1),
    SamplingParams(max_tokens=150, temperature=1.5, seed=2, top_k=20, top_p=0.8),
    SamplingParams(max_tokens=150, temperature=1.0, seed=3, min_p=0.3, stop_token_ids=[2]),
    SamplingParams(max_tokens=150, temperature=1.0, seed=4, presence_penalty=2.0, repetition_penalty=3.0),
    SamplingParams(max_tokens=150, temperature=1.0, seed=5, logit_bias={5: 100.0, 9: 100.0}, logprobs=2),
    SamplingParams(max_tokens=150, temperature=1.0, seed=6, stop_token_ids=[2], min_tokens=140),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[1, 2])
def offline(request: pytest.FixtureRequest) -> OfflineEngine:
    torch.manual_seed(0)
    return OfflineEngine.load(EngineConfig(model=str(DEMO_FOLDER), device="cpu", overlap_depth=request.param))


def run(offline: OfflineEngine, requests: list[tuple[SamplingParams, GrammarSpec | None]]) -> list[GenerationResult]:
    by_id = {str(i): GenerationResult() for i in range(len(requests))}
    for request_id, (params, grammar) in zip(by_id, requests, strict=True):
        message = AddRequest(request_id, pack_token_ids(PROMPT), params, offline.engine.clock(), grammar=grammar)
        offline.transport.inbox.append((0, message))
    while offline.transport.inbox or not offline.engine.is_idle:
        offline.engine.run_once()
        while offline.transport.outbox:
            _apply(offline.transport.outbox.popleft(), by_id)
    return list(by_id.values())


@pytest.mark.slow
def test_every_kind_of_sampling_keeps_to_the_schema(offline):
    for generation in run(offline, [(kind, json_schema_grammar(SCHEMA)) for kind in KINDS]):
        assert generation.finish_reason == "stop"
        value = json.loads(TOKENIZER.decode(generation.token_ids))
        assert set(value) == {"name", "size", "tags"}
        assert len(value["name"]) <= 8
        assert 0 <= value["size"] <= 999
        assert set(value["tags"]) <= {"red", "green"}


@pytest.mark.slow
def test_rows_without_a_grammar_say_what_they_say_alone(offline):
    free = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, logprobs=3 if i % 2 else None) for i in range(4)]
    alone = run(offline, [(params, None) for params in free])
    grammars = [regex_grammar("[a-f]{30}"), json_schema_grammar(SCHEMA), choice_grammar(["yes", "no"])]
    mixed = [(params, None) for params in free] + list(zip(KINDS, grammars, strict=False))
    beside = run(offline, mixed)
    assert [generation.token_ids for generation in beside[:4]] == [generation.token_ids for generation in alone]
    assert TOKENIZER.decode(beside[-1].token_ids) in ("yes", "no")


def test_logprobs_are_of_the_distribution_without_the_mask(offline):
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    free, bound = run(offline, [(params, None), (params, regex_grammar("[0-9]{3}"))])
    assert bound.token_ids != free.token_ids
    assert bound.logprobs[0].top_token_ids == free.logprobs[0].top_token_ids
    assert bound.logprobs[0].top_logprobs == pytest.approx(free.logprobs[0].top_logprobs, abs=1e-4)
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_ids_that_only_the_model_has_are_never_sampled():
    """A vocabulary padded beyond its tokenizer's, by less and by more than a word of the mask."""
    compiler = GrammarCompiler((DEMO_FOLDER / "tokenizer.json").read_bytes())
    num_tokens = TOKENIZER.get_vocab_size()
    for vocab_size in (num_tokens, num_tokens + 2, num_tokens + 150):
        grammars = Grammars(lambda: compiler, vocab_size=vocab_size)
        matcher = compiler.compile(GrammarSpec("start: /(.|\\n)+/"))
        masks, _ = grammars._fill(compiler, [matcher])
        allowed = [t for t in range(masks.shape[1] * 32) if masks[0, t // 32] >> t % 32 & 1]
        assert masks.shape[1] == -(-vocab_size // 32)
        assert max(allowed) < num_tokens
        assert min(allowed) > 2  # nor special tokens
        assert len(allowed) > num_tokens / 2


def test_ids_that_only_the_tokenizer_has_are_never_sampled():
    compiler = GrammarCompiler((DEMO_FOLDER / "tokenizer.json").read_bytes())
    masks, _ = Grammars(lambda: compiler, vocab_size=1000)._fill(
        compiler, [compiler.compile(GrammarSpec("start: /(.|\\n)+/"))]
    )
    allowed = [t for t in range(1024) if masks[0, t // 32] >> t % 32 & 1]
    assert masks.shape[1] == 32
    assert max(allowed) < 1000
