"""The control channel between the launcher and its children (HTTP workers, engine): stages, metrics, drain.

Imports msgspec only; never torch. The launcher listens on one unix socket; each child has one connection, with the
frames of engine/interface/transport.py. A closed connection means that the launcher is dead: the child then exits.
    child → launcher   Hello, MetricsDelta (any time, and before every Flushed), Flushed, Prepared, Serving, Scrape,
                       AskUsage, Cancel, Cancelled (worker), Stage, EngineInfo, EngineFailed, Heartbeat, AskLeave
                       (engine)
    launcher → child   State (stage, drain), Drain, Keys, ReloadTls, HandedOver, Page, Ledger, Cancel, Cancelled
                       (worker), Flush, Leave, Activate (engine)
"""

from typing import Protocol

import msgspec

from engine.interface.metrics import MetricsDelta
from engine.interface.tenant import Tenant

# The engine sends a heartbeat once a second, but never within a step. The longest steps are prompt chunks of 512 tokens
# on a CPU: 7 TFLOP for 7 B parameters, a few seconds on a server. A supervisor that kills an unhealthy daemon should
# wait for several failed probes.
STALL_AFTER_S = 10.0
# A loading engine reports bytes, graphs and stages. The longest time without a report is the compilation of kernels.
LOAD_STALL_AFTER_S = 300.0


class Hello(msgspec.Struct, tag=True):
    """The first message of a child: its role ("engine" | "standby" | "worker"), index and pid.

    A standby says it once more, as the engine, when it has been activated.
    """

    role: str
    index: int
    pid: int


class Prepared(msgspec.Struct, tag=True):
    """A worker has loaded, and accepts connections as soon as State.accepts says so."""


class Serving(msgspec.Struct, tag=True):
    """A worker accepts connections from now on."""


class Stage(msgspec.Struct, tag=True, omit_defaults=True):
    """The progress of the engine's start.

    name: imports, config, kernels, ranks, weights, kv_cache, graphs, self_test, ready. A standby that waits: standby.
    """

    name: str
    done: int = 0  # completed units, out of `total`; both 0: unknown
    total: int = 0
    unit: str = ""  # "bytes", "graphs", ...
    detail: str = ""  # a readable phrase, e.g. "Llama, 12 layers, bfloat16 on cpu"


class EngineFailed(msgspec.Struct, tag=True):
    """The engine could not start, or failed: one sentence and its exit code."""

    message: str
    exit_code: int


class EngineInfo(msgspec.Struct, tag=True):
    """The rows of the start-up panel that the engine measured: label → text ("KV cache" → "65,536 tokens = ...").

    build: labels of the metric quire_build_info: torch, cuda, device, dtype.
    """

    rows: dict[str, str]
    build: dict[str, str] = {}


class Heartbeat(msgspec.Struct, tag=True):
    """Reports progress of the engine loop. Sent at most once a second, also while idle."""

    num_running: int
    num_waiting: int
    step_id: int


class Flush(msgspec.Struct, tag=True):
    """Requests the child's MetricsDelta now, followed by Flushed with this number."""

    number: int


class Flushed(msgspec.Struct, tag=True):
    """Confirms that everything counted before Flush(number) has been sent."""

    number: int


class Scrape(msgspec.Struct, tag=True):
    """Requests the metrics page for a worker, in OpenMetrics' format or Prometheus' own. The reply is Page."""

    number: int
    is_open_metrics: bool = False


class Page(msgspec.Struct, tag=True):
    """The metrics page of the Scrape with this number."""

    number: int
    body: bytes


class Cancel(msgspec.Struct, tag=True):
    """Ends the requests with this id and this API key hash. The reply is Cancelled with this number.

    A worker sends it to the launcher; the launcher sends it to every other worker.
    """

    number: int
    request_id: str
    key_hash: str


class Cancelled(msgspec.Struct, tag=True):
    """The reply to Cancel. found: True if such a request existed; None: not every worker has answered."""

    number: int
    found: bool | None


class State(msgspec.Struct, tag=True):
    """The daemon's readiness and health, for /ready and /health of the workers. Sent on connect and on every change.

    fault: "restarting": from the engine's exit until the next engine is ready; "dead": restarts have failed for a
    minute; "stalled": the engine's loop, or the load of the next engine, makes no progress.
    num_ends: engines that were ready and have ended. was_killed: the last of them by a kill from outside (SIGKILL, and
    not for want of memory). accepts: False while another daemon has the port, which this one takes over later: workers
    load, and leave connections to it. A worker's own copy is False again once another daemon has taken the port over.
    lets_wait: while no engine serves, new requests wait for the next one as open ones do, because it comes soon: a
    standby is loaded or takes over, or a takeover has stopped the engine. engine_socket: of the next daemon's engine,
    with which open requests go on; "": of the daemon's own.
    """

    stage: Stage
    is_draining: bool
    fault: str = ""
    num_ends: int = 0
    was_killed: bool = False
    accepts: bool = True
    lets_wait: bool = False
    engine_socket: str = ""

    @property
    def is_serving(self) -> bool:
        """True while an engine is ready and makes progress."""
        return self.stage.name == "ready" and not self.fault

    @property
    def is_alive(self) -> bool:
        """False if a supervisor should restart the daemon. GET /health and the watchdog report this."""
        return self.fault not in ("stalled", "dead")


class Drain(msgspec.Struct, tag=True):
    """Drains a worker: it refuses new requests, finishes the running ones and exits within `timeout_s`."""

    timeout_s: float


class AskLeave(msgspec.Struct, tag=True):
    """One of several engines was sent SIGTERM: it asks to end and to be started again.

    The reply is Leave, or none while it has to stay; then it asks again.
    """


class Leave(msgspec.Struct, tag=True):
    """Lets an engine end once it has finished its requests and others have taken its blocks, or after `timeout_s`.

    It takes requests that come nevertheless. 0: at once, since no other engine could take new ones, or since a next
    daemon needs the memory (server/launcher/engine_lease.py).
    """

    timeout_s: float


class HandedOver(msgspec.Struct, tag=True):
    """Tells a worker that another daemon has the port from now on.

    It accepts no more connections, serves those that are open, and exits when the last one has closed.
    """


class Activate(msgspec.Struct, tag=True):
    """Tells a standby, or an engine that is held, that it is the engine from now on: it loads the rest, and serves."""


class Keys(msgspec.Struct, tag=True):
    """The hashes of all API keys valid from now on. Sent to workers on connect and on change, if keys are in use.

    roles: by hash; a key that is not there has the default roles. tenants: by hash, of those with a name.
    """

    hashes: list[str]
    roles: dict[str, list[str]] = {}
    tenants: dict[str, Tenant] = {}


class KeyUsage(msgspec.Struct):
    """What the requests of one name of API keys have used since the daemon's start."""

    key: str
    requests: int = 0  # accepted HTTP requests
    refused_requests: int = 0
    computed_tokens: int = 0  # of prompts
    cached_tokens: int = 0  # of prompts
    generated_tokens: int = 0
    device_seconds: float = 0.0
    grammar_seconds: float = 0.0


class AskUsage(msgspec.Struct, tag=True):
    """Requests the ledger for a worker. The reply is Ledger with this number."""

    number: int


class Ledger(msgspec.Struct, tag=True):
    """The use of all names of API keys, in alphabetical order."""

    number: int
    start_s: float  # when the daemon started, in Unix time
    usage: list[KeyUsage]


class ReloadTls(msgspec.Struct, tag=True):
    """Tells a worker to read the TLS files again for new connections; the launcher has checked them."""


ToLauncher = (
    Hello
    | Prepared
    | Serving
    | Stage
    | EngineFailed
    | EngineInfo
    | Heartbeat
    | MetricsDelta
    | Flushed
    | Scrape
    | Cancel
    | Cancelled
    | AskUsage
    | AskLeave
)
FromLauncher = (
    State | Flush | Page | Drain | Cancel | Cancelled | Keys | ReloadTls | HandedOver | Activate | Ledger | Leave
)


class LauncherChannel(Protocol):
    """A worker's interface to the launcher: server/http/launcher_link.py, or the fake in tests/support/fakes.py."""

    @property
    def state(self) -> State:
        """The last State that the launcher sent."""
        ...

    @property
    def key_hashes(self) -> list[str]:
        """The hashes of the last Keys message; [] before the first."""
        ...

    @property
    def key_roles(self) -> dict[str, list[str]]:
        """The roles of the last Keys message."""
        ...

    @property
    def key_tenants(self) -> dict[str, Tenant]:
        """The tenants of the last Keys message."""
        ...

    async def usage(self) -> Ledger:
        """Return the ledger of the whole daemon."""
        ...

    async def scrape(self, *, is_open_metrics: bool = False) -> bytes:
        """Return the metrics page of the whole daemon, including this worker's newest counts.

        is_open_metrics: in OpenMetrics' format, with exemplars, instead of Prometheus' text format.
        """
        ...

    async def cancel(self, request_id: str, *, key_hash: str) -> bool:
        """End requests with this id and API key at the other workers; return True if one existed."""
        ...
