"""deploy/supply_chain.py with its real tools: an SBOM that is valid and whole, an audit that never passes unheard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.test_locked import locked

ROOT = Path(__file__).parents[2]


def supply_chain(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) if path is None else {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    command = [sys.executable, "deploy/supply_chain.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_the_sbom_is_valid_and_names_every_locked_package(tmp_path: Path) -> None:
    done = supply_chain("sbom", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in ("cpu", "gpu"):
        text = (tmp_path / f"quire-{name}.cdx.json").read_text()
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
        bom = json.loads(text)
        assert bom["metadata"]["component"]["name"] == "quire"
        named = {(component["name"].lower().replace("_", "-"), component["version"]) for component in bom["components"]}
        wanted = {(package, version) for package, (version, _) in locked(name).items()}
        assert {package for package, _ in wanted} <= {package.replace(".", "-") for package, _ in named}
        assert "torch" in {package for package, _ in named}


def test_our_own_code_has_no_finding_of_bandit() -> None:
    done = supply_chain("bandit")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("dependency", "code", "words"),
    [
        ({"name": "a", "version": "1", "vulns": []}, 0, ""),
        ({"name": "a", "skip_reason": "not found"}, 3, "no vulnerability service answered"),
        ({"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}, 1, "a 1: CVE-1, fixed in 2"),
        (None, 3, "no route to the service"),
    ],
)
def test_an_audit_passes_only_if_everything_was_asked(
    tmp_path: Path, dependency: dict | None, code: int, words: str
) -> None:
    """With a pip-audit that answers as it is told."""
    answer = "" if dependency is None else json.dumps({"dependencies": [dependency]})
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\necho 'no route to the service' >&2\nprintf '%s' '{answer}'\n")
    program.chmod(0o755)
    script = f"import sys; sys.executable = {str(tmp_path / 'python')!r}; sys.argv[1:] = ['audit']; "
    script += "import runpy; runpy.run_path('deploy/supply_chain.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
