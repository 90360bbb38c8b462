"""deploy/release.py: what `make release` checks, writes, builds and tags, in a small repository of its own."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from deploy.release import ReleaseError, check_version, edited, with_urls

ROOT = Path(__file__).parent.parent
NEEDS_BUILD = pytest.mark.skipif(
    importlib.util.find_spec("build") is None or importlib.util.find_spec("setuptools") is None,
    reason="needs the packages build and setuptools",
)
SHIPPED = ("server", "engine", "models", "kernels", "benchmarks", "deploy")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The files that a release reads and writes, beside packages of one module each, with one commit."""
    root = tmp_path / "repository"
    for package in SHIPPED:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
        (root / package / "py.typed").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE", "Dockerfile", ".gitignore", "deploy/release.py"):
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "deploy/kubernetes", root / "deploy/kubernetes")
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A change.\n\n## [0.0.9] - 2026-01-01\n")
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "config", "user.name", "Tests")
    git(root, "config", "user.email", "tests@example.org")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "Before")
    return root


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/release.py", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)


@NEEDS_BUILD
def test_a_dry_run_builds_all_and_changes_neither_tree_nor_git(repository: Path) -> None:
    before = git(repository, "rev-parse", "HEAD")
    done = run(repository, "1.2.3", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert '+version = "1.2.3"' in done.stdout
    assert "+## [1.2.3] - 20" in done.stdout
    assert "would commit" in done.stdout
    assert git(repository, "status", "--porcelain") == git(repository, "tag") == ""
    assert git(repository, "rev-parse", "HEAD") == before
    names = zipfile.ZipFile(repository / "dist/quire-1.2.3-py3-none-any.whl").namelist()
    assert {f"{package}/py.typed" for package in SHIPPED} <= set(names)
    with tarfile.open(repository / "dist/quire-1.2.3.tar.gz") as sdist:
        assert b'version = "1.2.3"' in sdist.extractfile("quire-1.2.3/pyproject.toml").read()


@NEEDS_BUILD
def test_a_release_is_a_commit_with_the_version_everywhere_and_a_tag(repository: Path) -> None:
    done = run(repository, "1.2.3")
    assert done.returncode == 0, done.stderr
    assert git(repository, "log", "--format=%s").splitlines() == ["Release 1.2.3", "Before"]
    assert git(repository, "tag") == "v1.2.3\n"
    assert git(repository, "rev-parse", "v1.2.3^{commit}") == git(repository, "rev-parse", "HEAD")
    assert git(repository, "status", "--porcelain") == ""
    assert re.search(r"(?m)^## \[1\.2\.3\] - 20\d\d-\d\d-\d\d$", (repository / "CHANGELOG.md").read_text())
    assert (repository / "Dockerfile").read_text().count("ARG VERSION=1.2.3\n") == 2
    for form in ("cpu", "gpu"):
        text = (repository / f"deploy/kubernetes/overlays/{form}/kustomization.yaml").read_text()
        assert f"newTag: 1.2.3-{form}" in text
    again = run(repository, "1.2.3")
    assert again.returncode == 1
    assert again.stderr == "Not released: 1.2.3 does not come after 1.2.3, which is tagged\n"


def test_a_tree_that_git_does_not_have_is_refused(repository: Path) -> None:
    (repository / "README.md").write_text("changed")
    done = run(repository, "1.2.3", "--dry-run")
    assert done.returncode == 1
    assert done.stderr == "Not released: git has not all of the working tree: 1 paths, such as README.md\n"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1.2", "must be X.Y.Z, found '1.2'"),
        ("v1.2.3", "must be X.Y.Z"),
        ("1.2.3rc1", "must be X.Y.Z"),
        ("0.16.0", "another package `kernels`"),
        ("0.0.1", "comes before 0."),
    ],
)
def test_a_version_that_cannot_be_is_refused(repository: Path, version: str, words: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape(words)):
        check_version(repository, version)


def test_a_changelog_without_a_heading_for_the_release_is_refused(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## [0.0.9] - 2026-01-01\n")
    with pytest.raises(ReleaseError, match=r"CHANGELOG\.md has no heading '## \[1\.2\.3\] - unreleased'"):
        edited(repository, "1.2.3", "2026-11-22")


@pytest.mark.parametrize(
    "remote",
    [
        "https://github.com/someone/quire.git",
        "https://github.com/someone/quire",
        "git@github.com:someone/quire.git",
        "ssh://git@github.com:22/someone/quire.git",
    ],
)
def test_a_release_names_the_repository_that_it_is_pushed_to(repository: Path, remote: str) -> None:
    git(repository, "remote", "add", "origin", remote)
    project = tomllib.loads(edited(repository, "1.2.3", "2026-11-22")[Path("pyproject.toml")])["project"]
    assert project["urls"] == {
        "Homepage": "https://github.com/someone/quire",
        "Documentation": "https://github.com/someone/quire/blob/main/docs/README.md",
        "Changelog": "https://github.com/someone/quire/blob/main/CHANGELOG.md",
        "Issues": "https://github.com/someone/quire/issues",
    }


@pytest.mark.parametrize("remote", ["", "/srv/git/quire.git", "../quire", "file:///srv/quire"])
def test_a_remote_that_is_no_host_gives_no_addresses(remote: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert with_urls(text, remote) == text


def test_addresses_that_stand_are_kept() -> None:
    once = with_urls((ROOT / "pyproject.toml").read_text(), "https://github.com/someone/quire")
    assert with_urls(once, "https://github.com/another/quire") == once
