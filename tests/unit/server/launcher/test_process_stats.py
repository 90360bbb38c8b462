"""What the launcher reads of its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.launcher.process_metrics import ProcessStats
from server.launcher.processes import num_oom_kills


def write_process(proc: Path, pid: int, *, ticks: int, pages: int, num_fds: int) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True, exist_ok=True)
    for fd in range(num_fds):
        (folder / "fd" / str(fd)).touch()
    fields = ["0"] * 50
    fields[0], fields[11], fields[12], fields[21] = "S", str(ticks), str(ticks), str(pages)
    (folder / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")


def test_processes_of_a_role_are_added_up(tmp_path):
    write_process(tmp_path, 7, ticks=100, pages=3, num_fds=2)
    write_process(tmp_path, 8, ticks=300, pages=5, num_fds=4)
    delta = ProcessStats(tmp_path).sample({"worker": [7, 8], "engine": [9]})
    per_second, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert delta.counters["process_cpu_seconds_total", "worker"] == 800 / per_second
    assert delta.gauges["process_resident_memory_bytes", "worker"] == 8 * page
    assert delta.gauges["process_open_fds", "worker"] == 6
    assert delta.gauges["process_open_fds", "engine"] == 0  # it has just ended


def test_cpu_time_goes_on_when_a_process_is_replaced(tmp_path):
    stats, per_second = ProcessStats(tmp_path), os.sysconf("SC_CLK_TCK")
    used = []
    for pid, ticks in ((7, 100), (7, 150), (8, 20)):
        write_process(tmp_path, pid, ticks=ticks, pages=1, num_fds=1)
        used.append(stats.sample({"engine": [pid]}).counters["process_cpu_seconds_total", "engine"] * per_second)
    assert used == pytest.approx([200, 100, 40])


def test_without_proc_there_is_nothing(tmp_path):
    assert not ProcessStats(tmp_path / "none").sample({"engine": [1]}).gauges


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_process_has_memory_and_files():
    code = "import sys; sum(range(3_000_000)); print('go', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        delta = ProcessStats().sample({"engine": [process.pid]})
        process.communicate()
    assert delta.counters["process_cpu_seconds_total", "engine"] > 0
    assert delta.gauges["process_resident_memory_bytes", "engine"] > 2**20
    assert delta.gauges["process_open_fds", "engine"] >= 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_process_started_is_found_until_it_ends():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in ProcessStats().children(os.getpid())
        process.communicate(b"\n")
    assert process.pid not in ProcessStats().children(os.getpid())


def test_a_process_that_is_gone_has_started_none(tmp_path):
    assert ProcessStats(tmp_path).children(7) == []


@pytest.mark.parametrize(("text", "count"), [("nr_free 7\noom_kill 3\n", 3), ("nr_free 7\n", 0), (None, 0)])
def test_kills_for_want_of_memory_are_counted_where_the_kernel_tells(
    monkeypatch: pytest.MonkeyPatch, text: str | None, count: int
) -> None:
    def read_text(path: Path) -> str:
        assert path == Path("/proc/vmstat")
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    assert num_oom_kills() == count
