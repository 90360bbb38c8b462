"""Whole models of the real shapes, random weights, bf16: hundreds of greedy steps, judged by plain torch in float32.

The judge is fed the engine's tokens (tests/gpu/teacher_forcing.py). Torch's own bf16 path, fed the same, says how much
of an error bf16 costs by itself.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from engine.core.local_client import GenerationResult, generate
from engine.interface.config import EngineConfig
from engine.interface.protocol import AbortRequest, SamplingParams
from engine.offline import OfflineEngine
from engine.startup.load import LoadedEngine, load_engine
from models.config.model_config import ModelConfig
from tests.gpu.teacher_forcing import Reference, Scores, Upcast, dummy_reader

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
MAX_JUDGED = 32  # requests of one run that the references are fed
CHUNK_TOKENS = 320  # per step where prompts are chunked: more than the decoding rows of any case
# Of errors in logits, in standard deviations over the vocabulary: what bf16 may cost at all, how much more ours may be
# than torch's, and how many times torch's the worst of ours
MAX_BF16_ERROR, MAX_RATIO, MAX_WORST = 0.1, 1.15, 8.0


@dataclass(frozen=True)
class Case:
    """One batch of greedy requests."""

    num_requests: int
    is_chunked: bool = False
    num_logprobs: int | None = None


@dataclass(frozen=True)
class Shape:
    """A model's shape, and what runs on it."""

    name: str
    num_steps: int
    cases: tuple[Case, ...]


SHAPES_AND_CASES = [
    Shape("qwen3-0.6b", 200, (Case(1), Case(8, True, 20), Case(64), Case(256, False, 20), Case(256, True))),
    Shape("llama-3.1-8b", 200, (Case(1), Case(32, True, 20), Case(256))),
]


@dataclass(frozen=True)
class Run:
    """What an engine made of a case."""

    name: str
    prompts: list[list[int]]
    generations: list[GenerationResult]


@dataclass(frozen=True)
class Runs:
    """Every run of a shape, by depth; all engines are closed."""

    config: ModelConfig
    by_depth: dict[int, list[Run]]


@dataclass(frozen=True)
class Verdict:
    """A run as the two references see it."""

    run: Run
    exact: Scores  # float32
    rounded: Scores  # torch's bf16


@pytest.fixture(scope="module", params=SHAPES_AND_CASES, ids=lambda shape: shape.name)
def runs(request: pytest.FixtureRequest) -> Runs:
    """With and without graphs, at depth 1 and 2, every case."""
    shape: Shape = request.param
    by_depth: dict[int, list[Run]] = {1: [], 2: []}
    for enforce_eager in (False, True):
        loaded = _load(shape.name, enforce_eager=enforce_eager)
        for case in shape.cases:
            for depth, done in by_depth.items():
                done.append(_run(loaded, shape, case, depth=depth, name=f"{shape.name} eager={enforce_eager} {case}"))
        loaded.runner.close()
        del loaded
        _free_memory()
    return Runs(ModelConfig.from_folder(SHAPES / shape.name), by_depth)


@pytest.fixture(scope="module")
def verdicts(runs: Runs) -> list[Verdict]:
    """The runs of depth 2, judged: one reference in memory at a time."""
    judged = [(run, *_judged(run)) for run in runs.by_depth[2]]
    scores: list[list[Scores]] = []
    for reader in (Upcast(dummy_reader(CUDA), torch.float32), dummy_reader(CUDA)):
        reference = Reference(runs.config, reader)
        scores.append([reference.score(prompts, generations) for _, prompts, generations in judged])
        del reference
        _free_memory()
    return [Verdict(*parts) for parts in zip((run for run, _, _ in judged), *scores, strict=True)]


def test_depth_1_and_depth_2_give_the_same_tokens(runs: Runs) -> None:
    for one, two in zip(runs.by_depth[1], runs.by_depth[2], strict=True):
        tokens = [[generation.token_ids for generation in run.generations] for run in (one, two)]
        assert tokens[0] == tokens[1], one.name


def test_every_token_is_the_best_or_within_bf16_of_it(verdicts: list[Verdict]) -> None:
    tolerance = MAX_WORST * max(_errors(verdict)[1] for verdict in verdicts if verdict.exact.logprobs.numel())
    for verdict in verdicts:
        gaps = verdict.exact.gaps / verdict.exact.spreads
        best = float((gaps == 0).float().mean())
        print(f"{verdict.run.name}: {len(gaps)} tokens, {best:.4f} the best, worst gap {gaps.max():.4f}")
        assert float(gaps.max()) < tolerance, verdict.run.name
        assert best > 0.75, verdict.run.name


def test_logits_are_as_near_to_float32_as_those_of_torch_in_bf16(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        if verdict.exact.logprobs.numel():
            rms, torch_rms, worst = _errors(verdict)
            print(f"{verdict.run.name}: error {rms:.4f} rms {worst:.4f} worst, torch's {torch_rms:.4f} rms")
            assert torch_rms < MAX_BF16_ERROR, verdict.run.name
            assert rms < MAX_RATIO * torch_rms, verdict.run.name
            assert worst < MAX_WORST * torch_rms, verdict.run.name


def test_512_concurrent_requests_with_random_aborts_leave_every_block_free() -> None:
    loaded = _load("qwen3-0.6b", enforce_eager=False)
    # blocks for about a third of what the running requests grow to
    scheduler_config = msgspec.structs.replace(loaded.scheduler_config, num_pages=1200)
    offline = OfflineEngine(dataclasses.replace(loaded, scheduler_config=scheduler_config), overlap_depth=2)
    engine, draw = offline.engine, random.Random(1)
    shared = [draw.randrange(10_000) for _ in range(64)]
    prompts = [shared[: draw.randrange(64)] + [draw.randrange(10_000) for _ in range(draw.randint(1, 40))]
               for _ in range(512)]  # fmt: skip
    params = [
        SamplingParams(max_tokens=draw.randint(1, 300), temperature=draw.choice([0.0, 0.8]), seed=i)
        for i in range(len(prompts))
    ]
    run_once, aborted = engine.run_once, []

    def run_and_abort() -> None:
        if draw.random() < 0.3:  # at whatever stage it is, and also such as have ended
            aborted.append(str(draw.randrange(len(prompts))))
            offline.transport.inbox.append((0, AbortRequest(aborted[-1])))
        run_once()
        engine.scheduler.check()

    engine.run_once = run_and_abort  # type: ignore[method-assign]
    generations = generate(engine, offline.transport, prompts, params)
    reasons = [generation.finish_reason for generation in generations]
    print(f"{len(aborted)} aborts sent, {reasons.count('abort')} met, {engine.scheduler.num_preemptions} preemptions")
    assert reasons.count("abort") > 20
    assert engine.scheduler.num_preemptions > 0
    for generation, wanted in zip(generations, params, strict=True):
        assert generation.finish_reason == "abort" or len(generation.token_ids) == wanted.max_tokens
    assert engine.scheduler.kv.pool.num_used == 0
    loaded.runner.close()


def _load(shape: str, *, enforce_eager: bool) -> LoadedEngine:
    return load_engine(
        EngineConfig(
            model=str(SHAPES / shape),
            load_format="dummy",
            device="cuda",
            attention_backend="triton",
            max_model_len=1024,
            max_num_seqs=256,
            kv_cache_memory_bytes=10 * 1024**3,
            enforce_eager=enforce_eager,
        ),
        lambda stage: None,
    )


def _run(loaded: LoadedEngine, shape: Shape, case: Case, *, depth: int, name: str) -> Run:
    """Prompts of any length, each with an end of its own."""
    if case.is_chunked:
        config = msgspec.structs.replace(loaded.scheduler_config, max_num_batched_tokens=CHUNK_TOKENS)
        loaded = dataclasses.replace(loaded, scheduler_config=config)
    draw = random.Random(case.num_requests)
    prompts = [[draw.randrange(10_000) for _ in range(draw.randint(16, 128))] for _ in range(case.num_requests)]
    params = [
        SamplingParams(max_tokens=shape.num_steps + i % 13, temperature=0.0, logprobs=case.num_logprobs)
        for i in range(case.num_requests)
    ]
    generations = OfflineEngine(loaded, overlap_depth=depth).generate(prompts, params)
    assert [len(generation.token_ids) for generation in generations] == [wanted.max_tokens for wanted in params]
    return Run(name, prompts, generations)


def _judged(run: Run) -> tuple[list[list[int]], list[GenerationResult]]:
    """Requests from all over the batch."""
    stride = -(-len(run.prompts) // MAX_JUDGED)
    return run.prompts[::stride], run.generations[::stride]


def _errors(verdict: Verdict) -> tuple[float, float, float]:
    """Of the log-probabilities that the engine named, in spreads: its rms error, that of torch in bf16, its worst."""
    named = [entry.top_logprobs for generation in _judged(verdict.run)[1] for entry in generation.logprobs]
    exact, spreads = verdict.exact.logprobs, verdict.exact.spreads[:, None]
    ours, torchs = (torch.tensor(named) - exact) / spreads, (verdict.rounded.logprobs - exact) / spreads
    return float(ours.square().mean().sqrt()), float(torchs.square().mean().sqrt()), float(ours.abs().max())


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
