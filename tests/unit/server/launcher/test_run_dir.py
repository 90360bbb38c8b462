"""The launcher's directory: private, removed with it, and what a killed daemon left removed by the next."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from engine.interface.errors import StartupError
from server.launcher.run_dir import RunDir


class Config(msgspec.Struct):
    """A child's configuration."""

    number: int


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch):
    """A short directory for temporary files."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_it_is_private_and_removed(parent: Path) -> None:
    run_dir = RunDir()
    assert run_dir.path.parent == parent
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert msgspec.json.decode(run_dir.write("a.json", Config(3)).read_bytes()) == {"number": 3}
    run_dir.remove()
    assert list(parent.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(parent: Path) -> None:
    living = RunDir()
    others = [parent / "quire-notes", parent / "quire-file", parent / "elsewhere"]
    others[0].mkdir()
    others[1].write_text("mine")
    others[2].mkdir()
    (others[2] / "lock").touch()
    code = "from server.launcher.run_dir import RunDir; import time; print(RunDir().path, flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(parent)}
    )
    left = Path(process.stdout.readline().strip())
    assert (left / "lock").exists()
    second = RunDir()
    assert left.exists()  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    third = RunDir()
    assert not left.exists()
    assert sorted(parent.iterdir()) == sorted([living.path, second.path, third.path, *others])
    for run_dir in (living, second, third):
        run_dir.remove()


def test_a_full_disk_is_one_sentence(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(StartupError, match=r"a\.json cannot be written: No space left on device\. TMPDIR"):
        run_dir.write("a.json", Config(3))
    run_dir.remove()
    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(StartupError, match=r"No directory for sockets can be made in .*: No space left"):
        RunDir()
