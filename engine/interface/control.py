"""The control channel between the launcher and its children (HTTP workers, engine): stages, metrics, drain.

Imports msgspec only; never torch. One unix socket in the launcher, one connection per child, frames of
engine/interface/transport.py. The end of the connection is the end of the launcher: a child then exits by itself.
    child → launcher   Hello, MetricsDelta (any time, and before every Flushed), Flushed,
                       Scrape, Cancel, Cancelled (worker), Stage, EngineInfo, EngineFailed, Heartbeat (engine)
    launcher → child   State (workers: stage, drain), Keys, Flush, Page, Cancel, Cancelled (worker), Drain
"""

from typing import Protocol

import msgspec

from engine.interface.metrics import MetricsDelta

# The engine beats once a second, but never within a step. The longest steps are prompt chunks of 512 tokens on a CPU:
# 7 TFLOP for 7 B parameters, a few seconds on a server. Whoever kills the unhealthy should wait for several bad probes.
STALL_AFTER_S = 10.0
# An engine that loads shows bytes, graphs and stages as it goes; the longest silence is compiling kernels.
LOAD_STALL_AFTER_S = 300.0


class Hello(msgspec.Struct, tag=True):
    """First message of a child: its role ("engine" | "worker"), its index and pid."""

    role: str
    index: int
    pid: int


class Stage(msgspec.Struct, tag=True, omit_defaults=True):
    """Where the engine's start stands.

    name: imports, config, kernels, ranks, weights, kv_cache, graphs, self_test, ready.
    """

    name: str
    done: int = 0  # of `total` units; 0 of 0 while unknown
    total: int = 0
    unit: str = ""  # "bytes", "graphs", ...
    detail: str = ""  # one human phrase, e.g. "Llama, 12 layers, bfloat16 on cpu"


class EngineFailed(msgspec.Struct, tag=True):
    """The engine could not start: one sentence and the exit code it will end with."""

    message: str
    exit_code: int


class EngineInfo(msgspec.Struct, tag=True):
    """What the closing panel shows, measured by the engine: label → text ("KV cache" → "65,536 tokens = ...").

    build: labels of quire_build_info: torch, cuda, device, dtype.
    """

    rows: dict[str, str]
    build: dict[str, str] = {}


class Heartbeat(msgspec.Struct, tag=True):
    """The engine loop made progress (sent at most once a second, also while idle)."""

    num_running: int
    num_waiting: int
    step_id: int


class Flush(msgspec.Struct, tag=True):
    """Send your MetricsDelta now, then Flushed with this number."""

    number: int


class Flushed(msgspec.Struct, tag=True):
    """Everything counted before Flush(number) has been sent."""

    number: int


class Scrape(msgspec.Struct, tag=True):
    """A worker wants the metrics page; answered by Page with this number."""

    number: int


class Page(msgspec.Struct, tag=True):
    """The Prometheus text page."""

    number: int
    body: bytes


class Cancel(msgspec.Struct, tag=True):
    """End the requests with this id that came with this API key's hash; answered by Cancelled with this number.

    A worker sends it to the launcher, and the launcher to every other worker.
    """

    number: int
    request_id: str
    key_hash: str


class Cancelled(msgspec.Struct, tag=True):
    """Whether there was such a request; None: not every worker has answered."""

    number: int
    found: bool | None


class State(msgspec.Struct, tag=True):
    """What workers tell their clients about readiness and health: sent on connect and on every change.

    fault: "restarting": from the engine's end until the next one is ready; "dead": the same, once restart after restart
    has not served for a minute; "stalled": the engine's loop, or the load of the next one, makes no progress.
    """

    stage: Stage
    is_draining: bool
    fault: str = ""

    @property
    def is_alive(self) -> bool:
        """False if whoever supervises the daemon should start it anew: GET /health and the watchdog say this."""
        return self.fault not in ("stalled", "dead")


class Drain(msgspec.Struct, tag=True):
    """Finish what runs, take nothing new, end by `timeout_s` from now."""

    timeout_s: float


class Keys(msgspec.Struct, tag=True):
    """The API keys that are let in from now on, as hashes: sent to workers on connect and on every change, if any."""

    hashes: list[str]


ToLauncher = (
    Hello | Stage | EngineFailed | EngineInfo | Heartbeat | MetricsDelta | Flushed | Scrape | Cancel | Cancelled
)
FromLauncher = State | Flush | Page | Drain | Cancel | Cancelled | Keys


class Supervisor(Protocol):
    """A worker's view of the launcher. The real one is server/http/launcher_link.py, a fake is in
    tests/support/fakes.py."""

    @property
    def state(self) -> State:
        """The last State the launcher sent."""
        ...

    @property
    def key_hashes(self) -> list[str]:
        """The API keys as they were changed last; []: never."""
        ...

    async def scrape(self) -> bytes:
        """The metrics page of the whole daemon, this worker's own counts included."""
        ...

    async def cancel(self, request_id: str, *, key_hash: str) -> bool:
        """End the other workers' requests with this id and API key; return if there was one."""
        ...
