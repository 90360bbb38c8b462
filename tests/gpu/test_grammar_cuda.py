"""Constrained rows on the device: pinned masks, the Triton twin of allow_only, two steps in flight, graphs beside."""

from __future__ import annotations

import json

import msgspec
import pytest

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from server.config.model_source import DEMO_FOLDER
from server.structured_output.grammar_spec import json_schema_grammar, regex_grammar
from tests.unit.engine.test_real_grammar import KINDS, SCHEMA, TOKENIZER, run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def offline() -> OfflineEngine:
    return OfflineEngine.load(EngineConfig(model=str(DEMO_FOLDER), device="cuda", dtype="float32"))


def test_every_kind_of_sampling_keeps_to_the_schema_beside_free_rows(offline):
    free = [(SamplingParams(max_tokens=40, temperature=1.0, seed=i), None) for i in range(4)]
    bound = [(kind, json_schema_grammar(SCHEMA)) for kind in KINDS * 8]
    replies = run(offline, bound + free)
    for generation in replies[: len(bound)]:
        assert generation.finish_reason == "stop"
        value = json.loads(TOKENIZER.decode(generation.token_ids))
        assert set(value) == {"name", "size", "tags"}
        assert 0 <= value["size"] <= 999
    assert all(len(generation.token_ids) == 40 for generation in replies[len(bound) :])


def test_a_forced_text_comes_out_whole_whatever_the_sampling(offline):
    for generation in run(offline, [(kind, regex_grammar("page [0-9]{3} of 640\\.")) for kind in KINDS]):
        text = TOKENIZER.decode(generation.token_ids)
        assert text.startswith("page ")
        assert text.endswith(" of 640.")


def test_a_filter_of_tokens_holds_beside_free_rows(offline):
    free = [(SamplingParams(max_tokens=40, temperature=1.0, seed=i), None) for i in range(4)]
    alone = run(offline, free)
    allowed = list(range(3, 200))
    filters = {"max_tokens": 40, "min_tokens": 0, "allowed_token_ids": allowed, "bad_words": [[5], [9, 9]]}
    bound = [(msgspec.structs.replace(kind, **filters), None) for kind in KINDS * 4]
    replies = run(offline, bound + free)
    assert [reply.token_ids for reply in replies[len(bound) :]] == [reply.token_ids for reply in alone]
    for reply in replies[: len(bound)]:
        assert len(reply.token_ids) == 40
        assert set(reply.token_ids) <= set(allowed) - {5}
        assert (9, 9) not in set(zip(reply.token_ids, reply.token_ids[1:], strict=False))
