"""Runs triton_cases/ through Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before the first import of triton, which another test of this process may have done. One
process takes all the files that are asked for, one after the other, as importing torch costs more than most of them;
conftest.py seeds each case anew.
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


RUN = """
import sys
import pytest
for line in sys.stdin:
    code = pytest.main(line.rstrip("\\n").split("\\t"))
    print(f"\\nended {int(code)}", flush=True)
"""


@pytest.fixture(scope="module")
def interpreter():
    """A process that runs pytest with the arguments of each line it is sent, and says how it ended."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
        cwd=CASES.parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


def outcomes(interpreter: subprocess.Popen[str], name: str, marked: str, folder: Path) -> list[str]:
    """Run the cases of a file; return what became of each, "" if all went well."""
    report = folder / "report.xml"
    print(
        "-q", "-m", marked, f"--junitxml={report}", CASES / f"{name}.py", sep="\t", file=interpreter.stdin, flush=True
    )
    output = []
    for line in interpreter.stdout:
        if line.startswith("ended "):
            break
        output.append(line)
    said = "".join(output)[-6000:]
    assert report.is_file(), said
    found = []
    for case in ET.parse(report).iter("testcase"):
        troubles = [*case.iter("failure"), *case.iter("error")]
        found.append("".join(f"{case.get('name')}\n{trouble.text}\n" for trouble in troubles))
    assert line in ("ended 0\n", "ended 5\n") or any(found), said  # 5: no case has the mark
    return found


pytestmark = pytest.mark.skipif(not _has_known_interpreter(), reason="needs triton 3.6, for which the cases are")


@pytest.mark.parametrize("name", NAMES)
def test_triton_kernels_equal_their_specifications(name, interpreter, tmp_path):
    found = outcomes(interpreter, name, "not full", tmp_path)
    assert found, "no case of the file ran"
    trouble = "".join(found)
    assert not trouble, trouble[-6000:]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_rest_of_the_tables_equals_the_specifications(name, interpreter, tmp_path):
    trouble = "".join(outcomes(interpreter, name, "full", tmp_path))
    assert not trouble, trouble[-6000:]
