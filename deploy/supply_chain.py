"""Pins an installation's packages with hashes, writes SBOMs, and audits packages and code.

    python deploy/supply_chain.py lock [--check]   requirements-cpu.txt and requirements-gpu.txt, by uv
    python deploy/supply_chain.py sbom FOLDER      a CycloneDX file of each, validated, by cyclonedx-py
    python deploy/supply_chain.py audit            known vulnerabilities, by pip-audit; exit code 3: no service answered
    python deploy/supply_chain.py bandit           our own code
Needs what requirements-supply-chain.txt names: make supply-chain installs it into .venv-supply-chain.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCKS = {"cpu": ROOT / "deploy/requirements-cpu.txt", "gpu": ROOT / "deploy/requirements-gpu.txt"}
IMAGE_EXTRAS = ("otel", "zmq")  # also installed in the images (Dockerfile)
SOURCES = ("server", "engine", "models", "kernels", "benchmarks", "deploy")
# Dependencies of torch's CPU build, which is on PyTorch's own index and so installed separately, with --no-deps
_TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
_PYTHON = "3.11"  # the oldest; markers tell what newer ones do not need
_NOT_AUDITED = 3


def main() -> int:
    """Run one command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python deploy/supply_chain.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    lock_parser = commands.add_parser("lock")
    lock_parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is stale")
    sbom_parser = commands.add_parser("sbom")
    sbom_parser.add_argument("folder", type=Path)
    commands.add_parser("audit")
    commands.add_parser("bandit")
    arguments = parser.parse_args()
    match arguments.command:
        case "lock":
            return lock(is_check=arguments.check)
        case "sbom":
            return sbom(arguments.folder)
        case "audit":
            return audit()
    return subprocess.run([_program("bandit"), "-q", "-c", "pyproject.toml", "-r", *SOURCES], cwd=ROOT).returncode


def lock(*, is_check: bool) -> int:
    """Resolve both installations within constraints.txt; write or compare them."""
    num_stale = 0
    for name, path in LOCKS.items():
        resolved = _header(name) + _resolve(name)
        if not is_check:
            path.write_text(resolved)
        elif path.read_text() != resolved:
            num_stale += 1
            print(f"{path.relative_to(ROOT)} is stale: python deploy/supply_chain.py lock", file=sys.stderr)
    return int(num_stale > 0)


def sbom(folder: Path) -> int:
    """Write FOLDER/quire-cpu.cdx.json and quire-gpu.cdx.json; cyclonedx-py validates what it writes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in LOCKS.items():
        command = [_program("cyclonedx-py"), "requirements", "-", "--pyproject", str(ROOT / "pyproject.toml")]
        command += ["--mc-type", "application", "--output-reproducible", "--spec-version", "1.6", "--validate"]
        command += ["--of", "JSON", "-o", str(folder / f"quire-{name}.cdx.json")]
        packages = path.read_text() + (f"{_torch_pin()}\n" if name == "cpu" else "")
        subprocess.run(command, input=packages, text=True, check=True)
    return 0


def audit() -> int:
    """Query known vulnerabilities of every pinned package. A package that could not be queried fails the audit."""
    num_found, num_skipped, num_asked = 0, 0, 0
    for path in LOCKS.values():
        command = [_program("pip-audit"), "--requirement", str(path), "--no-deps", "--disable-pip", "--format", "json"]
        done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
        if not done.stdout.strip():
            print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
            return _NOT_AUDITED
        for package in json.loads(done.stdout)["dependencies"]:
            num_asked += 1
            num_skipped += "skip_reason" in package
            for vulnerability in package.get("vulns", ()):
                num_found += 1
                fixed = ", ".join(vulnerability["fix_versions"]) or "nowhere yet"
                print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    if num_skipped:
        print(f"{num_skipped} of {num_asked} packages: no vulnerability service answered for them", file=sys.stderr)
    return 1 if num_found else _NOT_AUDITED if num_skipped else 0


def _resolve(name: str) -> str:
    """Return an installation's packages with their hashes, as resolved by uv."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in IMAGE_EXTRAS:
        wanted += project["optional-dependencies"][extra]
    if name == "cpu":
        wanted = [line for line in wanted if not line.startswith("torch>")] + list(_TORCH_NEEDS)
    # triton is pinned for machines without CUDA: its builds of torch bring their own
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("triton==")]
    with tempfile.TemporaryDirectory() as scratch:
        requirements, constraints = Path(scratch) / "requirements.in", Path(scratch) / "constraints.txt"
        requirements.write_text("\n".join(wanted))
        constraints.write_text("\n".join(pins))
        command = [_program("uv"), "pip", "compile", str(requirements), "--constraints", str(constraints)]
        command += [
            "--generate-hashes",
            "--python-version",
            _PYTHON,
            "--no-annotate",
            "--no-header",
            "--quiet",
            "--no-config",
        ]
        command += ["--universal"] if name == "cpu" else ["--python-platform", "x86_64-manylinux_2_34"]
        done = subprocess.run([*command, "--only-binary", ":all:"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return done.stdout


def _header(name: str) -> str:
    lines = {
        "cpu": (
            "# All that Quire needs on CPU but torch itself, whose CPU build is on PyTorch's own index:",
            f"#   pip install --no-deps --index-url https://download.pytorch.org/whl/cpu {_torch_pin()}",
        ),
        "gpu": ("# All that Quire needs on Linux x86_64 with an NVIDIA GPU, torch and its CUDA packages included.",),
    }[name]
    install = f"#   pip install --require-hashes -r deploy/requirements-{name}.txt && pip install --no-deps ."
    return "\n".join([*lines, install, "# Written by: python deploy/supply_chain.py lock", ""]) + "\n"


def _torch_pin() -> str:
    return next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))


def _program(name: str) -> str:
    """Return the program's path in this environment, else on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed: make supply-chain does that, in .venv-supply-chain")
    return found


if __name__ == "__main__":
    sys.exit(main())
