"""The engine process: loads the model, runs a self-test and serves until the launcher exits. Imports no torch itself.

    python -m engine.process CONFIG.json        (an EngineProcessConfig; written by the launcher)
It imports little until its head start has begun (engine/startup/head_start.py), and the rest beside that.
Only the launcher ends this process. It ignores SIGINT and SIGTERM, which a terminal or an init system sends to the
whole process group. It exits when the control connection closes and, on Linux, is killed when the launcher dies.
One of several engines asks the launcher after SIGTERM whether it may leave, each second until it may: AskLeave → Leave
→ its requests end, other engines take what it lends them, and it exits; the launcher starts the next.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.grammar.compiler import CompilerLoader
from engine.interface.child_process import die_with_parent
from engine.interface.config import EngineConfig, EngineProcessConfig
from engine.interface.control import (
    Activate,
    AskLeave,
    EngineFailed,
    EngineInfo,
    Flush,
    Flushed,
    FromLauncher,
    Heartbeat,
    Hello,
    Leave,
    Stage,
)
from engine.interface.errors import StartupError, first_line, phrase_as_sentence
from engine.interface.logs import configure_logging
from engine.interface.metrics import Metrics
from engine.interface.transport import Connection, SocketTransport, encode_frame
from engine.startup.head_start import begin_head_start

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.kv_publisher import KvPublisher
    from engine.offline import OfflineEngine
    from engine.tensor_parallel.ranks import Ranks

logger = logging.getLogger(__name__)

_DELTA_INTERVAL_S = 0.5
_HEARTBEAT_INTERVAL_S = 1.0
_ASK_INTERVAL_S = 1.0  # until the launcher lets it leave
_MIN_QUEUED_PROMPTS = 64  # prompts of full length


class EngineProcess:
    """Connects an Engine to the launcher. Life: connect → load → serve → exit code."""

    def __init__(self, config: EngineProcessConfig) -> None:
        self._config = config
        self._metrics = Metrics()
        self._stages: list[tuple[str, float]] = []  # of the load: name, when it was entered
        self._engine: Engine | None = None
        self._ranks: Ranks | None = None
        self._measure_memory: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._close_disk: Callable[[], None] = lambda: None
        self._publisher: KvPublisher | None = None
        self._num_counted = [0, 0]  # batches of the publisher in the metrics: published, lost
        self._close_peers: Callable[[], None] = lambda: None
        self._is_stopping = False
        self._leave_at_s: float | None = None  # at the latest
        self._was_terminated = False  # SIGTERM came
        self._next_delta_s = self._next_heartbeat_s = self._next_ask_s = 0.0
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(config.control_socket)
        self._control = Connection(sock, FromLauncher)
        self._control.send(Hello("standby" if config.is_standby else "engine", config.index, os.getpid()))
        self._enter(Stage("imports"))

    def run(self) -> int:
        """Load and serve; return the process's exit code."""
        try:
            engine = self._engine = self._load()
        except StartupError as error:
            return self._fail(error.message, error.exit_code)
        except BaseException as error:  # a panic of Rust is no Exception
            self._await_blame()
            if self._config.debug:
                traceback.print_exc()
            return self._fail(f"{type(error).__name__} while loading: {first_line(error)} (--debug shows where)", 3)
        gc.collect()
        gc.freeze()
        if self._config.engine.peer is not None:
            signal.signal(signal.SIGTERM, self._on_terminated)
        try:
            while not self._is_stopping:
                engine.run_once()
                self._tick(time.monotonic())
        except BaseException as error:  # a bug, or a device fault, after which no device memory can be trusted
            self._await_blame()
            logger.exception("engine fault")
            self._fail(f"{type(error).__name__} while serving: {first_line(error)}", 1)
            os._exit(1)  # no clean-up: destructors could wait for a broken device without end
        self._close_disk()
        if self._publisher is not None:
            self._publisher.close()
        self._close_peers()
        if self._ranks is not None:
            self._ranks.close()
        return 0

    def _load(self) -> Engine:
        if self._config.engine.kv_events is not None:
            from engine.kv_publisher import KvPublisher

            self._publisher = KvPublisher(self._config.engine.kv_events)  # what it refuses must not cost a load
        compiler_loader = CompilerLoader(Path(self._config.engine.model))
        load_vocabulary = compiler_loader.prepare()
        prepared_s = time.monotonic()
        head_start = begin_head_start(self._config.engine, may_use_device=not self._config.is_standby)
        gc.disable()  # an import makes hundreds of thousands of objects, and no garbage
        load_vocabulary()  # holds the interpreter lock, which the threads do without
        loaded_s = time.monotonic()
        from engine.offline import OfflineEngine  # imports torch, after the launcher was notified
        from engine.tensor_parallel.ranks import RankHost

        gc.freeze()
        gc.enable()
        logger.info("imports done vocabulary_s=%.2f head_start_s=%r", loaded_s - prepared_s, head_start.describe())
        takes_over = self._config.is_standby and not self._config.is_held
        loads_beside = takes_over and OfflineEngine.fits_beside(self._config.engine)
        has_rehearsed = False
        if self._config.is_standby and not loads_beside:
            head_start.join()
            has_rehearsed = takes_over and self._rehearse(OfflineEngine.rehearse)
            self._stand_by()
        host = RankHost(
            self._on_rank_lost,
            folder=Path(self._config.engine_socket).parent,  # the next daemon removes it after a crash
            log_level=self._config.log_level,
            log_format=self._config.log_format,
            debug=self._config.debug,
        )
        offline = OfflineEngine.load(
            self._config.engine,
            self._enter,
            host=host,
            leaves_rest=True,
            takes_over=takes_over,
            compiler_loader=compiler_loader,
        )
        loaded = offline.loaded
        self._ranks = loaded.ranks
        self._enter(Stage("self_test"))
        offline.self_test(is_short=has_rehearsed)
        if loads_beside:
            self._stand_by()
        engine = self._connect(offline)
        self._measure_memory = loaded.measure_gpu_memory
        self._metrics.gauge("kv_cache_bytes", loaded.plan.num_bytes)
        self._control.send(EngineInfo(loaded.facts, loaded.build))
        self._enter(Stage("ready"))
        logger.info("load %s", self._describe_stages())
        loaded.pin_host_memory()
        return engine

    def _connect(self, offline: OfflineEngine) -> Engine:
        """Return the loop over a loaded engine, with its socket, disk and peers."""
        loaded = offline.loaded
        sizes, limits = loaded.scheduler_config, self._config.engine
        # by default a burst that could run at once is never refused
        most_tokens = limits.max_queued_tokens or max(_MIN_QUEUED_PROMPTS, sizes.max_num_seqs) * sizes.max_model_len
        ready = loaded.greeting(max_queued_requests=limits.max_queued_requests, max_queued_tokens=most_tokens)
        transport = SocketTransport(
            self._config.engine_socket, ready, control=self._control, on_control=self._on_control
        )
        engine = loaded.engine(
            transport,
            self._metrics,
            max_queued_requests=limits.max_queued_requests,
            max_queued_tokens=most_tokens,
            max_queue_wait_s=limits.max_queue_wait_s,
            captures_graphs=True,
        )
        if loaded.disk is not None:
            loaded.disk.attach(engine.scheduler)
            self._close_disk = loaded.disk.close
        if loaded.peers is not None:
            loaded.peers.attach(engine.scheduler, on_socket=transport.watch, off_socket=transport.unwatch)
            self._close_peers = loaded.peers.close
        self._report_kv_events(engine)
        return engine

    def _enter(self, stage: Stage) -> None:
        """Tell the launcher of the load's progress."""
        if not self._stages or self._stages[-1][0] != stage.name:
            self._stages.append((stage.name, time.monotonic()))
        self._control.send(stage)

    def _describe_stages(self) -> str:
        """Return the seconds of each stage of the load, or of what a takeover left of it: "weights_s=1.02 …"."""
        ends = [entered_s for _, entered_s in self._stages[1:]]
        seconds: dict[str, float] = {}
        for (name, entered_s), end_s in zip(self._stages, ends, strict=False):
            seconds[name] = seconds.get(name, 0.0) + end_s - entered_s
        return " ".join(f"{name}_s={each:.2f}" for name, each in seconds.items())

    def _rehearse(self, rehearse: Callable[[EngineConfig], bool]) -> bool:
        """Rehearse a takeover beside the engine, unless it is due already; return True if it was done."""
        if select.select([self._control.sock], [], [], 0)[0]:
            return False
        try:
            return rehearse(self._config.engine)
        except StartupError as error:
            logger.info("standby rehearses nothing: %s", error.message)
        except Exception as error:  # a device that refuses a second process, for example
            logger.warning("standby rehearses nothing: %s: %s", type(error).__name__, first_line(error))
        return False

    def _report_kv_events(self, engine: Engine) -> None:
        if self._publisher is None:
            return
        config = self._config.engine
        is_map = config.kv_events is not None and config.kv_events.event_format == "map"
        names = [source.name for source in config.loras]
        from engine.kv_publisher import EventEncoder

        self._publisher.start(EventEncoder(engine.scheduler.config.cache_groups, names, is_map=is_map))
        engine.report_kv_events(self._publisher.publish)

    def _stand_by(self) -> None:
        """Wait until the launcher needs an engine, then be it. Ends the process if the launcher ends."""
        logger.info("standby waits")
        self._control.send(Stage("standby"))
        messages: list[Any] | None = []
        while messages is not None and Activate() not in messages:
            select.select([self._control.sock], [], [])
            messages = self._control.receive()
        if messages is None:
            os._exit(0)
        self._control.send(Hello("engine", 0, os.getpid()))
        logger.info("standby takes over")
        self._stages.clear()
        self._enter(Stage("config"))

    def _fail(self, message: str, exit_code: int) -> int:
        self._control.sock.setblocking(True)
        self._control.send(EngineFailed(phrase_as_sentence(message), exit_code))
        return exit_code

    def _await_blame(self) -> None:
        """Wait for the rank watcher: if a rank's exit caused the failure, _on_rank_lost reports it and exits."""
        if self._ranks is not None:
            self._ranks.await_blame()

    def _on_rank_lost(self, message: str, exit_code: int) -> None:
        """Report a rank's failure and exit, since the main thread may wait for that rank without end.

        Called in another thread: it uses its own connection, since the main thread may have sent half of a message.
        """
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self._config.control_socket)
            for told in (
                Hello("engine", self._config.index, os.getpid()),
                EngineFailed(phrase_as_sentence(message), exit_code),
            ):
                sock.sendall(encode_frame(told))
        os._exit(exit_code)

    def _on_control(self, messages: list[Any] | None) -> None:
        """Handle the launcher's messages; None: the connection is closed."""
        if messages is None:
            self._is_stopping = True
            return
        for message in messages:
            match message:
                case Flush(number):
                    self._send_metrics()
                    self._control.send(Flushed(number))
                case Leave(timeout_s):
                    self._leave_at_s = time.monotonic() + timeout_s
                    if self._engine is not None:
                        self._engine.is_leaving = timeout_s > 0
                    logger.info("leaving timeout_s=%g", timeout_s)

    def _on_terminated(self, number: int, frame: object) -> None:
        self._was_terminated = True

    def _has_left(self, engine: Engine, now: float) -> bool:
        """Return whether this engine was let go and is done, or its time is over."""
        if self._leave_at_s is None:
            return False
        return now >= self._leave_at_s or (engine.is_idle and not engine.scheduler.kv.tiers.is_lending)

    def _send_metrics(self) -> None:
        if self._engine is not None:
            self._engine.record_state()
        if self._publisher is not None:
            counts = [self._publisher.num_published, self._publisher.num_lost]
            for result, count, counted in zip(("published", "lost"), counts, self._num_counted, strict=True):
                self._metrics.count("kv_event_batches_total", count - counted, result)
            self._num_counted = counts
        self._control.send(self._metrics.drain())

    def _tick(self, now: float) -> None:
        if now >= self._next_heartbeat_s and self._engine is not None:
            scheduler = self._engine.scheduler
            self._control.send(Heartbeat(len(scheduler.running), len(scheduler.waiting), scheduler.committed_step_id))
            self._next_heartbeat_s = now + _HEARTBEAT_INTERVAL_S
            used, total = self._measure_memory()
            self._metrics.gauge("gpu_memory_used_bytes", used)
            self._metrics.gauge("gpu_memory_total_bytes", total)
        if now >= self._next_delta_s:
            self._send_metrics()
            self._next_delta_s = now + _DELTA_INTERVAL_S
        if self._was_terminated and self._leave_at_s is None and now >= self._next_ask_s:
            self._next_ask_s = now + _ASK_INTERVAL_S
            self._control.send(AskLeave())
        if self._engine is not None and self._has_left(self._engine, now):
            logger.info("left is_done=%s", self._engine.is_idle)
            self._send_metrics()  # what was counted since the last
            self._is_stopping = True


def main() -> int:
    """Entry point of `python -m engine.process CONFIG.json`."""
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineProcessConfig)
    configure_logging(
        level=config.log_level,
        log_format=config.log_format,
        process="engine" if config.engine.peer is None else config.engine.peer.name,
    )
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError):  # the launcher exited while this process started
        return EngineProcess(config).run()
    return 1


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # no clean-up: destructors would wait for ranks that have exited
