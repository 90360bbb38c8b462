"""Several ranks that share a model: the tokens of one, whatever is asked."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.core.step import StepPlan, StepResult, TokenMasks
from engine.interface.config import EngineConfig, LoraSource, SpeculativeConfig
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.rank_process import run_plans
from engine.tensor_parallel.disk_shares import ShareJob
from engine.tensor_parallel.peer_shares import EndStep, PeerJob, ReadSlots, TellMemory
from tests.unit.engine.test_lora import adapters, base  # noqa: F401  (fixtures)
from tests.unit.engine.test_real_model import KV_BYTES_PER_BLOCK, mixed_params, prompts, tokens
from tests.unit.engine.test_speculative_model import repeating_prompts

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)


def config_of(base: Path, adapters: list[Path], **changes: object) -> EngineConfig:  # noqa: F811
    """Blocks of 4 tokens, steps of 24, and a pool so small that requests are preempted."""
    return EngineConfig(
        model=str(base),
        loras=[LoraSource(folder.name, str(folder)) for folder in adapters],
        device="cpu",
        block_size=4,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        max_model_len=120,
        **changes,
    )


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.full), 2], ids=["depth1", "depth2"])
def engines(
    request: pytest.FixtureRequest,
    base: Path,  # noqa: F811
    adapters: list[Path],  # noqa: F811
) -> Iterator[tuple[OfflineEngine, OfflineEngine]]:
    """One rank, and two. At depth 2 with drafts as well."""
    depth: int = request.param
    speculative = SpeculativeConfig(ngram_min=1) if depth == 2 else None
    made = config_of(base, adapters, overlap_depth=depth, speculative=speculative)
    alone = OfflineEngine.load(msgspec.structs.replace(made, kv_cache_memory_bytes=40 * KV_BYTES_PER_BLOCK))
    # a rank holds one of the two KV heads, so half the bytes are as many blocks
    half = msgspec.structs.replace(made, tensor_parallel_size=2, kv_cache_memory_bytes=20 * KV_BYTES_PER_BLOCK)
    ranked = OfflineEngine.load(half)
    yield alone, ranked
    ranked.loaded.close()


@pytest.mark.slow
def test_all_kinds_of_requests_give_the_tokens_of_one_rank(engines: tuple[OfflineEngine, OfflineEngine]) -> None:
    inputs = [*prompts(*LENGTHS), *repeating_prompts(4)]
    given = []
    for offline in engines:
        rounds = [
            tokens(offline.generate(inputs, mixed_params(len(inputs)), lora_indices=[0, 1, 2] * (len(inputs) // 3)))
            for _ in range(2)
        ]
        assert offline.engine.scheduler.num_preemptions > 0
        assert offline.engine.scheduler.kv.pool.num_used == 0
        given.append(rounds)
    assert given[0] == given[1]


@pytest.mark.slow
def test_scores_and_embeddings_are_those_of_one_rank(engines: tuple[OfflineEngine, OfflineEngine]) -> None:
    params = [SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2, logprobs=2)] * 2
    one, two = (offline.generate(prompts(30, 41), params) for offline in engines)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.token_ids == theirs.token_ids
        for name in ("prompt_logprobs", "logprobs"):
            found = [entry.logprob for entry in getattr(theirs, name)]
            assert found == pytest.approx([entry.logprob for entry in getattr(mine, name)], abs=1e-4)
    one, two = (offline.embed(prompts(9, 50), "mean") for offline in engines)
    for mine, theirs in zip(one, two, strict=True):
        vectors = [np.frombuffer(generation.embedding, dtype=np.float32) for generation in (mine, theirs)]
        np.testing.assert_allclose(*vectors, atol=1e-4)


@pytest.mark.slow
def test_the_panel_says_what_each_has(engines: tuple[OfflineEngine, OfflineEngine]) -> None:
    facts = engines[1].loaded.facts
    assert facts["Device"].startswith("2 × ")
    assert "on each of 2" in facts["Weights"]
    assert "on each of 2" in facts["KV cache"]
    assert engines[0].loaded.scheduler_config.num_pages == engines[1].loaded.scheduler_config.num_pages


@pytest.mark.slow
def test_a_second_split_model_in_one_process_is_refused(
    engines: tuple[OfflineEngine, OfflineEngine],
    base: Path,  # noqa: F811
) -> None:
    assert engines[1].loaded.ranks is not None
    with pytest.raises(StartupError, match="another such model needs its own process"):
        OfflineEngine.load(config_of(base, [], tensor_parallel_size=2))
    assert engines[1].generate([[1]], [SamplingParams(max_tokens=2)])[0].error is None


class Recorder:
    """Executor and handle in one, of which only the order of calls matters."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def forward(self, plan: StepPlan) -> "RecordedStep":
        """See Executor.forward."""
        self.calls.append(("forward", plan.step_id))
        return RecordedStep(self.calls, plan.step_id)

    def close(self) -> None:
        """See Executor.close."""


class RecordedStep:
    """StepHandle."""

    def __init__(self, calls: list[tuple[str, int]], step_id: int) -> None:
        self._calls = calls
        self._step_id = step_id

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See StepHandle.sample."""
        self._calls.append(("sample", self._step_id))

    def is_done(self) -> bool:
        """See StepHandle.is_done."""
        return True

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        self._calls.append(("wait", self._step_id))
        return StepResult(self._step_id, [])


def for_the_disk(job_id: int, after_step: int) -> ShareJob:
    return ShareJob(job_id, is_read=True, name=bytes(32), slots=[1, 2], after_step=after_step)


def for_a_peer(job_id: int, after_step: int) -> PeerJob:
    return ReadSlots(job_id, peer=0, sources=[3, 4], targets=[1, 2], after_step=after_step)


@pytest.mark.parametrize("make", [for_the_disk, for_a_peer, EndStep])
def test_a_job_waits_for_the_steps_before_it_and_for_no_other(make: Callable[[int, int], ShareJob | PeerJob]) -> None:
    executor = Recorder()

    def frame(message: StepPlan | ShareJob | PeerJob) -> bytes:
        return msgspec.msgpack.encode(message)

    def job(job_id: int, after_step: int) -> bytes:
        return frame(make(job_id, after_step))

    frames = [
        frame(StepPlan(7, [])),  # of an earlier engine
        job(0, -1),
        *(frame(StepPlan(step_id, [], copies_to_host=[(1, 2)])) for step_id in range(2)),
        job(1, 0),
        frame(TellMemory(3)),
        job(2, 1),
        frame(StepPlan(2, [])),
    ]
    run_plans(executor, iter([*frames, None]).__next__, lambda job: executor.calls.append(("share", job.job_id)))
    assert executor.calls == [
        ("forward", 7), ("sample", 7), ("wait", 7), ("share", 0),
        ("forward", 0), ("sample", 0),
        ("forward", 1), ("wait", 0), ("sample", 1),
        ("share", 1), ("share", 3),
        ("wait", 1), ("share", 2),
        ("forward", 2), ("sample", 2),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_rank_keeps_two_steps_in_flight_as_the_first_does() -> None:
    executor = Recorder()
    frames = [msgspec.msgpack.encode(StepPlan(step_id, [])) for step_id in range(3)]
    run_plans(executor, iter([*frames, None]).__next__)
    assert executor.calls == [
        ("forward", 0), ("sample", 0),
        ("forward", 1), ("wait", 0), ("sample", 1),
        ("forward", 2), ("wait", 1), ("sample", 2),
    ]  # fmt: skip
