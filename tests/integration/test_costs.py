"""The costliest requests of every route, eight at a time: the worker answers others meanwhile, within its memory.

Those of a long answer come alone.
"""

import http.client
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from server.api.limits import WORKER_MIB
from tests.integration.conftest import needs_proc
from tests.support.costly_bodies import CONTEXT, COSTLY_BODIES
from tests.support.daemon import Daemon
from tests.support.loop_probe import slowness

pytestmark = [needs_proc, pytest.mark.full]

_MAX_HEALTH_S = 0.25
_IDLE_HEALTH_S = 0.01  # more often than not, on an idle machine
_ANSWERS = {200, 400, 429, 503}


def memory_mib(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) // 1024


def health_times(client: httpx.Client, must_go_on: Callable[[], bool]) -> list[float]:
    """Ask for /health, one after the other, at least twenty times; return the sorted times."""
    times = []
    while must_go_on() or len(times) < 20:
        begun_s = time.monotonic()
        assert client.get("/health").status_code == 200
        times.append(time.monotonic() - begun_s)
        time.sleep(0.01)
    return sorted(times)


def idle_slowness(client: httpx.Client) -> float:
    """Return how many times slower than an idle one the machine is, by a step of work and by an idle worker's health.

    1 at least: what others do to the machine is no fault of the worker, and an idle machine excuses nothing.
    """
    idle = health_times(client, lambda: False)
    return max(slowness(time.monotonic), idle[len(idle) // 2] / _IDLE_HEALTH_S)


def post(base_url: str, path: str, content: bytes) -> int:
    """Send a body and read the answer; return its status. Almost no Python, which /health would wait for here."""
    connection = http.client.HTTPConnection(base_url.removeprefix("http://"), timeout=300)
    connection.request("POST", path, content, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("costs")
    flags = ("--device", "cpu", "--pooling", "last", "--http-workers", "1", "--max-model-len", str(CONTEXT))
    with Daemon(*flags, folder=folder) as daemon:
        yield daemon.wait_ready()


# rule: Limits: No request stops others: eight of the costliest of every route at once, `/health` answers meanwhile
@pytest.mark.parametrize("name", COSTLY_BODIES)
def test_the_costliest_requests_of_a_route_stop_no_others(worker: Daemon, name: str) -> None:
    pid, statuses, peak = worker.child("server.http.worker"), [], 0
    body = COSTLY_BODIES[name]
    path, content = body.path, body.content

    def is_open() -> bool:
        nonlocal peak
        peak = max(peak, memory_mib(pid))
        return any(thread.is_alive() for thread in threads)

    with httpx.Client(base_url=worker.base_url, timeout=60) as client:
        slow, idle_mib = idle_slowness(client), memory_mib(pid)
        threads = [
            threading.Thread(target=lambda: statuses.append(post(worker.base_url, path, content)))
            for _ in range(body.num_at_once)
        ]
        for thread in threads:
            thread.start()
        times = health_times(client, is_open)
        slow = max(slow, idle_slowness(client))  # the machine's load may have begun meanwhile
    late = times[-1 - len(times) // 20]  # one in twenty may be late for reasons of its machine
    print(
        f"{name}: {sorted(statuses)} {len(times)} times, half below {1000 * times[len(times) // 2]:.0f} ms, "
        f"nearly all {1000 * late:.0f} ms, longest {1000 * times[-1]:.0f} ms, "
        f"slowness {slow:.1f}, {peak - idle_mib} MiB"
    )
    assert len(statuses) == body.num_at_once
    assert set(statuses) <= _ANSWERS
    assert late < _MAX_HEALTH_S * slow
    assert peak - idle_mib < WORKER_MIB
