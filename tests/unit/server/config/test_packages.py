"""Packages of Quire's that are, in whole or in parts, another distribution's are refused by name."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.interface.errors import StartupError
from server.config import packages
from server.config.packages import check_packages

ROOT = Path(__file__).parents[4]


def test_our_own_packages_pass() -> None:
    check_packages()


def test_a_package_found_elsewhere_is_refused_by_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("kernels", None, origin="/site-packages/kernels/__init__.py")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "kernels" else find_spec(name))
    monkeypatch.setattr(
        packages.importlib.metadata, "packages_distributions", lambda: {"kernels": ["quire", "hf-kernels-test"]}
    )
    with pytest.raises(StartupError, match="'hf-kernels-test', not by Quire: uninstall it") as caught:
        check_packages()
    assert caught.value.exit_code == 3


def test_files_of_another_distribution_among_ours_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, files in (("quire", "server/cli.py"), ("fine", "fine/server/a.py"), ("mixed", "fine/a.py\nmodels/b.py")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files.split()))
    assert list(packages._writers(tmp_path)) == [("models", "mixed")]
    monkeypatch.setattr(packages, "_writers", lambda folder: [("models", "mixed")])
    with pytest.raises(StartupError, match=r"pip uninstall mixed\), install Quire again, or use a fresh environment"):
        check_packages()


@pytest.mark.parametrize("code", ["import quire", "import quire, sys; sys.argv[0] = 'quire'; sys.exit(quire.main())"])
def test_a_folder_of_the_script_with_the_name_of_a_package_is_named(tmp_path: Path, code: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[0] = 'quire' if 'main' in {code!r} else ''\n{code}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"The package `models` that Python finds is {tmp_path}/models/__init__.py, not Quire's" in last
    assert ("Traceback" in done.stderr) == ("main" not in code)
