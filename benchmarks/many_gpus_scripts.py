"""The scripts of benchmarks.many_gpus: tests and measurements for the GPUs of one host, with the seconds of each.

expected_s are of H100s with empty kernel caches: as measured on four of them on 2026-11-26 (the many-gpus files of
benchmarks/results), less what has gone since: second runs, which differed from the first by 1 % at most, most of the
warm-up of prompts, imports while all GPUs are busy, half of the rounds of served loads, and the slow making of a
tokenizer. The router's loads, and tests that are processes of their own, are estimates. Those of more than four GPUs
are those of four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.gpu_scripts import Script

PARTS = ("tests", "sums", "offline", "mixtures", "served", "replicas")  # in the order of their importance
MORE_PARTS = ("more-tests", "mixtures-2")  # run when they are named
SIZES = (2, 4, 8)
# Of a GPU: tests mostly import and compile. The most of a GPU at once, of four, are four of four GPUs and four of two
_TEST_SHARE = 1 / 8
_SERVER_FLAGS = ("--max-model-len", "8192", "--no-prefix-caching")
_TEST_S, _DAEMON_TEST_S, _KILLED_TEST_S = 45.0, 50.0, 35.0
_SUMS_S, _MOE_RANKS_S, _SERVED_S, _REPLICAS_S = 15.0, 8.0, 75.0, 53.0
_OFFLINE_S = {  # by shape and GPUs
    ("llama-3.1-8b", 1): 31.0,
    ("llama-3.1-8b", 2): 32.0,
    ("llama-3.1-8b", 4): 21.0,
    ("llama-3.1-70b", 2): 83.0,  # in FP8
    ("llama-3.1-70b", 4): 72.0,
    ("qwen3-30b-a3b", 2): 41.0,
    ("qwen3-30b-a3b", 4): 41.0,
}
_PATIENCE = 1.5  # limit of a script by its expected time: one that hangs takes no more of the others' time
_CPU_TIMEOUT_S = 150.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that the scripts run at: those of a device."""

    device: str
    dense: str  # shapes
    large: str
    experts: str
    workloads: tuple[str, ...]
    engine_flags: tuple[str, ...] = ()
    load_flags: tuple[str, ...] = ()  # of benchmarks.rank_loss and benchmarks.replicas
    cut_flags: tuple[str, ...] = ()


GPU = Sizes(
    "cuda",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-30b-a3b",
    ("single", "batch8", "mixed64", "prefill16"),
    load_flags=("--rounds", "4"),
)
CPU = Sizes(
    "cpu",
    "tiny",
    "tiny",
    "tiny-moe",
    ("alone", "eight"),
    engine_flags=("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB"),
    load_flags=("--concurrency", "2", "--rounds", "2", "--input-len", "8", "--output-len", "4", "--processes", "1"),
    cut_flags=("--kill-after", "0.2", "--cut-len", "1500"),
)


def scripts(sizes: Sizes, num_gpus: int, *, router: str) -> Iterator[Script]:
    """Yield every script, in the order in which they begin: neighbours in it share the GPUs.

    router: benchmarks.replicas --router. On a CPU no script has an expected time.
    """
    for script in _scripts(sizes, num_gpus, router):
        if sizes is GPU:
            yield dataclasses.replace(script, timeout_s=_PATIENCE * script.expected_s)
        else:
            yield dataclasses.replace(script, timeout_s=_CPU_TIMEOUT_S, expected_s=0.0)


def _scripts(sizes: Sizes, num_gpus: int, router: str) -> Iterator[Script]:
    counts = [count for count in SIZES if count <= num_gpus]
    most, large = counts[-1], counts[1:] or counts
    yield from _split_tests(counts)
    for count in large:
        yield _sums(sizes, count)
    for count in large[:1]:
        yield _offline("offline", sizes, sizes.dense, count)
        if count > 2:
            yield _offline("offline", sizes, sizes.large, count, prefix="large-")
    yield _offline("offline", sizes, sizes.large, 2, "--quantization", "fp8", suffix="-fp8", prefix="large-")
    if most > 2:  # beside it, on the other GPUs
        yield _offline("offline", sizes, sizes.dense, 2)
    yield _offline("offline", sizes, sizes.dense, 1)
    moe = ("benchmarks.moe_ranks", "--device", sizes.device, "--shapes", "qwen3-30b-a3b", "--ranks", "2,4")
    yield Script("mixtures", "moe-ranks", moe, 1, 0, expected_s=_MOE_RANKS_S)
    if most > 2:
        yield _sums(sizes, 2)
    for count in large:
        if count > 4:
            yield _offline("offline", sizes, sizes.dense, count)
            yield _offline("offline", sizes, sizes.large, count, prefix="large-")
        yield _offline("mixtures", sizes, sizes.experts, count, "--expert-parallel", suffix="-whole")
        yield _offline("mixtures", sizes, sizes.experts, count)
    shape = ("--shape", sizes.dense, *_SERVER_FLAGS, *sizes.engine_flags, *sizes.load_flags)
    served = ("benchmarks.rank_loss", *shape, "--tensor-parallel-size", str(most), *sizes.cut_flags)
    yield Script("served", f"served-tp{most}", served, most, 0, expected_s=_SERVED_S)
    replicas = ("benchmarks.replicas", "--replicas", str(most), "--router", router, *shape)
    yield Script("replicas", f"replicas-{most}", replicas, most, 0, expected_s=_REPLICAS_S)
    yield from _more_tests(counts)
    if most > 2:
        yield _offline("mixtures-2", sizes, sizes.experts, 2)
        yield _offline("mixtures-2", sizes, sizes.experts, 2, "--expert-parallel", suffix="-whole")


def _split_tests(counts: Sequence[int]) -> Iterator[Script]:
    """Yield the tests of tensor_parallel by themselves, those of most GPUs first: all run at the same time."""
    for count in reversed(counts):
        gpus = f"{count}_gpus"
        yield _test("tests", f"split-{count}", "tensor_parallel", count, f"several and {gpus} and graphs and depth2")
        yield _test("tests", f"split-{count}-eager", "tensor_parallel", count, f"several and {gpus} and eager")
        yield _test("tests", f"split-{count}-sums", "tensor_parallel", count, f"sums and {gpus} and graphs")
    yield _test("tests", "split-2-depth1", "tensor_parallel", 2, "several and 2_gpus and depth1")
    yield _test("tests", "split-2-sums-eager", "tensor_parallel", 2, "sums and 2_gpus and eager")
    if 4 in counts:
        yield _test("tests", "disaggregated", "disaggregation", 4, "answers_of_four", expected_s=_DAEMON_TEST_S)
    yield _test("tests", "killed", "tensor_parallel", 2, "killed", expected_s=_KILLED_TEST_S)
    yield _test("tests", "daemon", "tensor_parallel", 2, "daemon", expected_s=_DAEMON_TEST_S)


def _more_tests(counts: Sequence[int]) -> Iterator[Script]:
    """Yield the tests of the sums in one kernel, of whole experts, and of lost ranks on two sides."""
    yield _test("more-tests", "sums", "one_shot_all_reduce", counts[-1], "every_rank", expected_s=35)
    for count in reversed([count for count in counts if count <= 4]):
        words = f"{count}_gpus and graphs"
        yield _test("more-tests", f"experts-{count}", "expert_parallel", count, words, expected_s=185)
    if 4 in counts:
        yield _test("more-tests", "disaggregated-killed", "disaggregation", 4, "killed_on_either", expected_s=180)
    yield _test("more-tests", "experts-2-eager", "expert_parallel", 2, "2_gpus and eager", expected_s=125)


def _test(part: str, name: str, module: str, num_gpus: int, words: str, *, expected_s: float = _TEST_S) -> Script:
    """Return one process of pytest. words: all are part of the names of its tests."""
    flags = ("-m", "gpu", "-vv", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-k", words)
    command = ("pytest", *flags, f"tests/gpu/test_{module}_cuda.py")
    return Script(part, f"tests-{name}", command, num_gpus, 0, _TEST_SHARE, expected_s)


def _sums(sizes: Sizes, count: int) -> Script:
    command = ("benchmarks.collectives", "--device", sizes.device, "--ranks", str(count))
    return Script("sums", f"sums-{count}", command, count, 0, expected_s=_SUMS_S)


def _offline(
    part: str, sizes: Sizes, shape: str, count: int, *flags: str, suffix: str = "", prefix: str = ""
) -> Script:
    """Return one process of `quire bench offline`. prefix, suffix: what its name says of its shape and flags."""
    split = () if count == 1 else ("--tensor-parallel-size", str(count))
    flags = (*sizes.workloads, "--shape", shape, "--runs", "1", *split, *flags, *sizes.engine_flags)
    name = f"{prefix if sizes.large == sizes.dense else ''}{shape}-tp{count}{suffix}"
    expected_s = _OFFLINE_S.get((shape, min(count, 4)), 0.0)  # of a CPU: none
    command = ("server", "bench", "offline", *flags)
    return Script(part, name, command, count, 0, expected_s=expected_s, imports="benchmarks.offline")
