"""Launching a step never waits for the device, as a copy from pageable memory does: one a step costs 5 % of prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.local_client import generate
from engine.core.step import StepHandle, StepPlan, TokenMasks
from engine.device.decode_tails import DecodeStep
from engine.device.model_runner import ModelRunner, _Step
from engine.offline import OfflineEngine
from tests.gpu.test_engine_cuda import LENGTHS, checkpoint  # noqa: F401  a fixture
from tests.support.hybrid_model import LAYERS, load_hybrid
from tests.unit.engine.test_real_model import make_engine, mixed_params, prompts
from tests.unit.engine.test_states import params as params_of_hybrids
from tests.unit.engine.test_states import prompts as prompts_of_hybrids

pytestmark = pytest.mark.gpu


@pytest.fixture
def waits_are_errors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From the first element on, launching a step raises where it would wait. It may when kernels are compiled."""
    is_strict: list[int] = []
    forward = ModelRunner.forward

    def strict_forward(self: ModelRunner, plan: StepPlan) -> StepHandle:
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        try:
            return forward(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def strictly(sample: Callable[[Any, TokenMasks | None], None]) -> Callable[..., None]:
        def strict_sample(self: Any, masks: TokenMasks | None = None) -> None:
            torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
            try:
                sample(self, masks)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return strict_sample

    monkeypatch.setattr(ModelRunner, "forward", strict_forward)
    for kind in (_Step, DecodeStep):
        monkeypatch.setattr(kind, "sample", strictly(kind.sample))
    return is_strict


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_launches_of_attention_models(
    checkpoint: Path,  # noqa: F811
    waits_are_errors: list[int],
    enforce_eager: bool,
) -> None:
    settings = {"device": "cuda", "block_size": 16, "overlap_depth": 2, "kv_cache_memory_bytes": 64 << 20}
    engine, transport = make_engine(checkpoint, enforce_eager=enforce_eager, **settings)
    generate(engine, transport, prompts(*LENGTHS), mixed_params(len(LENGTHS)))
    waits_are_errors.append(1)
    results = generate(engine, transport, prompts(*LENGTHS), mixed_params(len(LENGTHS)))
    assert all(result.token_ids for result in results)


@pytest.mark.parametrize("layers", LAYERS)
def test_launches_of_hybrids(layers: str, waits_are_errors: list[int]) -> None:
    offline: OfflineEngine = load_hybrid(*LAYERS[layers], device="cuda", block_size=16, kv_cache_memory_bytes=64 << 20)
    offline.generate(prompts_of_hybrids(), params_of_hybrids())
    waits_are_errors.append(1)
    assert all(result.token_ids for result in offline.generate(prompts_of_hybrids(), params_of_hybrids()))
