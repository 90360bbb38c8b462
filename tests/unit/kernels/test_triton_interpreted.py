"""Runs triton_cases/ through Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before the first import of triton, which another test of this process may have done.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "triton_cases"


def _has_known_interpreter() -> bool:
    """Whether Triton is there in the version whose interpreter these cases were written for."""
    return importlib.util.find_spec("triton") is not None and importlib.metadata.version("triton").startswith("3.6.")


@pytest.mark.skipif(not _has_known_interpreter(), reason="needs triton 3.6, whose interpreter the cases know")
@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("*_cases.py")))
def test_triton_kernels_equal_their_specifications(name):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(CASES / name)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=CASES.parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
