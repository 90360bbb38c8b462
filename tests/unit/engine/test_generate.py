"""Offline generation is the same loop with queues instead of sockets."""

import pytest

from engine.core.local_client import generate
from engine.interface.protocol import SamplingParams
from tests.support.engine_harness import Harness
from tests.support.fake_executor import expected_tokens


@pytest.fixture
def harness():
    harness = Harness(max_queued_requests=3)
    del harness.transport.send  # this client reads the transport itself
    return harness


def test_all_prompts_are_answered_in_order_though_the_queue_is_short(harness):
    prompts = [[i % 5] * (1 + i) for i in range(20)]
    params = [SamplingParams(max_tokens=1 + i % 7, stop_token_ids=[3]) for i in range(20)]
    generations = generate(harness.engine, harness.transport, prompts, params)
    for prompt, sampling, generation in zip(prompts, params, generations, strict=True):
        assert generation.token_ids == expected_tokens(prompt, sampling, max_num_tokens=64)
        assert generation.finish_reason in ("stop", "length")
        assert generation.error is None
    assert harness.engine.is_idle


def test_a_prompt_that_fails_has_its_error_and_the_others_their_tokens(harness):
    params = [SamplingParams(max_tokens=2)] * 2
    failed, served = generate(harness.engine, harness.transport, [[1] * 99, [1]], params)
    assert failed.error is not None
    assert failed.error.code == "context_length_exceeded"
    assert failed.token_ids == []
    assert len(served.token_ids) == 2


def test_logprobs_and_cached_tokens_come_along(harness):
    params = [SamplingParams(max_tokens=3, logprobs=0)]
    generate(harness.engine, harness.transport, [[1] * 9], params)
    (generation,) = generate(harness.engine, harness.transport, [[1] * 9], params)
    assert len(generation.logprobs) == 3
    assert generation.num_cached_tokens == 8
