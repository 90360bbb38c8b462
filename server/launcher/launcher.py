"""Launcher: owns the port, the child processes, the metrics registry and the shutdown. Never torch.

    launcher ── control socket ──┬── HTTP worker 0 … n ──┐
                                 └── engine ─────────────┴── engine socket
Life: bind (before slow work) → launch → children start side by side → ready → watch and restart → drain on SIGTERM or
SIGINT: workers finish their streams, then the engine ends. A second signal ends everything at once. In a takeover the
workers wait before they accept connections, until the daemon is ready and the running one hands its port over.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.interface.child_process import describe_exit
from engine.interface.config import EngineConfig, LaunchConfig, ServerConfig
from engine.interface.control import (
    Activate,
    AskLeave,
    Drain,
    EngineFailed,
    EngineInfo,
    HandedOver,
    Heartbeat,
    Hello,
    Prepared,
    Serving,
    Stage,
)
from server.config.version import package_version
from server.launcher.console import make_console
from server.launcher.control_server import ControlServer, KeyReloader, learn_limits, reload_access
from server.launcher.engine_health import EngineDowntime, StepWatchdog
from server.launcher.engine_lease import EngineLease
from server.launcher.engine_set import (
    ChildKey,
    EngineSpec,
    SideEngines,
    engine_config_of,
    plan_engines,
    with_sockets,
    worker_config_of,
)
from server.launcher.host_links import HostLinks
from server.launcher.metrics_registry import MetricsRegistry
from server.launcher.port import Port
from server.launcher.process_metrics import LauncherStats
from server.launcher.processes import Backoff, Tasks, is_on_terminal, kill_child, num_oom_kills, start_child
from server.launcher.run_dir import RunDir
from server.launcher.shutdown import Shutdown
from server.launcher.stand_in import StandIn
from server.launcher.standby import Standby
from server.launcher.startup_banner import StartupBanner
from server.launcher.systemd import Notifier, NotifyingConsole
from server.launcher.takeover import Takeover
from server.launcher.takeover_form import facts_of

logger = logging.getLogger(__name__)
ENGINE_MODULE = "engine.process"
_WORKER_MODULE = "server.http.worker"
_ENGINE: ChildKey = ("engine", 0)
_STANDBY: ChildKey = ("standby", 0)


class Launcher:
    """One daemon; `run` lasts as long as it.

    listeners: none if a host serves the app (server/hosted/app.py). takeover: if they are a running daemon's.
    """

    def __init__(
        self,
        config: LaunchConfig,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listeners: Sequence[socket.socket],
        run_dir: RunDir,
        *,
        engine_module: str = ENGINE_MODULE,
        notifier: Notifier | None = None,
        takeover: Takeover | None = None,
    ) -> None:
        self._config = config
        self._server_config = server_config
        self._listeners = listeners
        self._run_dir = run_dir
        self._engine_module = engine_module
        self._engines = plan_engines(engine_config, run_dir.path, environment=os.environ)
        self._hosts = HostLinks(config.host_links, self._engines, run_dir.path)
        self._sides = SideEngines(self._engines[1:], hang_after_s=config.stall_timeout_s, on_hang=self._end_hung)
        self._held_ready: Stage | None = None  # of the first engine's first start, until the others are ready
        self._control_socket = str(run_dir.path / "control.sock")
        self._registry = MetricsRegistry(
            model_name=server_config.served_model_names[0],
            version=package_version(),
            compat=config.metrics_compat,
            sample=lambda: self._stats.sample(),  # noqa: PLW0108 - there is no _stats yet
        )
        self._control = ControlServer(registry=self._registry, on_message=self._on_message)
        self._keys = KeyReloader(config, server_config.api_key_hashes, self._control.set_keys)
        self._watch = StepWatchdog(
            self._on_stall,
            on_hang=lambda: self._end_hung(_ENGINE, self._watch.silence_s),
            hang_after_s=config.stall_timeout_s,
        )
        self._notifier = notifier or Notifier(None)
        self._console = NotifyingConsole(make_console(config.log_format, sys.stderr), self._notifier)
        self._banner = StartupBanner(config, server_config, listeners, self._console)
        self._children: dict[ChildKey, asyncio.subprocess.Process] = {}
        self._downtime = EngineDowntime()
        self._stats = LauncherStats(
            children=self._children, state=lambda: self._control.state, watch=self._watch, downtime=self._downtime
        )
        self._stand_in = StandIn(
            listeners, config, root_path=server_config.root_path, state=lambda: self._control.state
        )
        self._standby = Standby(
            self._start_standby,
            reason=lambda: self._failures.pop(_STANDBY, None),
            tell=lambda is_loaded: self._control.set_state(lets_wait=is_loaded),
        )
        self._lease = EngineLease(
            self._children,
            control=self._control,
            standby=self._standby,
            on_drain=lambda: self._end.drain(signal.SIGTERM),
        )
        self.port = Port(
            listeners,
            run_dir,
            num_workers=config.http_workers,
            takeover=takeover,
            control=self._control,
            notifier=self._notifier,
            has_started=lambda: self._banner.is_made,
            on_given=self._on_given,
            lease=self._lease,
            facts=lambda: facts_of(engine_config, server_config),
            engine_socket=self._engines[0].socket,
            count=self._registry.merge,
        )
        self._end = Shutdown(
            self._children,
            control=self._control,
            standby=self._standby,
            console=self._console,
            drain_timeout_s=config.drain_timeout_s,
            wait_guests=self.port.wait_guests,
        )
        self._failures: dict[ChildKey, EngineFailed] = {}
        self._started_once: set[ChildKey] = set()  # an engine that was ready, a worker that said hello
        self._tasks = Tasks(on_error=self._end.fail)

    @property
    def app_config(self) -> ServerConfig:
        """The configuration of a worker, with the sockets of the engines and of the launcher."""
        return with_sockets(self._server_config, self._engines, self._control_socket)

    @property
    def _is_draining(self) -> bool:
        return self._control.state.is_draining

    async def run(self) -> int:
        """Start the children and keep them until a signal; return the exit code. Raises StartupError."""
        self._end.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup, is_on_terminal())
        await self._control.start(self._control_socket)
        await self._hosts.start()
        logger.info("listening url=%s", self._banner.url)
        self._banner.begin(self._control.state.stage)
        self._watch_for_manager()
        self._tasks.spawn(self.port.take(watch=self._watch_for_manager))
        for spec in self._engines:
            self._tasks.spawn(self._keep_engine(spec))
        if self._config.has_standby:
            self._tasks.spawn(self._standby.run())
        for index in range(self._config.http_workers):
            self._tasks.spawn(self._keep_worker(index))
        try:
            return await self._end.wait()
        finally:
            self.port.stop()
            self._stand_in.stop()
            self._console.stop()
            self._tasks.cancel()
            await asyncio.gather(self._control.aclose(), self._hosts.aclose())
            for process in self._children.values():
                kill_child(process)
            await asyncio.gather(*(process.wait() for process in self._children.values()))
            self.port.close()  # now the running daemon has the memory again

    def _write_config(self, name: str, spec: EngineSpec, *, is_standby: bool = False, is_held: bool = False) -> Path:
        config = engine_config_of(spec, self._config, self._control_socket, is_standby=is_standby, is_held=is_held)
        return self._run_dir.write(name, config)

    async def _keep_engine(self, spec: EngineSpec) -> None:
        path = self._write_config(f"{spec.name}.json", spec)
        first = self._write_config("held.json", spec, is_held=True) if self.port.holds_engine else path
        await self._keep(spec.key, self._engine_module, path, first=first, environment=spec.environment)

    async def _start_standby(self) -> asyncio.subprocess.Process:
        config = self._write_config("standby.json", self._engines[0], is_standby=True)
        process = self._children[_STANDBY] = await start_child(self._engine_module, config)
        return process

    def _take_standby(self) -> asyncio.subprocess.Process | None:
        process = self._standby.take()
        if process is not None:
            self._control.send(Activate(), role="standby")
            del self._children[_STANDBY]
        return process

    async def _keep_worker(self, index: int) -> None:
        fds = [listener.fileno() for listener in self.port.of_worker(index)]
        server_config = msgspec.structs.replace(self.app_config, worker_index=index)
        config = worker_config_of(server_config, self._config, listen_fds=fds)
        path = self._run_dir.write(f"worker-{index}.json", config)
        await self._keep(("worker", index), _WORKER_MODULE, path, pass_fds=fds)
        self.port.close_of_worker(index)

    async def _keep(
        self,
        child: ChildKey,
        module: str,
        config: Path,
        *,
        first: Path | None = None,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a child, and again whenever it ends, until drain. A first start that fails ends the daemon.

        first: the configuration of the first start.
        """
        is_engine = child[0] == "engine"
        backoff = Backoff(Backoff.LAST_S if is_engine else Backoff.WORKER_LAST_S)
        while await self._may_start(child):
            if child in self._started_once:
                self._registry.count(f"{child[0]}_restarts_total")
            started_s, num_kills, was_killed = time.monotonic(), num_oom_kills(), False
            process = self._take_standby() if child == _ENGINE else None
            if process is None:
                process = await start_child(module, first or config, pass_fds=pass_fds, environment=environment)
                first = None
            self._children[child] = process
            returncode = await process.wait()
            await self._control.settle(*child)  # or its last word, which may be "ready", would come after its end
            if not self._is_kept(child):
                return
            is_lent = is_engine and self._lease.is_lent
            failure, has_left = self._failures.pop(child, None), self._sides.has_left(child) or is_lent
            if child == _ENGINE and child in self._started_once:
                was_killed = returncode == -signal.SIGKILL and failure is None and num_oom_kills() == num_kills
                was_killed |= has_left
                self._downtime.begin(hung_s=self._watch.age_s, was_killed=was_killed)
                self._watch.stop()
                if not is_lent:
                    self._watch.load()
            served_s = self._sides.end(child) if child in self._sides else time.monotonic() - started_s
            has_decoded = child == _ENGINE or self._sides.decodes(child)
            if has_decoded and not self._sides.num_decoding and (fault := self._downtime.fault):
                lets_wait = is_lent or self._standby.is_loaded
                self._control.end_engine(fault=fault, was_killed=was_killed, lets_wait=lets_wait)
            reason = failure.message if failure else f"The {child[0]} process {describe_exit(returncode)}."
            if child not in self._started_once or (failure is not None and not self._banner.is_made):
                self._end.refuse(reason, failure.exit_code if failure else 3)
                return
            # The load of an engine may take minutes, and is no sign of health
            delay_s = backoff.next(healthy_s=self._downtime.served_s if child == _ENGINE else served_s)
            if has_left or (child == _ENGINE and self._standby.process is not None):
                delay_s = 0.0
            level = logging.DEBUG if is_lent else logging.INFO if has_left else logging.ERROR
            logger.log(level, "%s %d ended, restarting delay_s=%g reason=%r", *child, delay_s, reason)
            self.port.end(child)
            if self.port.needs_stand_in and not is_engine:
                await self._stand_in.start(num_ended=backoff.num_ended)
            await asyncio.sleep(delay_s)

    async def _may_start(self, child: ChildKey) -> bool:
        if child == _ENGINE and self._lease.is_lent:
            await self._lease.wait_own()
            self._watch.load()
        return self._is_kept(child)

    def _is_kept(self, child: ChildKey) -> bool:
        """Return whether a child is to run: an engine also in a drain, as long as streams may need it to go on."""
        if child == _ENGINE and child in self._started_once and self._server_config.max_replays:
            return not self._end.is_drained
        return not (self._is_draining or self._end.is_drained or (self.port.is_given and child[0] == "worker"))

    def _watch_for_manager(self) -> None:
        self._tasks.spawn(self._notifier.watch(state=self._stand_in.supervised_state))

    def _on_message(self, hello: Hello, message: Any) -> None:
        child = (hello.role, hello.index)
        engine = self._children.get(_ENGINE)
        if child == _STANDBY and self.port.holds_engine and engine is not None and engine.pid == hello.pid:
            child = _ENGINE
        match message:
            case Hello(role="worker"):
                self._started_once.add(child)
                if self._is_draining:
                    self._control.send(Drain(0.0), role="worker", index=hello.index)
                elif self.port.is_given:
                    self._control.send(HandedOver(), role="worker", index=hello.index)
            case Hello(role="standby", pid=pid) if not self.port.holds_engine:
                if engine is not None and engine.pid == pid:  # taken, or not held any more, before this
                    self._control.send(Activate(), role="standby")
            case Stage("standby") if child == _STANDBY:
                self._standby.load(hello.pid)
            case Prepared():
                self.port.prepare(child)
            case Serving():
                self.port.serve(child)
                self._stand_in.stop()
            case Stage() if child in self._sides:
                self._enter_side(child, message)
            case Stage() if child == _ENGINE:
                self._enter(message)
            case Heartbeat() if child == _ENGINE:
                self._watch.beat(message)
            case Heartbeat() if child in self._sides:
                self._sides.beat(child, message)
            case EngineInfo(rows, build) if child == _ENGINE:
                self._banner.add_facts(rows)
                self._registry.set_build(build)
            case EngineFailed():
                self._failures[child] = message
            case AskLeave() if not self._is_draining:
                serves = _ENGINE in self._started_once and not self._downtime.fault
                timeout_s = self._config.drain_timeout_s
                if (leave := self._sides.let_leave(child, timeout_s=timeout_s, first_serves=serves)) is not None:
                    self._control.send(leave, role=child[0], index=child[1])

    def _enter(self, stage: Stage) -> None:
        """Record the stage of the engine's start. The first start may be slow: see server/launcher/engine_health.py."""
        if stage.name == "ready" and any(spec.key not in self._started_once for spec in self._engines[1:]):
            self._held_ready = stage
            return
        if stage.name == "ready":
            self._watch.start()
            self._downtime.end()
        elif _ENGINE in self._started_once and stage != self._control.state.stage:
            self._watch.load()
        if stage.name == "ready" or not self._sides.num_decoding or _ENGINE not in self._started_once:
            self._control.set_state(stage=stage, fault=self._downtime.fault)
        self._banner.stage(stage)
        if stage.name == "ready":
            self._tasks.spawn(learn_limits(self._registry, self._engines[0].socket))
            self._standby.want()
            if _ENGINE not in self._started_once:
                self._started_once.add(_ENGINE)
                self._tasks.spawn(
                    self._banner.make(is_draining=lambda: self._is_draining, has_port=lambda: self.port.is_taken)
                )

    def _enter_side(self, child: ChildKey, stage: Stage) -> None:
        """Record the stage of an engine beside the first. If it decodes, the daemon serves by it."""
        self._sides.enter(child, stage)
        if stage.name != "ready":
            return
        self._started_once.add(child)
        held, self._held_ready = self._held_ready, None
        if held is not None:
            self._enter(held)
        elif _ENGINE in self._started_once and self._sides.num_decoding:
            self._control.set_state(stage=stage, fault="")

    def _on_given(self) -> None:
        self._stand_in.stop()
        self._end.give()

    def _on_stall(self, is_stalled: bool) -> None:
        self._control.set_state(fault=self._downtime.stall_fault if is_stalled else self._downtime.fault)
        if is_stalled:
            logger.error("engine stalled after_s=%.0f", self._watch.silence_s)
        else:
            logger.error("engine makes progress again")

    def _end_hung(self, child: ChildKey, silence_s: float) -> None:
        """End an engine that will not go on; _keep starts the next one."""
        reason = f"The engine made no progress for {silence_s:.0f} s (--stall-timeout) and was killed."
        self._failures[child] = EngineFailed(reason, 1)
        kill_child(self._children[child])

    def _on_hangup(self, was_on_terminal: bool) -> None:
        """Handle SIGHUP: read keys and certificate again; if the daemon's terminal was closed, drain as for SIGTERM."""
        if not was_on_terminal or is_on_terminal():
            self._tasks.spawn(reload_access(self._config, self._control, self._keys))
        elif not self._is_draining:
            self._end.drain(signal.SIGHUP)
