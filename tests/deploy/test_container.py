"""The Dockerfile and docker-compose.yml by their own tools, and the cpu image built and run without an engine."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.conftest import need, needs_root
from tests.support.daemon import ROOT, wait_for

# buildah build's flags for networks where PyPI, say, is reached in another way
BUILD_FLAGS = shlex.split(os.environ.get("BUILDAH_FLAGS", ""))


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([need("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("compose-spec", "docker-compose.yml"),
        ("github-workflows", ".github/workflows/ci.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/feature.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_files_of_other_programs_are_as_their_schemas_say(schema: str, name: str) -> None:
    command = [need("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@needs_root
def test_the_cpu_image_is_built_confined_asked_and_stopped(tmp_path: Path) -> None:
    for program in ("buildah", "debootstrap", "runc"):
        need(program, package=program)
    command = [sys.executable, "-m", "deploy.docker.build_and_check", "--work-dir", str(tmp_path), "--", *BUILD_FLAGS]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=1800)
    lines = (tmp_path / "log").read_text().splitlines()
    print("\n".join(line for line in lines if line.startswith("== ")))
    assert done.returncode == 0, "\n".join(lines[-30:])
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@needs_root
def test_the_first_process_of_a_container_can_be_stopped_while_it_looks_for_a_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # it never answers
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
        }
        command = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            sys.executable,
            "-m",
            "server",
            "serve",
            "--port",
            "0",
            "a/b",
        ]
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            hub.settimeout(60)
            connection, _ = hub.accept()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_for(children.read_text, timeout_s=10, what="a first process")
            os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
            assert process.wait(10) == 128 + signal.SIGTERM
            connection.close()
        finally:
            process.kill()
            process.wait()
