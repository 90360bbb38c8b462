"""Recurrent families in bf16 on the CPU: the check that tests/gpu/test_recurrent_bf16_cuda.py makes on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_config
from tests.support.models_harness import PagedRunner
from tests.support.rounding import RECURRENT, rounding_errors

pytestmark = pytest.mark.slow
FEW = ("qwen3_5", "falcon_h1")


class LossyRunner(PagedRunner):
    """Loses a part of every state after each step."""

    def step(self, chunks: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        logits = super().step(chunks)
        next(views for views in self.state_views if views)[0].pool.mul_(0.9)
        return logits


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == FEW[0] else pytest.mark.full) for kind in RECURRENT]
)
def test_a_recurrent_model_in_bf16_is_as_exact_as_transformers(kind: str, tmp_path: Path) -> None:
    theirs, ours = rounding_errors(tmp_path, make_config(kind))
    assert theirs.typical > 0
    assert all(error.is_about(theirs) for error in ours.values()), (theirs, ours)


@pytest.mark.full
@pytest.mark.parametrize("kind", FEW)
def test_a_state_that_loses_a_part_is_told_from_rounding(kind: str, tmp_path: Path) -> None:
    theirs, ours = rounding_errors(tmp_path, make_config(kind), make_runner=LossyRunner)
    assert ours["whole"].is_about(theirs)
    assert not ours["decode"].is_about(theirs), (theirs, ours)
