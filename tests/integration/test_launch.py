"""The launcher with an engine that misbehaves: first starts that fail, restarts with back-off, loads that never end."""

import shutil
import signal
import sys
from pathlib import Path

import pytest

from server.config.model_source import DEMO_FOLDER
from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, is_alive, wait_for

pytestmark = needs_proc


def stub(tmp_path: Path, mode: str) -> Daemon:
    """Start the launcher around a stub engine that behaves as `mode` says."""
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    (folder / "mode").write_text(mode)
    command = (sys.executable, "-m", "tests.support.stub_daemon", str(folder), "tests.support.stub_engine")
    return Daemon(folder=tmp_path, command=command, env={"PYTHONPATH": str(Path(__file__).parents[2])})


@pytest.mark.parametrize(
    ("mode", "code", "words"), [("crash", 3, "ended with exit code 7"), ("fail", 2, "The moon is in the wrong phase.")]
)
def test_an_engine_that_cannot_start_ends_the_daemon_with_its_reason(
    tmp_path: Path, mode: str, code: int, words: str
) -> None:
    with stub(tmp_path, mode) as daemon:
        assert daemon.process.wait(60) == code
        assert daemon.log.splitlines()[-1].startswith("quire: error: ")
        assert words in daemon.log.splitlines()[-1]
        assert "Traceback" not in daemon.log


def test_an_engine_that_keeps_dying_is_restarted_more_and_more_slowly(tmp_path: Path) -> None:
    with stub(tmp_path, "flaky") as daemon:
        wait_for(lambda: "delay_s=2 " in daemon.log, timeout_s=60, what="third death")
        assert daemon.log.index("delay_s=0.5") < daemon.log.index("delay_s=1 ") < daemon.log.index("delay_s=2 ")
        assert daemon.get("/ready").status_code == 503
        assert daemon.get("/ready").json()["stage"] == "restarting"
        assert daemon.get("/health").status_code == 200  # restarts are tried five times first
        assert daemon.metrics()["quire_engine_restarts_total"] >= 2  # on a slow machine the next one is counted already
        assert daemon.process.poll() is None
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0


# rule: Endpoints: `/health` is 503 only if the engine makes no progress or does not come back
def test_an_engine_that_is_replaced_is_not_ready_but_alive(tmp_path: Path) -> None:
    with stub(tmp_path, "relapse") as daemon:
        wait_for(lambda: "ended, restarting" in daemon.log, timeout_s=60, what="death")
        assert daemon.get("/health").status_code == 200
        wait_for(lambda: daemon.get("/ready").json()["stage"] == "weights", timeout_s=60, what="the second load")
        assert daemon.get("/ready").status_code == 503
        assert daemon.get("/health").status_code == 200
        assert daemon.get("/health").json()["status"] == "engine restarting"
        assert daemon.metrics()["quire_engine_up"] == 0


def test_an_engine_that_loads_for_ever_holds_up_neither_metrics_nor_the_end(tmp_path: Path) -> None:
    with stub(tmp_path, "hang") as daemon:
        wait_for(lambda: daemon.get("/ready").json()["stage"] == "weights", timeout_s=60, what="stage")
        assert daemon.get("/ready").json()["done"] == 0.25
        assert daemon.get("/health").status_code == 200
        assert daemon.metrics()["quire_engine_restarts_total"] == 0
        children = daemon.children()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        assert not any(is_alive(pid) for pid in children)


def test_a_first_load_that_stands_still_is_told_and_not_ended(tmp_path: Path) -> None:
    with stub(tmp_path, "hang") as daemon:
        said = "WARNING launcher  the start makes no progress after_s="
        wait_for(lambda: daemon.log.count("stage=weights done=1 total=4 unit=bytes;") >= 2, timeout_s=60, what="told")
        assert daemon.log.count(said) >= 2
        assert daemon.get("/health").json() == {"status": "ok"}
        assert daemon.process.poll() is None


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
@pytest.mark.table(most=1)
def test_a_second_signal_ends_it_however_soon_it_comes(
    tmp_path: Path, first: signal.Signals, second: signal.Signals
) -> None:
    with stub(tmp_path, "stay") as daemon:  # its engine does not end by itself
        wait_for(lambda: daemon.get("/ready").json()["stage"] == "restarting", timeout_s=60, what="an engine")
        daemon.process.send_signal(first)
        if first == second:  # the kernel merges a signal with an equal one that the process has not received yet
            wait_for(lambda: not is_pending(daemon.process.pid, first), timeout_s=60, what="the first delivered")
        daemon.process.send_signal(second)
        assert daemon.process.wait(60) in (128 + first, 128 + second)  # of two at once the kernel chooses the order


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Return True if the process has a signal that it has not received."""
    (pending,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)


def test_the_run_directory_is_private_and_goes_with_the_daemon(tmp_path: Path) -> None:
    with stub(tmp_path, "hang") as daemon:
        wait_for(lambda: len(daemon.children()) == 2, timeout_s=60, what="children")
        command = Path(f"/proc/{daemon.child('server.http.worker')}/cmdline").read_text().split("\0")
        run_dir = Path(command[3]).parent
        assert run_dir.stat().st_mode & 0o777 == 0o700
        assert {"control.sock", "engine.json", "worker-0.json"} <= {path.name for path in run_dir.iterdir()}
    assert not run_dir.exists()
