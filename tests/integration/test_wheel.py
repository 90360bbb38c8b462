"""The package as users get it: built, installed elsewhere, and served from there by its console script."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.support.daemon import ROOT, Daemon

PACKAGES = ("server", "engine", "models", "kernels", "benchmarks", "deploy")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools to build")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that the tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "quire.py"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True, timeout=120)
    return next(folder.glob("quire-*.whl"))


def test_the_wheel_holds_code_and_data_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "quire.py",
        "server/cli.py",
        "server/http/routes/generate.py",
        "server/pages/docs/page.html",
        "server/pages/chat/page.html",
        "server/pages/chat/vendor/marked.js",
        "server/pages/chat/vendor/marked.LICENSE",
        "server/pages/chat/vendor/highlight.js",
        "server/pages/chat/vendor/temml.LICENSE",
        "server/pages/kv/page.html",
        "server/pages/kv/pool.js",
        "engine/process.py",
        "models/llama.py",
        "models/known_models.json",
        "kernels/attention/torch_ref.py",
        "models/demo/checkpoint/model.safetensors",
        "models/demo/checkpoint/chat_template.jinja",
        "benchmarks/report.html",
        "benchmarks/shapes/qwen3-0.6b/config.json",
        "deploy/ray/app.py",
        "deploy/ray/quire.yaml",
    ):
        assert name in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {*PACKAGES, "quire.py"}


def test_the_wheel_has_the_demo_checkpoint_without_its_corpus_and_training(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if "demo" in name) == [
        f"models/demo/checkpoint/{name}"
        for name in (
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "training.json",
        )
    ]


def test_every_module_of_the_wheel_finds_its_own_packages_there(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in archive.namelist()}
    missing = [
        f"{name} imports {node.module}"
        for name in archive.namelist()
        if name.endswith(".py")
        for node in ast.parse(archive.read(name)).body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES
        if node.module not in modules
    ]
    assert missing == []


@pytest.mark.full
def test_the_installed_console_script_serves_the_demo(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    script = site / "bin" / "quire"
    env = {"PYTHONPATH": str(site)}
    help_text = subprocess.run(
        [str(script), "serve", "--help"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "--max-model-len" in help_text
    with Daemon("--device", "cpu", folder=tmp_path, command=(str(script),), env=env) as daemon:
        answer = httpx.post(
            daemon.wait_ready().base_url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 3}, timeout=30
        )
        assert answer.json()["usage"]["completion_tokens"] <= 3
        engine = Path(f"/proc/{daemon.child('engine.process')}/cwd") if sys.platform == "linux" else None
        assert engine is None or engine.resolve() == site


LIBRARY = """
from quire import LLM
llm = LLM(device="cpu")
print(llm.chat("What is a quire?", temperature=0))
"""


def _installer(name: str, folder: Path) -> str:
    """Return the path of uv or pipx. pipx comes from the package index if there is none here; its pip does the rest.

    uv does not read pip's configuration, by which a machine may have a small torch or no way to the public index.
    """
    if (found := shutil.which(name)) is not None:
        return found
    if name == "uv":
        pytest.skip("needs uv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", name]
    if subprocess.run(command, capture_output=True, timeout=600).returncode != 0:
        pytest.skip(f"needs {name}, or a package index")
    return str(folder / "bin" / name)


@pytest.mark.full
@pytest.mark.parametrize("form", ["wheel", "checkout", "uv", "pipx"])
def test_one_line_installs_it_in_a_fresh_environment(wheel: Path, tmp_path: Path, form: str) -> None:
    """With all that it needs, from the package index: minutes. Then the command and the library work from anywhere."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    bin_folder, python = tmp_path / "venv" / "bin", tmp_path / "venv" / "bin" / "python"
    if form in ("uv", "pipx"):
        env |= {"UV_TOOL_DIR": str(tmp_path / "venvs"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
        env |= {"PIPX_HOME": str(tmp_path), "PIPX_BIN_DIR": str(tmp_path / "bin")}
        bin_folder, python = tmp_path / "bin", tmp_path / "venvs" / "quire" / "bin" / "python"
        tool = [_installer(form, tmp_path / "installer"), *(["tool"] if form == "uv" else [])]
        install = [*tool, "install", "--python", sys.executable, str(wheel.parent / "source")]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, env=env, timeout=120)
        install = [str(python), "-m", "pip", "install", str(wheel if form == "wheel" else wheel.parent / "source")]
    done = subprocess.run(install, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0 and any(word in done.stderr for word in ("NewConnectionError", "dns error")):
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    version = subprocess.run([bin_folder / "quire", "--version"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert version.stdout.startswith("quire ")
    doctor = subprocess.run([bin_folder / "quire", "doctor"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert "Yes: This machine is ready" in doctor.stdout
    used = subprocess.run([python, "-c", LIBRARY], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "pages" in used.stdout, used.stderr
