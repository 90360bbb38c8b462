"""The offline workloads are those of every earlier measurement."""

import argparse
import hashlib
import json
from types import SimpleNamespace

import pytest

from benchmarks import offline
from benchmarks.agents import LONGEST, NUM_AGENTS, NUM_TURNS, agents, run_agents
from benchmarks.offline import _needs_prefix_cache
from benchmarks.report import BenchError
from benchmarks.workloads import workload
from engine.core.local_client import GenerationResult
from engine.interface.protocol import RequestFailed, SamplingParams
from server.commands.bench.flags import add_offline_flags


def test_mixed256_has_the_lengths_of_the_published_figures() -> None:
    requests = workload("mixed256")
    assert len(requests) == 256
    assert sum(len(prompt) for prompt, _ in requests) == 143_618
    assert sum(num_tokens for _, num_tokens in requests) == 137_723


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("single", "d6064ac6ff86d72b"),
        ("batch8", "570535bba888fab0"),
        ("mixed64", "2d7779b3351f499c"),
        ("mixed256", "e17fd04843c8ad77"),
        ("seed64", "d92bc21617cfd3fd"),
        ("prefill", "169a0dfb519a94dd"),
    ],
)
def test_workloads_never_change(name: str, digest: str) -> None:
    assert hashlib.sha256(json.dumps(workload(name)).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(("name", "count", "num_tokens"), [("batch8", 8, 8), ("prefill16", 4, 1)])
def test_a_warm_up_is_shorter_than_what_it_warms_up(
    name: str, count: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[offline.Requests] = []

    def run(loaded: None, requests: offline.Requests) -> dict[str, float]:
        runs.append(requests)
        return {"seconds": float(len(runs))}

    monkeypatch.setattr(offline, "_run", run)
    requests = workload(name)
    assert offline.measure(None, requests, runs=2) == {"seconds": 2.0, "all_seconds": [2.0, 3.0]}
    assert runs[1:] == [requests] * 2
    assert [prompt for prompt, _ in runs[0]] == [prompt for prompt, _ in requests[:count]]
    assert {num for _, num in runs[0]} == {num_tokens}


def test_smaller_mixed_workloads_are_the_first_requests_of_the_largest() -> None:
    assert workload("mixed64") == workload("mixed128")[:64] == workload("mixed256")[:64]


@pytest.mark.parametrize(
    ("shape", "flags", "longest", "context"),
    [
        ("llama-3.1-8b", (), 1536, 8192),
        ("llama-3.1-8b", (), 30_128, 30_128),
        ("qwen3-0.6b", (), 131_072, 40_960),
        ("llama-3.1-8b", ("--max-model-len", "4096"), 30_128, 4096),
    ],
)
def test_the_default_context_has_room_for_the_longest_request(
    shape: str, flags: tuple[str, ...], longest: int, context: int
) -> None:
    parser = argparse.ArgumentParser()
    add_offline_flags(parser)
    arguments = parser.parse_args(["long", "--shape", shape, *flags])
    _, config = offline.engine_config(arguments, longest=longest)
    assert config.max_model_len == context


@pytest.mark.parametrize(
    ("most", "remedy"), [(40_960, "give it --max-model-len 30128"), (8192, "choose a model with a longer one")]
)
def test_a_context_that_is_too_short_for_a_workload_is_told_with_its_remedy(most: int, remedy: str) -> None:
    loaded = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_model_len=8192),
        model_config=SimpleNamespace(max_context_len=most, vocab_size=50_000),
    )
    with pytest.raises(BenchError, match=f"needs a context of 30,128 tokens, and this model has 8,192 here: {remedy}"):
        offline._fit(loaded, "long", [([1] * 30_000, 128)])


def test_an_unknown_workload_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        workload("nope")


def test_prompts_that_share_a_prefix_are_measured_with_the_cache_and_alone() -> None:
    requests = workload("shared")
    assert len(requests) == 256
    assert {(tuple(prompt[:2048]), len(prompt), num_tokens) for prompt, num_tokens in requests} == {
        (tuple(requests[0][0][:2048]), 2176, 128)
    }
    assert _needs_prefix_cache(["shared"])
    assert not _needs_prefix_cache(["single", "batch8"])
    with pytest.raises(BenchError, match="Run shared without other workloads"):
        _needs_prefix_cache(["single", "shared"])


class Recorder:
    """Answers with one number over and over; a prompt's cached tokens are those of the longest earlier context."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationResult]:
        results = []
        for prompt, each in zip(prompts, params, strict=True):
            cached = max((len(seen) for seen in self.contexts if prompt[: len(seen)] == seen), default=0)
            results.append(GenerationResult(token_ids=[7] * each.max_tokens, num_cached_tokens=cached))
        self.contexts += [prompt + result.token_ids for prompt, result in zip(prompts, results, strict=True)]
        return results


def test_agents_take_turns_that_begin_with_all_before_them_and_part_once() -> None:
    recorder = Recorder()
    totals = run_agents(recorder, agents(0, 200_000))
    half = NUM_TURNS // 2
    assert totals.num_requests == NUM_AGENTS * (half + 2 * half) == len(recorder.contexts)
    assert max(map(len, recorder.contexts)) <= LONGEST
    first = [context for context in recorder.contexts if context[:1600] == recorder.contexts[0][:1600]]
    assert len(first) == 3 * half
    new = totals.num_input_tokens - totals.num_cached_tokens
    assert new < totals.num_input_tokens / 10  # a turn computes what it adds; the first one the instructions as well
    assert totals.num_output_tokens == sum(
        agent_turn.num_answered
        for agent in agents(0, 200_000)
        for turns in (agent.trunk, *agent.branches)
        for agent_turn in turns
    )


def test_agents_of_another_seed_share_no_instructions() -> None:
    assert {tuple(agent.instructions[:4]) for agent in agents(0, 200_000)}.isdisjoint(
        tuple(agent.instructions[:4]) for agent in agents(1, 200_000)
    )


def test_a_failed_turn_is_told() -> None:
    class Failing(Recorder):
        def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationResult]:
            results = super().generate(prompts, params)
            results[3].error = RequestFailed("1", "engine_error", "no more memory")
            return results

    with pytest.raises(RuntimeError, match=r"a request of 1,\d+ tokens failed: no more memory"):
        run_agents(Failing(), agents(0, 200_000))
