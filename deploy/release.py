"""Makes a release: `python deploy/release.py X.Y.Z [--dry-run]`, which `make release VERSION=X.Y.Z` runs.

It checks that nothing is uncommitted and that the version can be the next, writes the version, the date of the
changelog's heading and the project's addresses by the remote `origin`, builds sdist and wheel from what git has, and
then commits and tags. A dry run does all of that in a copy, puts the files into dist/ and writes nothing to the working
tree or to git. Nothing is pushed or uploaded.
Needs git and the package `build`. Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_REMOTE = re.compile(
    r"(?:(?:https|ssh|git)://)?(?:[^@/\s]+@)?(\w[\w-]*(?:\.\w[\w-]*)+)(?::\d+/|[:/])([\w./~-]+?)(?:\.git)?/?"
)
_PYPROJECT, _CHANGELOG = Path("pyproject.toml"), Path("CHANGELOG.md")
# transformers requires a package `kernels` with these versions, and would accept Quire's package instead
_TAKEN_MINOR = (0, 16)


class ReleaseError(Exception):
    """The release cannot be made; the message is the reason."""


def main() -> int:
    """Read the flags, make the release, print the remaining steps."""
    parser = argparse.ArgumentParser(prog="python deploy/release.py", description=__doc__)
    parser.add_argument("version", help="X.Y.Z")
    parser.add_argument("--dry-run", action="store_true", help="write nothing to the working tree and to git")
    arguments = parser.parse_args()
    try:
        release(ROOT, arguments.version, is_dry_run=arguments.dry_run, day=datetime.now(UTC).date().isoformat())
    except ReleaseError as error:
        print(f"Not released: {error}", file=sys.stderr)
        return 1
    return 0


def release(root: Path, version: str, *, is_dry_run: bool, day: str) -> None:
    """Check, build, write, commit and tag. Raises ReleaseError; a failed check or build leaves the tree as it was."""
    check_tree(root)
    check_version(root, version)
    edits = edited(root, version, day)
    for path, text in edits.items():
        print("".join(_changes(path, (root / path).read_text(encoding="utf-8"), text)), end="")
    for path in build(root, edits, version):
        print(f"built {path.relative_to(root)}, {path.stat().st_size:,} bytes")
    if is_dry_run:
        print(f"Dry run: would commit {', '.join(map(str, edits)) or 'nothing'} and tag v{version}")
        return
    for path, text in edits.items():
        (root / path).write_text(text, encoding="utf-8")
    if edits:
        _git(root, "commit", "--quiet", "--message", f"Release {version}", "--", *map(str, edits))
    is_signed = bool(_git(root, "config", "--default", "", "--get", "user.signingkey"))
    _git(root, "tag", "--sign" if is_signed else "--annotate", "--message", f"Quire {version}", f"v{version}")
    print(f"Tagged v{version}{'' if is_signed else ', not signed: git has no user.signingkey'}")
    print("Next: git push --follow-tags, and the files of dist/ beside the tag (docs/how-to/release.md)")


def check_tree(root: Path) -> None:
    """Raise ReleaseError if the working tree has uncommitted changes."""
    changed = _git(root, "status", "--porcelain").splitlines()
    if changed:
        raise ReleaseError(f"git has not all of the working tree: {len(changed)} paths, such as {changed[0][3:]}")


def check_version(root: Path, version: str) -> None:
    """Raise ReleaseError for a version with a wrong form, one that is not the next, or one that is tagged."""
    parts = _parts(version)
    if parts is None:
        raise ReleaseError(f"the version must be X.Y.Z, found {version!r}")
    if parts[:2] == _TAKEN_MINOR:
        raise ReleaseError(f"{version} cannot be: transformers takes 0.16.x for another package `kernels`")
    current = _current(root)
    if parts < (_parts(current) or (0, 0, 0)):
        raise ReleaseError(f"{version} comes before {current}, the version in pyproject.toml")
    released = [tag[1:] for tag in _git(root, "tag", "--list", "v*").splitlines()]
    later = [one for one in released if (_parts(one) or (0, 0, 0)) >= parts]
    if later:
        latest = max(later, key=lambda one: _parts(one) or ())
        raise ReleaseError(f"{version} does not come after {latest}, which is tagged")


def edited(root: Path, version: str, day: str) -> dict[Path, str]:
    """Return the files that contain the version, updated: path below the root → text."""
    current = _current(root)
    versioned = _replaced(root, _PYPROJECT, rf'(?m)^version = "{re.escape(current)}"$', f'version = "{version}"')
    found = {
        _PYPROJECT: with_urls(versioned, _git(root, "config", "--default", "", "--get", "remote.origin.url")),
        _CHANGELOG: _with_heading(root, version, day),
    }
    dockerfile = Path("Dockerfile")
    found[dockerfile] = _replaced(root, dockerfile, r"(?m)^ARG VERSION=.*$", f"ARG VERSION={version}")
    image = rf"\b{re.escape(current)}(?=-(?:cpu|gpu)\b)"  # tags of images, in manifests, pages and tests of both
    listed = _git(root, "ls-files", "deploy/kubernetes", "docs/*.md", "tests/deploy").splitlines()
    for path in map(Path, listed):
        if path.suffix in (".md", ".py", ".yaml") and re.search(image, (root / path).read_text(encoding="utf-8")):
            found[path] = _replaced(root, path, image, version)
    return {path: text for path, text in found.items() if text != (root / path).read_text(encoding="utf-8")}


def with_urls(pyproject: str, remote: str) -> str:
    """Return pyproject.toml with [project.urls] of the repository `remote`; unchanged if it has such a table.

    A remote that is no address of a host, such as a folder, gives no URLs: the caller's checkout is a private one.
    """
    match = _REMOTE.fullmatch(remote)
    if match is None or "[project.urls]" in pyproject:
        return pyproject
    home = f"https://{match[1]}/{match[2]}"
    urls = {
        "Homepage": home,
        "Documentation": f"{home}/blob/main/docs/README.md",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return pyproject.replace(
        "[project.optional-dependencies]\n", f"[project.urls]\n{table}\n[project.optional-dependencies]\n", 1
    )


def build(root: Path, edits: dict[Path, str], version: str) -> list[Path]:
    """Build sdist and wheel from the last commit and the edits, into dist/. Raises ReleaseError."""
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch) / "source", Path(scratch) / "dist"
        archive = Path(scratch) / "source.tar"
        _git(root, "archive", "--format=tar", f"--output={archive}", "HEAD")
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        for path, text in edits.items():
            (source / path).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ReleaseError(f"the build failed: {(done.stderr or done.stdout).strip()[-2000:]}")
        _check_built(made, version)
        (root / "dist").mkdir(exist_ok=True)
        return [Path(shutil.copy2(path, root / "dist")) for path in sorted(made.iterdir())]


def _check_built(folder: Path, version: str) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    if f"\nVersion: {version}\n" not in metadata or sdist.name != f"quire-{version}.tar.gz":
        raise ReleaseError(f"{wheel.name} and {sdist.name} are not of version {version}")
    if "server/py.typed" not in names:
        raise ReleaseError(f"{wheel.name} has no py.typed")


def _with_heading(root: Path, version: str, day: str) -> str:
    """Return the changelog with version and date in the heading of the unreleased section."""
    text = (root / _CHANGELOG).read_text(encoding="utf-8")
    waiting = rf"(?m)^## \[(?:{re.escape(version)}\] - unreleased|Unreleased\])$"
    dated, count = re.subn(waiting, f"## [{version}] - {day}", text, count=1)
    if not count:
        raise ReleaseError(f"{_CHANGELOG} has no heading '## [{version}] - unreleased' or '## [Unreleased]'")
    return dated


def _replaced(root: Path, path: Path, pattern: str, replacement: str) -> str:
    text, count = re.subn(pattern, replacement, (root / path).read_text(encoding="utf-8"))
    if not count:
        raise ReleaseError(f"{path} has nothing of the form {pattern}")
    return text


def _current(root: Path) -> str:
    return tomllib.loads((root / _PYPROJECT).read_text(encoding="utf-8"))["project"]["version"]


def _parts(version: str) -> tuple[int, ...] | None:
    match = _VERSION.fullmatch(version)
    return tuple(map(int, match.groups())) if match else None


def _changes(path: Path, old: str, new: str) -> list[str]:
    return list(difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(path), str(path), n=0))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
