"""What tools outside the tests read: package metadata, hooks, workflows, dependency updates; their names must exist."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOUND = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
SHIPPED = {include.rstrip("*").partition(".")[0] for include in FOUND}


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    return set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))


def test_every_shipped_package_says_that_it_is_typed() -> None:
    assert len(SHIPPED) >= 6
    assert sorted(package for package in SHIPPED if not (ROOT / package / "py.typed").is_file()) == []


def test_every_tool_of_the_extras_test_and_dev_is_pinned() -> None:
    pins = re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {canonicalize_name(Requirement(text).name) for extra in ("test", "dev") for text in extras[extra]}
    assert sorted(wanted - set(map(canonicalize_name, pins))) == []


def test_hooks_use_the_tools_of_the_environment_and_no_network() -> None:
    repositories = load(".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = {hook["id"]: hook for hook in repositories[0]["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "mypy", "codespell"}
    for hook in hooks.values():
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")
    (files,) = re.findall(r"\^\((.*)\)/", hooks["mypy"]["files"])
    assert set(files.split("|")) == set(PROJECT["tool"]["mypy"]["packages"])


def test_the_workflow_runs_scripts_that_exist_on_every_supported_python() -> None:
    jobs = load(".github/workflows/ci.yml")["jobs"]
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert jobs["all"]["strategy"]["matrix"]["python"] == classified
    assert PROJECT["project"]["requires-python"] == f">={classified[0]}"
    scripts = {
        script
        for job in jobs.values()
        for step in job["steps"]
        for script in re.findall(r"\.ci/[\w-]+", step.get("run", ""))
    }
    assert scripts == {".ci/setup", ".ci/run"}
    assert [script for script in sorted(scripts) if not os.access(ROOT / script, os.X_OK)] == []


def test_every_make_target_that_a_script_or_page_names_exists() -> None:
    files = [*(ROOT / ".ci").iterdir(), *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    files += [ROOT / ".github/workflows/ci.yml", ROOT / ".github/pull_request_template.md"]
    targets, command = make_targets(), re.compile(r"(?m)(?:`|^|\$ |run: )make ([a-z][a-z-]*)")
    assert {"lint", "test", "test-demo", "coverage", "release", "hooks"} <= targets
    unknown = [
        f"{path.relative_to(ROOT)}: make {target}"
        for path in files
        for target in command.findall(path.read_text(encoding="utf-8"))
        if target not in targets
    ]
    assert unknown == []


def test_dependency_updates_are_of_folders_with_a_manifest() -> None:
    updates = load(".github/dependabot.yml")["updates"]
    manifests = {
        "pip": ("pyproject.toml", "requirements.txt"),
        "npm": ("package.json",),
        "docker": ("Dockerfile",),
        "github-actions": (".github/workflows/ci.yml",),
    }
    assert {update["package-ecosystem"] for update in updates} == set(manifests)
    for update in updates:
        for folder in [*update.get("directories", ()), *filter(None, [update.get("directory")])]:
            names = manifests[update["package-ecosystem"]]
            assert any((ROOT / folder.lstrip("/") / name).is_file() for name in names), folder
