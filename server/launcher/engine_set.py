"""EngineSet: the engine processes of a daemon: one, or several that compute prompts and decode. Never torch.

The first engine decodes, and the daemon's state is its state (server/launcher/launcher.py). The others are watched
here: those that decode as well, then those that compute prompts. One that is gone costs time and no requests.
Imports engine.interface and server.launcher.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.interface.config import (
    EngineConfig,
    EngineProcessConfig,
    LaunchConfig,
    PeerConfig,
    PrefillHost,
    ServerConfig,
)
from engine.interface.control import Heartbeat, Leave, Stage
from engine.interface.errors import StartupError
from server.config.disaggregation import shown_counts
from server.config.serve_config import WorkerConfig
from server.launcher.engine_health import StepWatchdog
from server.launcher.processes import child_log_format

logger = logging.getLogger(__name__)

ChildKey = tuple[str, int]  # role ("engine" | "standby" | "worker"), index
_FIRST: ChildKey = ("engine", 0)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_FILES = "nvidia[0-9]*"


@dataclass(frozen=True)
class EngineSpec:
    """One engine process. index: among all engines of the daemon."""

    index: int
    name: str  # decode-0, prefill-0; of a single engine: engine
    config: EngineConfig
    socket: str
    environment: dict[str, str] = field(default_factory=dict)  # beside that of the launcher

    @property
    def key(self) -> ChildKey:
        """What names it among the launcher's children."""
        return ("engine", self.index)

    @property
    def decodes(self) -> bool:
        """False if it computes prompts for others of this daemon, which serves by these."""
        return self.config.peer is None or self.config.peer.role == "decode" or not self.config.peer.num_decode


@dataclass(frozen=True)
class RemoteEngine:
    """A prefill engine of another host, and the unix sockets that lead to it (server/launcher/host_links.py)."""

    host: PrefillHost
    index: int  # there
    socket: str  # for HTTP workers, as EngineSpec.socket
    peer_socket: str  # for decode engines

    @property
    def name(self) -> str:
        """What /health and the log call it."""
        return f"{self.host.address}/prefill-{self.index}"


def plan_engines(
    config: EngineConfig, run_dir: Path, *, environment: Mapping[str, str], devices: Path = Path("/dev")
) -> list[EngineSpec]:
    """Return the engines of a daemon, the first of which decodes. Raises StartupError if there are too few GPUs."""
    first = str(run_dir / "engine.sock")
    if config.peer is None:
        return [EngineSpec(0, "engine", config, first)]
    peer = config.peer
    gpus = _gpus_of(peer, config, environment, devices)
    prefill_sockets = [peer_socket(run_dir, i) for i in range(peer.num_prefill)]
    prefill_sockets += [remote.peer_socket for remote in remote_engines(config, run_dir)]
    specs: list[EngineSpec] = []
    for role, count in (("decode", peer.num_decode), ("prefill", peer.num_prefill)):
        for i in range(count):
            index = len(specs)
            own = msgspec.structs.replace(peer, role=role, index=i, prefill_sockets=prefill_sockets)
            specs.append(
                EngineSpec(
                    index,
                    own.name,
                    msgspec.structs.replace(config, peer=own),
                    first if index == 0 else str(run_dir / f"{own.name}.sock"),
                    {_VISIBLE: gpus[index]} if gpus else {},
                )
            )
    return specs


def peer_socket(run_dir: Path, index: int) -> str:
    """Return the socket on which a prefill engine of this host listens for decode engines."""
    return str(run_dir / f"peer-{index}.sock")


def remote_engines(config: EngineConfig, run_dir: Path) -> list[RemoteEngine]:
    """Return the engines of --prefill-hosts."""
    hosts = [] if config.peer is None else config.peer.prefill_hosts
    named = [(host, i) for host in hosts for i in range(host.num_engines)]
    return [
        RemoteEngine(host, i, str(run_dir / f"remote-{n}.sock"), str(run_dir / f"remote-peer-{n}.sock"))
        for n, (host, i) in enumerate(named)
    ]


def with_sockets(config: ServerConfig, engines: list[EngineSpec], control_socket: str) -> ServerConfig:
    """Return a worker's configuration with the sockets of the engines and the launcher."""
    config = msgspec.structs.replace(config, engine_socket=engines[0].socket, control_socket=control_socket)
    remote = remote_engines(engines[0].config, Path(control_socket).parent)
    peer = engines[0].config.peer
    if peer is None or len(engines) + len(remote) == 1:
        return config
    prefill = [engine for engine in engines if not engine.decodes]
    decode = [engine for engine in engines if engine.decodes]
    return msgspec.structs.replace(
        config,
        prefill_sockets=[*(engine.socket for engine in prefill), *(engine.socket for engine in remote)],
        decode_sockets=[engine.socket for engine in decode],
        engine_names=[
            *(engine.name for engine in prefill),
            *(engine.name for engine in remote),
            *(engine.name for engine in decode),
        ],
        num_remote=len(remote),
        first_decode=peer.first_decode,
    )


def engine_config_of(
    spec: EngineSpec, config: LaunchConfig, control_socket: str, *, is_standby: bool = False, is_held: bool = False
) -> EngineProcessConfig:
    """Return the configuration file of an engine process.

    is_standby: of one that takes the engine's place later. is_held: of one that takes that of another daemon's.
    """
    return EngineProcessConfig(
        engine=spec.config,
        index=spec.index,
        engine_socket=spec.socket,
        control_socket=control_socket,
        log_level=config.log_level,
        log_format=child_log_format(config),
        debug=config.debug,
        is_standby=is_standby or is_held,
        is_held=is_held,
    )


def worker_config_of(server: ServerConfig, config: LaunchConfig, *, listen_fds: list[int]) -> WorkerConfig:
    """Return the configuration file of an HTTP worker process."""
    return WorkerConfig(
        server=server,
        listen_fd=listen_fds[0],
        more_listen_fds=listen_fds[1:],
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        log_level=config.log_level,
        log_format=child_log_format(config),
        debug=config.debug,
    )


class SideEngines:
    """The state of the engines but the first. Use inside one event loop."""

    def __init__(
        self,
        specs: list[EngineSpec],
        *,
        hang_after_s: float,
        on_hang: Callable[[ChildKey, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_hang: called with an engine that made no progress for so long."""
        self._clock = clock
        self._specs = {spec.key: spec for spec in specs}
        self._ready_s: dict[ChildKey, float] = {}
        self._leaving: set[ChildKey] = set()  # the first engine, too
        self._held: set[ChildKey] = set()  # asked to end, and have to wait
        self._watches = {key: self._watch(key, hang_after_s, on_hang) for key in self._specs}

    def __contains__(self, child: ChildKey) -> bool:
        """Return whether a child is one of them."""
        return child in self._specs

    @property
    def num_decoding(self) -> int:
        """Of those that decode, the number that serves."""
        return sum(self._specs[key].decodes for key in self._ready_s)

    def decodes(self, child: ChildKey) -> bool:
        """Return whether a child is one of those that decode."""
        return child in self._specs and self._specs[child].decodes

    def let_leave(self, child: ChildKey, *, timeout_s: float, first_serves: bool) -> Leave | None:
        """Let an engine end that was asked to; return what to tell it, or None if it does not serve.

        It gets `timeout_s` if another engine decodes that does not leave, and can take all new requests. Of several
        that decode, the last one has to stay until another serves, since its requests have nowhere to go: None, and
        it asks again. The only one that decodes ends at once: its requests wait for the next.
        """
        is_first = child not in self._specs
        if not (first_serves if is_first else child in self._ready_s):
            return None
        leaving = self._leaving - {child}
        others = sum(self._specs[key].decodes for key in self._ready_s if key not in leaving and key != child)
        others += first_serves and not is_first and _FIRST not in leaving
        if not others and any(spec.decodes for spec in self._specs.values()):
            if child not in self._held:
                self._held.add(child)
                logger.warning("engine stays until another one decodes index=%d", child[1])
            return None
        self._held.discard(child)
        self._leaving.add(child)
        logger.info("engine leaves index=%d others=%d", child[1], others)
        return Leave(timeout_s if others else 0.0)

    def has_left(self, child: ChildKey) -> bool:
        """Return whether an engine that has ended had been let go."""
        is_leaving = child in self._leaving
        self._leaving.discard(child)
        self._held.discard(child)
        return is_leaving

    def enter(self, child: ChildKey, stage: Stage) -> None:
        """Record a stage of an engine's start."""
        if stage.name == "ready":
            self._ready_s[child] = self._clock()
            self._watches[child].start()
            logger.info("engine ready name=%s", self._specs[child].name)

    def beat(self, child: ChildKey, heartbeat: Heartbeat) -> None:
        """Record a heartbeat."""
        self._watches[child].beat(heartbeat)

    def end(self, child: ChildKey) -> float:
        """Record that an engine has ended; return for how long it had served."""
        self._watches[child].stop()
        ready_s = self._ready_s.pop(child, None)
        return 0.0 if ready_s is None else self._clock() - ready_s

    def _watch(self, key: ChildKey, hang_after_s: float, on_hang: Callable[[ChildKey, float], None]) -> StepWatchdog:
        watch = StepWatchdog(
            lambda is_stalled: self._on_stall(key, is_stalled=is_stalled),
            on_hang=lambda: on_hang(key, watch.silence_s),
            hang_after_s=hang_after_s,
        )
        return watch

    def _on_stall(self, key: ChildKey, *, is_stalled: bool) -> None:
        logger.log(
            logging.ERROR if is_stalled else logging.INFO,
            "engine %s name=%s",
            "stalled" if is_stalled else "makes progress again",
            self._specs[key].name,
        )


def _gpus_of(peer: PeerConfig, config: EngineConfig, environment: Mapping[str, str], devices: Path) -> list[str]:
    """Return each engine's GPUs, for CUDA_VISIBLE_DEVICES; none on a machine without GPUs."""
    if config.device not in ("auto", "cuda"):
        return []
    visible = environment.get(_VISIBLE)
    if visible is not None:
        gpus = [name.strip() for name in visible.split(",") if name.strip()]
    else:
        gpus = [str(i) for i in range(len(list(devices.glob(_GPU_FILES))))]
    if config.device == "auto" and not gpus:
        return []
    num_engines, num_ranks = peer.num_prefill + peer.num_decode, config.tensor_parallel_size
    if len(gpus) < num_engines * num_ranks:
        named, each, fewer = shown_counts((peer.num_prefill, peer.num_decode)), "one", "fewer engines"
        if num_ranks > 1:
            named, each = f"{named} with --tensor-parallel-size {num_ranks}", str(num_ranks)
            fewer = "fewer engines, a smaller --tensor-parallel-size"
        raise StartupError(
            f"--disaggregate {named} needs {num_engines * num_ranks} GPUs, {each} for each engine, and"
            f" {len(gpus)} can be seen: use {fewer}, or --device cpu.",
            exit_code=2,
        )
    return [",".join(gpus[num_ranks * i : num_ranks * (i + 1)]) for i in range(num_engines)]
