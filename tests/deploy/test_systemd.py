"""deploy/systemd/quire.service: checked by systemd's own tools, and run by a systemd of the test's own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import need, needs_root
from tests.deploy.own_systemd import PYTHON, OwnSystemd
from tests.support.daemon import ROOT, is_alive, wait_for

UNIT = ROOT / "deploy/systemd/quire.service"
MAX_EXPOSURE = 1.5  # of 10; docs/how-to/systemd.md names what is left open, and why


@pytest.fixture
def analyze() -> str:
    return need("systemd-analyze", package="systemd")


def test_systemd_understands_every_line(analyze: str, tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/quire/bin/quire", "/bin/true"))  # which is there
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_is_hardened(analyze: str) -> None:
    command = [analyze, "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Overall exposure level for quire.service: ([0-9.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= MAX_EXPOSURE, done.stdout


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[OwnSystemd]:
    """Return a systemd that starts the unit, with a free port, two ranks and less patience."""
    for program, package in (("unshare", "util-linux"), ("systemctl", "systemd")):
        need(program, package=package)
    system = subprocess.run([PYTHON, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    if system.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip(f"{PYTHON} is not of this Python's version, so it cannot use its packages")
    drop_in = "[Service]\nWatchdogSec=15\nRestartSec=1\n"
    drop_in += (
        "Environment='SERVE_ARGS=--port 0 --device cpu --tensor-parallel-size 2 --api-key-file /opt/quire/keys'\n"
    )
    with OwnSystemd(tmp_path, drop_in=drop_in, keys="old") as running:
        yield running


def answer_to(key: str, status: str) -> int:
    """Return what the server that a status names says to a key."""
    url = f"{status.rpartition(' ')[2]}/v1/models"
    return httpx.get(url, headers={"authorization": f"Bearer {key}"}, timeout=10).status_code


@needs_root
def test_systemd_sees_it_ready_reloads_keys_restarts_what_stands_still_and_stops_it_cleanly(
    manager: OwnSystemd,
) -> None:
    manager.wait_shows(ActiveState="active", SubState="running", NRestarts="0")
    status = manager.systemctl("show", "quire", "--property=StatusText", "--value")
    assert status.startswith("Serving quire-demo on http://127.0.0.1:")
    assert (answer_to("old", status), answer_to("new", status)) == (200, 401)
    manager.keys.write_text("new")
    assert manager.systemctl("reload", "quire") == ""
    wait_for(lambda: answer_to("new", status) == 200, timeout_s=10, what="the new key is let in")
    assert answer_to("old", status) == 401
    engine = manager.pid_of("engine.process")
    rank = manager.pid_of("engine.rank_process")
    assert all("\nUid:\t0\t" not in Path(f"/proc/{pid}/status").read_text() for pid in (engine, rank))
    os.kill(engine, signal.SIGSTOP)
    manager.wait_shows(ActiveState="active", StatusText="The engine makes no progress")
    manager.wait_shows(ActiveState="active", SubState="running", NRestarts="1")
    assert not is_alive(engine)
    assert not is_alive(rank)
    assert manager.systemctl("stop", "quire") == ""
    assert manager.shows(ActiveState="inactive", Result="success", ExecMainStatus="0")


@needs_root
def test_servers_of_one_host_are_instances_that_share_user_and_cache(manager: OwnSystemd) -> None:
    manager.wait_shows(ActiveState="active", SubState="running")
    assert manager.systemctl("start", "quire@other") == ""
    found = {}
    for unit in ("quire", "quire@other"):
        assert manager.systemctl("is-active", unit) == "active"
        status = manager.systemctl("show", unit, "--property=StatusText", "--value")
        assert answer_to("old", status) == 200
        found[unit] = manager.systemctl("show", unit, "--property=UID", "--property=CacheDirectory")
        files = manager.systemctl("show", unit, "--property=EnvironmentFiles")
        assert ("/etc/quire/other.env" in files) is (unit == "quire@other")
    assert found["quire"] == found["quire@other"]
    assert "UID=0" not in found["quire"].splitlines()
    assert manager.systemctl("stop", "quire@other") == ""
    assert manager.systemctl("is-active", "quire") == "active"
