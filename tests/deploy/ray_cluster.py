"""A Ray cluster of one machine with replicas of the demo model, for tests, and what asks it.

It has its own ports and folder, so that no other Ray is met, and its end is that of its own processes.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.ray.edge import CALLBACK, CALLBACK_VARIABLE

ROOT = Path(__file__).parents[2]
NUM_REPLICAS = 3
ARGUMENTS = {
    "replicas": NUM_REPLICAS,
    "max_replicas": None,
    "cpus": 1,
    "health_period": 1,
    "drain_timeout": 120,
    "max_model_len": 2048,
    "kv_cache_memory": "64MiB",
}
LONG = {"prompt": "A quire is", "max_tokens": 1500, "ignore_eos": True, "stream": True}


_PIDS = """
import json, os, sys, ray
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
pids = {}
for row in ray.util.list_named_actors(all_namespaces=True):
    if "SERVE_REPLICA" in row["name"]:
        try:
            call = ray.get_actor(row["name"]).__ray_call__.remote(lambda _: os.getpid())
            pids[row["name"].rpartition("#")[2]] = ray.get(call)
        except (ValueError, ray.exceptions.RayActorError):
            pass  # it ended meanwhile
print(json.dumps(pids))
"""

_GROUPS = """
import json, sys, ray
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
print(json.dumps([group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]))
"""


def wait_for(condition: Callable[[], object], *, timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}, not within {timeout_s} s"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cluster:
    """`ray start` and `serve run` of the shipped YAML. Life: start → asked → stop."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.address = f"127.0.0.1:{free_port()}"
        self._config = folder / "quire.yaml"
        self._log = folder / "ray.log"
        self.metrics_port = free_port()
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": str(folder),
            CALLBACK_VARIABLE: CALLBACK,
            "RAY_AUTH_MODE": "token",  # Ray runs the code of whoever reaches it
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, num_gpus: int = 0, num_replicas: int = NUM_REPLICAS, **arguments: object) -> None:
        """Start Ray, which takes num_gpus on trust, and deploy as deploy() does."""
        port = self.address.rpartition(":")[2]
        flags = ["--head", "--block", f"--port={port}", "--num-cpus=4", f"--num-gpus={num_gpus}"]
        flags += [
            "--include-dashboard=false",
            f"--metrics-export-port={self.metrics_port}",
            "--disable-usage-stats",
            "--object-store-memory=100000000",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *flags],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(lambda: self._accepts(int(port)), timeout_s=60, what="the cluster's address")
        self.deploy(replicas=num_replicas, **arguments)
        wait_for(lambda: len(self.replicas()) == num_replicas, timeout_s=240, what=f"{num_replicas} replicas")

    def deploy(self, *, autoscaling: dict[str, float] | None = None, **arguments: object) -> None:
        """Deploy the shipped YAML with arguments of its application, as a user does.

        autoscaling: options of Ray's own, in place of what the arguments make of it.
        """
        config = yaml.safe_load((ROOT / "deploy" / "ray" / "quire.yaml").read_text())
        config["http_options"] = {"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])}
        config["applications"][0]["args"] |= ARGUMENTS | arguments
        if autoscaling is not None:
            config["applications"][0]["deployments"] = [{"name": "Quire", "autoscaling_config": autoscaling}]
        self._config.write_text(yaml.safe_dump(config))
        flags = ["run", "--non-blocking", "--address", self.address, str(self._config)]
        self._python("-m", "ray.serve.scripts", *flags)

    def pids(self) -> dict[str, int]:
        """Return the replicas that have a process, those that are ending included."""
        return json.loads(self._python("-c", _PIDS, self.address).splitlines()[-1])

    def placement_groups(self) -> list[dict]:
        """Return Ray's rows of the placement groups that there are."""
        return json.loads(self._python("-c", _GROUPS, self.address).splitlines()[-1])

    def stop(self) -> None:
        """End this cluster's processes and no others."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def replicas(self) -> list[str]:
        """Return the ids of the replicas that answer now."""
        try:
            replies = [httpx.get(self.url + "/health", timeout=20) for _ in range(8 * NUM_REPLICAS)]
        except httpx.TransportError:
            return []
        return sorted({reply.headers.get("x-quire-replica", "") for reply in replies} - {""})

    def _python(self, *arguments: str) -> bytes:
        """Run Python as a user of the cluster; return what it wrote."""
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self._environment, check=True, timeout=180, stdout=subprocess.PIPE
        ).stdout

    def _accepts(self, port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False


def post(cluster: Cluster, session: str = "", **body: object) -> httpx.Response:
    headers = {"x-session-id": session} if session else {}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=120)


def samples(cluster: Cluster, session: str) -> dict[str, float]:
    """Return the metrics page of the replica that a session is at home on."""
    page = httpx.get(f"{cluster.url}/metrics", headers={"x-session-id": session}, timeout=30).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = "".join(f"[{value}]" for name, value in sample.labels.items() if name != "model_name")
            found[sample.name + labels] = sample.value
    return found


def session_of(cluster: Cluster, replica: str) -> str:
    """Return a session that is at home on a replica."""
    for i in range(200):
        reply = httpx.get(f"{cluster.url}/health", headers={"x-session-id": f"probe-{i}"}, timeout=30)
        if reply.headers["x-quire-replica"] == replica:
            return f"probe-{i}"
    raise AssertionError(f"no session of 200 is at home on {replica}")


class Stream(threading.Thread):
    """One long answer, read to its end; what is read is kept."""

    def __init__(self, cluster: Cluster, session: str, **body: object) -> None:
        super().__init__(daemon=True)
        self.replica = ""
        self.events: list[str] = []
        self.began = threading.Event()
        self.error: Exception | None = None
        self._request = {"headers": {"x-session-id": session}, "json": LONG | body, "timeout": 180}
        self._url = f"{cluster.url}/v1/completions"
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, **self._request) as reply:
                self.replica = reply.headers.get("x-quire-replica", "")
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.began.set()
        except Exception as error:
            self.error = error
        finally:
            self.began.set()

    def finished(self) -> list[dict]:
        """Return the events once the stream is over: always, and with [DONE]."""
        self.join(240)
        assert not self.is_alive(), "a stream hangs"
        assert self.error is None, self.error
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


def engine_of(replica: int) -> int:
    """Return the pid of the engine below a replica's process."""
    (engine,) = _below(replica, b"engine.process\0")
    return engine


def ranks_of(engine: int) -> list[int]:
    """Return the pids of an engine's further ranks."""
    return _below(engine, b"engine.rank_process\0")


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _below(pid: int, argument: bytes) -> list[int]:
    """Return the pids below a process of those that have an argument."""
    found, todo = [], [pid]
    while todo:
        pid = todo.pop()
        if argument in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
        for task in Path(f"/proc/{pid}/task").iterdir():
            todo += [int(child) for child in (task / "children").read_text().split()]
    return found
