"""A real daemon in real processes, for tests: started on a free port, watched through its log, always ended."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
READY = re.compile(r"Ready in .* url=(\S+)")
LISTENING = re.compile(r"listening url=(\S+)")
_ROLES = {
    "server": "launcher",
    "engine.process": "engine",
    "server.http.worker": "worker",
    "engine.grammar_check_process": "grammar checker",
}


def wait_for(condition: Callable[[], object], *, timeout_s: float, what: str) -> None:
    """Poll until `condition()` is true. Raises TimeoutError that says what did not happen."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}, not within {timeout_s} s")
        time.sleep(0.02)


class Daemon:
    """`quire serve` with `arguments`. Use as a context manager; leaving it kills what is left."""

    def __init__(
        self, *arguments: str, folder: Path, command: tuple[str, ...] | None = None, env: dict[str, str] | None = None
    ) -> None:
        self._log_path = folder / f"quire-{time.monotonic_ns()}.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(command or (sys.executable, "-m", "server")),
                    "serve",
                    *(() if "--uds" in arguments else ("--port", "0")),
                    *arguments,
                ],
                cwd=ROOT if command is None else folder,
                # one thread suits the tiny model, and two would wait for each other on cores that the tests share
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *_: object) -> None:
        children = self.children()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGTERM)
            # under make coverage each process ends by itself, and writes what it measured
            self.process.wait(10 if "COVERAGE_PROCESS_CONFIG" in os.environ else 0.1)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # the second ends it at once
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid, *children]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise

    @property
    def log(self) -> str:
        """Everything written so far."""
        return self._log_path.read_text()

    @property
    def base_url(self) -> str:
        """Where it listens; known before it is ready."""
        wait_for(lambda: LISTENING.search(self.log) or self.process.poll() is not None, timeout_s=60, what="listening")
        match = LISTENING.search(self.log)
        assert match is not None, self.log
        return match[1]

    def wait_ready(self) -> "Daemon":
        """Wait for the closing panel."""
        wait_for(
            lambda: READY.search(self.log) or self.process.poll() is not None, timeout_s=START_TIMEOUT_S, what="ready"
        )
        assert self.process.poll() is None, self.log
        return self

    def children(self) -> list[int]:
        """Return the pids of engine and workers."""
        with contextlib.suppress(FileNotFoundError):
            return [int(pid) for pid in _proc(self.process.pid, f"task/{self.process.pid}/children").split()]
        return []

    def child(self, module: str) -> int:
        """Return the pid of the first child that runs a module, once there is one."""
        wait_for(lambda: self.running(module), timeout_s=60, what=f"a child that runs {module}")
        return self.running(module)[0]

    def running(self, module: str) -> list[int]:
        """Return the pids of the children that run a module."""
        return [pid for pid in self.children() if module in command_line(pid)]

    def connections(self, module: str) -> list[int]:
        """Return, per child that runs a module, how many TCP connections it holds on our port."""
        port = f":{int(self.base_url.rpartition(':')[2]):04X}"
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {row[9] for row in rows if row[1].endswith(port) and row[3] == "01"}
        return [
            sum(link.removeprefix("socket:[").removesuffix("]") in inodes for link in _open_files(pid))
            for pid in self.running(module)
        ]

    def get(self, path: str, *, key: str | None = None) -> httpx.Response:
        """GET a path, with an API key."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.get(self.base_url + path, headers=headers, timeout=60)

    def metrics(self, *, key: str | None = None) -> dict[str, float]:
        """Return the metrics page: sample name (labels but model_name as name{label=value}) → value."""
        samples = {}
        for family in text_string_to_metric_families(self.get("/metrics", key=key).text):
            for sample in family.samples:
                labels = [f"{key}={value}" for key, value in sample.labels.items() if key != "model_name"]
                samples[sample.name + ("{" + ",".join(labels) + "}" if labels else "")] = sample.value
        return samples


@contextlib.contextmanager
def own_daemons(folder: Path) -> Iterator[Callable[..., Daemon]]:
    """Give a function that starts a daemon on the CPU; all that it started are ended with the `with` statement."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Daemon("--device", "cpu", *arguments, folder=folder))


def is_alive(pid: int) -> bool:
    """Tell if a process exists and is no zombie."""
    try:
        return _proc(pid, "stat").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Return the pids of children, theirs, and so on."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
        for file in Path(f"/proc/{pid}/task").glob("*/children"):  # by the thread that started them
            children += map(int, file.read_text().split())
    return children + [pid for child in children for pid in descendants(child)]


def command_line(pid: int) -> list[str]:
    """Return a process's arguments; empty once it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _proc(pid, "cmdline").split("\0")
    return []


def role_of(pid: int) -> str:
    """Return what a process of a daemon is; "" for any other."""
    return next((_ROLES[word] for word in command_line(pid) if word in _ROLES), "")


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(_proc(pid, "statm").split()[1]) * resource.getpagesize()
    return 0


def reset_peak(pid: int) -> None:
    """Let a process's peak_bytes begin again (proc(5), /proc/PID/clear_refs)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Return the most memory that was resident in a process; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", _proc(pid, "status")):
            return int(found[1]) << 10
    return 0


def _proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def _open_files(pid: int) -> list[str]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(path))
    return links
