"""Weights on a CPU can have pages of 2 MiB: nothing that is imported makes torch decide against them before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import torch
import engine.process, engine.rank_process, quire
from engine.startup.load import _prepare_cpu
from models.config.model_config import ModelConfig
from models.parallel import TensorParallel
from pathlib import Path
import models
_prepare_cpu(ModelConfig.from_folder(Path(models.__file__).parent / "demo" / "checkpoint"), TensorParallel(0, 1))
print(torch.empty(64 << 20, dtype=torch.uint8).data_ptr() % 4096)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch asks Linux alone")
def test_large_tensors_begin_with_a_page() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split()[-1] == "0"  # torch aligns to pages what it asks large ones for, else to 64 bytes
