"""Recurrent families in bf16 on the device err no more than transformers' own bf16 does, against its float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from tests.gpu.test_families_cuda import wide_config
from tests.gpu.test_models_cuda import IGNORED
from tests.support.checkpoints import make_config
from tests.support.rounding import RECURRENT, rounding_errors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make_config", [make_config, wide_config], ids=["tiny", "wide"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_bf16_on_the_device_is_as_exact_as_transformers(kind: str, make_config, tmp_path: Path) -> None:
    if kind in IGNORED and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("this transformers takes no notice of " + IGNORED[kind])
    theirs, ours = rounding_errors(tmp_path, make_config(kind), torch.device("cuda"))
    assert all(error.is_about(theirs) for error in ours.values()), (theirs, ours)
