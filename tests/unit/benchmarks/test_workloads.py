"""The offline workloads are those of every earlier measurement."""

import hashlib
import json

import pytest

from benchmarks.offline import _needs_prefix_cache
from benchmarks.report import BenchError
from benchmarks.workloads import workload


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
