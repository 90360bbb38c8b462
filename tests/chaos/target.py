"""Target: the server under attack, those who watch it, and the checks after each act.

It owns one daemon with the demo model on the CPU, on a port of the loopback interface. Life: start → attack, check
→ … → end, after which no process of it is left. HealthWatch asks /health all the time, from a thread of its own.
"""

import asyncio
import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from urllib.parse import urlparse

from tests.chaos.client import Address, Answer, ask, completion
from tests.support.daemon import (
    Daemon,
    command_line,
    descendants,
    is_alive,
    peak_bytes,
    reset_peak,
    resident_bytes,
    role_of,
    wait_for,
)

NUM_WORKERS = 2
# few rows and a short queue, which a crowd fills; a pool that one request cannot fill
FLAGS = (
    *("--device", "cpu", "--http-workers", str(NUM_WORKERS), "--max-model-len", "2048", "--kv-cache-memory", "64MiB"),
    *("--max-num-seqs", "16", "--max-queued-requests", "32", "--drain-timeout", "2"),
)
IDLE_GAUGES = (
    "quire_num_requests_running",
    "quire_num_requests_waiting",
    "quire_kv_cache_blocks_used",
    "quire_http_requests_in_progress",
)
GROWTH_MIB = 192  # of any one process, above its size before the first act, after an act
PEAK_MIB = 384  # the same, during an act
_QUESTION = completion("The printer's quire has", max_tokens=24)
_TIMES_ASKED = 4  # on new connections, which the kernel spreads over the workers
_SETTLE_S = 60.0


class HealthWatch:
    """Asks /health every tenth of a second, as a supervisor would; longest_s: the longest answer so far."""

    def __init__(self, address: Address) -> None:
        self.longest_s = 0.0
        self.statuses: Counter[int] = Counter()  # 0: no answer
        self._address = address
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "HealthWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            started_s = time.monotonic()
            status = _health(self._address)
            if status:
                self.longest_s = max(self.longest_s, time.monotonic() - started_s)
            self.statuses[status] += 1
            self._is_over.wait(0.1)


def _health(address: Address) -> int:
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


class Target:
    """One server and what it was like before. scale: of crowds and waits; 1 is the real thing, less a rehearsal."""

    def __init__(self, folder: Path, *, seed: int, scale: float = 1.0, flags: tuple[str, ...] = FLAGS) -> None:
        self.rng = Random(seed)
        self.scale = scale
        self.restart_s: float | None = None  # set by acts that kill something
        self.faults: list[str] = []  # sentences that acts add
        self.slowest: list[tuple[float, str]] = []  # seconds and names of single requests, from acts that name them
        self._folder, self._flags = folder, flags
        self._seen: set[int] = set()  # every process there was
        self.daemon = self._start()
        first = self.ask_normally()[0]
        assert first.text, f"{first.outcome} {first.error}"
        self.text = first.text
        self._first_mib = self.memory_mib()

    def _start(self) -> Daemon:
        started = Daemon(*self._flags, folder=self._folder).wait_ready()
        wait_for(lambda: len(started.running("server.http.worker")) == NUM_WORKERS, timeout_s=60, what="the workers")
        return started

    @property
    def address(self) -> Address:
        """Host and port."""
        parts = urlparse(self.daemon.base_url)
        return parts.hostname or "", parts.port or 0

    def num(self, most: int) -> int:
        """Scale the size of a crowd."""
        return max(4, round(most * self.scale))

    def processes(self) -> list[int]:
        """Return the pids of launcher, engine, workers and their helpers; all are remembered."""
        found = [self.daemon.process.pid, *descendants(self.daemon.process.pid)]
        self._seen.update(found)
        return found

    def begin_again(self) -> None:
        """Start another server in the place of one that was killed."""
        assert not is_alive(self.daemon.process.pid)
        self.daemon = self._start()

    def end(self) -> list[str]:
        """Stop the server; return what is wrong then."""
        self.processes()
        self.daemon.__exit__()
        return self.left_processes(self._seen)

    @staticmethod
    def left_processes(pids: set[int]) -> list[str]:
        """Wait until processes have ended; return a sentence on those that have not."""

        def left() -> list[int]:  # a pid may belong to another program by now
            return [pid for pid in pids if is_alive(pid) and role_of(pid)]

        try:
            wait_for(lambda: not left(), timeout_s=30, what="the end of all processes")
        except TimeoutError:
            return [f"processes left: {[command_line(pid) for pid in left()]}"]
        return []

    def ask_normally(self) -> list[Answer]:
        """Ask the normal question a few times, one after another."""

        async def ask_in_turn() -> list[Answer]:
            return [await ask(self.address, _QUESTION) for _ in range(_TIMES_ASKED)]

        return asyncio.run(ask_in_turn())

    def metrics(self) -> dict[str, float]:
        """Return /metrics once nothing is in progress, or at the end of the patience."""
        found: dict[str, float] = {}

        def is_idle() -> bool:
            found.update(self.daemon.metrics())
            return not any(found[name] for name in IDLE_GAUGES)

        with contextlib.suppress(TimeoutError):  # check() says which gauge
            wait_for(is_idle, timeout_s=_SETTLE_S, what="an idle server")
        return found

    def reset_peaks(self) -> None:
        """Let the peaks of memory begin again."""
        for pid in self.processes():
            reset_peak(pid)

    def memory_mib(self, bytes_of: Callable[[int], int] = resident_bytes) -> dict[str, int]:
        """Return the memory of the largest process of each role: bytes_of is resident_bytes or peak_bytes."""
        found: dict[str, int] = {}
        for pid in self.processes():
            if role := role_of(pid):
                found[role] = max(found.get(role, 0), bytes_of(pid) >> 20)
        return found

    def check(self, metrics: dict[str, float], normal: list[Answer]) -> list[str]:
        """Return what is wrong with the server, in sentences; nothing but good is expected of an idle one."""
        wrong = [f"{name} is {metrics[name]:g}, not 0" for name in IDLE_GAUGES if metrics[name]]
        wrong += [f"a normal request: {a.outcome} {a.error} {a.text!r}" for a in normal if a.text != self.text]
        running = Counter(role_of(pid) for pid in self.processes())
        expected = {"launcher": 1, "engine": 1, "worker": NUM_WORKERS}
        wrong += [
            f"{running[role]} processes are a {role}, not {n}" for role, n in expected.items() if running[role] != n
        ]
        if running["grammar checker"] > NUM_WORKERS:
            wrong.append(f"{running['grammar checker']} grammar checkers")
        for bytes_of, limit_mib, verb in ((resident_bytes, GROWTH_MIB, "has"), (peak_bytes, PEAK_MIB, "had")):
            for role, mib in self.memory_mib(bytes_of).items():
                if mib > (first := self._first_mib.get(role, mib)) + limit_mib:
                    wrong.append(f"the {role} {verb} {mib} MiB; it had {first} before the first act")
        if "Traceback" in self.daemon.log:
            wrong.append("a traceback in the log")
        return wrong
