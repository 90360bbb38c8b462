"""An op runs its Triton twin where it can, else its specification, whose name and documentation it has."""

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import dispatch, ops
from kernels.dispatch import op, when_used
from kernels.linear import eight_bits

X = torch.zeros(2)
# Parameters that no caller of the op sets
UNSERVED = {"fused_moe": {"rounding"}}


def double(x, *, times=2.0):
    """Double x."""
    return x + times


@pytest.fixture
def twins(monkeypatch):
    """A module of twins, `twins`, and Triton, as far as dispatch can see."""
    module = sys.modules["twins"] = ModuleType("twins")
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    yield module
    del sys.modules["twins"]


def test_an_op_runs_its_twin_only_where_that_can_run(twins):
    asked = []
    twins.double = lambda x, *, times: "twin"
    made = op(double, "twins", can_run=lambda x: asked.append(x) or True, takes_pdl=False)
    assert made(X, times=3.0) == "twin"
    assert asked[0] is X
    assert torch.equal(op(double, "twins")(X), torch.full((2,), 2.0))
    assert (made.__name__, made.__doc__) == ("double", "Double x.")


def test_the_twin_is_told_of_dependent_launches(twins, monkeypatch):
    monkeypatch.setattr(dispatch, "has_pdl", lambda device: True)
    twins.double = lambda x, *, pdl: pdl
    assert op(double, "twins", can_run=lambda x: True)(X) is True


def test_without_triton_an_op_is_its_specification_and_the_twins_are_never_imported(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert op(double, "there.is.none") is double


@pytest.mark.parametrize("module", [ops, eight_bits], ids=lambda module: module.__name__)
def test_every_op_has_a_twin_with_the_parameters_of_its_specification(module):
    """Read from the sources, so that it needs no Triton."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "op"]
    assert made
    for call in made:
        name, twins = call.args[0].attr, call.args[1].value
        takes_pdl = not any(keyword.arg == "takes_pdl" for keyword in call.keywords)
        source = ast.parse(Path(importlib.util.find_spec(twins).origin).read_text())
        (twin,) = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name]
        parameters = {argument.arg for argument in (*twin.args.args, *twin.args.kwonlyargs)}
        wanted = {*inspect.signature(getattr(module, name)).parameters, *(["pdl"] if takes_pdl else [])}
        assert wanted - UNSERVED.get(name, set()) <= parameters, name


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
print(*(name for name, module in sys.modules.items() if type(module).__name__ != "_LazyModule"))"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    late = {"kernels.moe.triton", "kernels.lora.triton", "kernels.mamba2.triton", "kernels.delta_rule.triton"}
    assert not {*run.stdout.split()} & {*late, "kernels.linear.triton_fp8", "kernels.linear.triton_int"}
