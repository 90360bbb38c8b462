"""What a batch changes in a request's log-probabilities: nothing between steps of one shape, a rounding otherwise."""

import random

import pytest

from engine.core.local_client import GenerationResult
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from server.config.model_source import DEMO_FOLDER

DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(3000) for _ in range(length)] for length in (3, 17, 40, 100)]
PARAMS = [SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)] * len(PROMPTS)


def logprobs_of(generations: list[GenerationResult]) -> list[list[float]]:
    return [[entry.logprob for entry in generation.logprobs] for generation in generations]


def test_steps_of_one_shape_are_bit_equal_and_others_nearly() -> None:
    config = EngineConfig(model=str(DEMO_FOLDER), device="cpu", dtype="float32", enable_prefix_caching=False)
    engine = OfflineEngine.load(config)
    first, second = engine.generate(PROMPTS, PARAMS), engine.generate(PROMPTS, PARAMS)
    assert logprobs_of(first) == logprobs_of(second)
    alone = [engine.generate([prompt], PARAMS[:1])[0] for prompt in PROMPTS]
    assert [generation.token_ids for generation in alone] == [generation.token_ids for generation in first]
    for mine, batched in zip(logprobs_of(alone), logprobs_of(first), strict=True):
        assert mine == pytest.approx(batched, abs=1e-4)
    engine.loaded.close()
