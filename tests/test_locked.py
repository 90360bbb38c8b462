"""deploy/'s hashed requirements are those of pyproject.toml and constraints.txt. `make supply-chain` resolves anew."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text())
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {  # of the images
    extra
    for extras in re.findall(r"deploy/docker/requirements\.py ([\w ]*)>", (ROOT / "Dockerfile").read_text())
    for extra in extras.split()
}
DIRECT = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in sorted(EXTRAS)))
    for text in texts
]
BROUGHT_BY_TORCH = ("nvidia-", "cuda-", "triton")  # not in constraints.txt, which is for CPU


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Package → version and number of hashes, as far as this system and Python need it."""
    text = (ROOT / f"deploy/requirements-{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", re.sub(r"(?m)^#.*\n", "", text).strip())
    found = {}
    for entry in entries:
        match = re.match(r"([\w.-]+)==([\w.+]+)", entry)
        assert match, entry
        marker = re.search(r"; (.+?) \\", entry.partition("\n")[0])
        if marker and not Marker(marker[1]).evaluate():
            continue
        found[canonicalize_name(match[1])] = (match[2], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)))
    return found


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_package_has_hashes_and_the_version_that_the_tests_ran_with(name: str) -> None:
    packages = locked(name)
    assert all(num_hashes > 0 for _, num_hashes in packages.values())
    for package, (version, _) in packages.items():
        assert package.startswith(BROUGHT_BY_TORCH) or PINS.get(package) == version, package


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_direct_dependency_is_there_and_in_range(name: str) -> None:
    packages = locked(name)
    for requirement in DIRECT:
        package = canonicalize_name(requirement.name)
        if package == "torch" and name == "cpu":
            assert package not in packages  # from PyTorch's own index, which the file's head names
            continue
        assert requirement.specifier.contains(packages[package][0]), package


def test_the_cpu_file_names_the_torch_that_belongs_to_it() -> None:
    assert f"torch=={PINS['torch']}" in (ROOT / "deploy/requirements-cpu.txt").read_text().partition("\n\n")[0]
