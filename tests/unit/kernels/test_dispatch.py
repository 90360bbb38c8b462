"""An op runs its Triton twin where it can, else its specification, whose name and documentation it has."""

import subprocess
import sys

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import op, when_used

X = torch.zeros(2)


def double(x, *, times=2.0):
    """Double x."""
    return x + times


def test_an_op_runs_its_twin_only_where_that_can_run(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    asked = []
    made = op(double, lambda: lambda x, *, times: "twin", can_run=lambda x: asked.append(x) or True, takes_pdl=False)
    assert made(X, times=3.0) == "twin"
    assert asked[0] is X
    assert torch.equal(op(double, lambda: lambda x: "twin")(X), torch.full((2,), 2.0))
    assert (made.__name__, made.__doc__) == ("double", "Double x.")


def test_the_twin_is_told_of_dependent_launches(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "has_pdl", lambda device: True)
    assert op(double, lambda: lambda x, *, pdl: pdl, can_run=lambda x: True)(X) is True


def test_without_triton_an_op_is_its_specification_and_the_twin_is_never_named(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert op(double, lambda: 1 / 0) is double


def test_a_module_is_imported_when_one_of_its_attributes_is_first_asked_for(tmp_path, monkeypatch):
    (tmp_path / "rare").mkdir()
    (tmp_path / "rare" / "__init__.py").write_text("")
    (tmp_path / "rare" / "kernel.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = when_used("rare.kernel")
    assert when_used("rare.kernel") is module
    assert not (tmp_path / "rare" / "ran").exists()
    assert module.Path
    assert (tmp_path / "rare" / "ran").exists()
    import rare.kernel

    assert rare.kernel is module


@pytest.mark.slow
def test_a_start_does_not_import_the_kernels_of_all_models():
    script = """import sys
import kernels.ops, models.build
print(*(name for name, module in sys.modules.items() if type(module).__name__ == "_LazyModule"))"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    late = {"kernels.moe.triton", "kernels.lora.triton", "kernels.mamba2.triton", "kernels.delta_rule.triton"}
    assert {*run.stdout.split()} >= {*late, "kernels.linear.triton_fp8", "kernels.linear.triton_int"}
