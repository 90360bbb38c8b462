"""Runs triton_cases/ through Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before the first import of triton, which another test of this process may have done. One
process takes all the files, as importing torch costs more than most of them; conftest.py seeds each case anew.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "triton_cases"
NAMES = sorted(path.stem for path in CASES.glob("*_cases.py"))


def _has_known_interpreter() -> bool:
    """Whether Triton is there in the version whose interpreter these cases were written for."""
    return importlib.util.find_spec("triton") is not None and importlib.metadata.version("triton").startswith("3.6.")


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """By file of those that this session asks for: what became of each of its cases, "" if all went well."""
    asked = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    report = tmp_path_factory.mktemp("triton") / "report.xml"
    files = [str(CASES / f"{name}.py") for name in NAMES if name in asked]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=CASES.parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert report.is_file(), run.stdout[-6000:] + run.stderr[-2000:]
    found = {name: [] for name in asked}
    for case in ET.parse(report).iter("testcase"):
        file = (case.get("classname") or case.get("name")).rpartition(".")[2]  # without a class: it was not collected
        troubles = [*case.iter("failure"), *case.iter("error")]
        found[file].append("".join(f"{case.get('name')}\n{trouble.text}\n" for trouble in troubles))
    assert run.returncode == 0 or any(map(any, found.values())), run.stdout[-6000:] + run.stderr[-2000:]
    return found


@pytest.mark.skipif(not _has_known_interpreter(), reason="needs triton 3.6, whose interpreter the cases know")
@pytest.mark.parametrize("name", NAMES)
def test_triton_kernels_equal_their_specifications(name, outcomes):
    assert outcomes[name], "no case of the file ran"
    trouble = "".join(outcomes[name])
    assert not trouble, trouble[-6000:]
