"""Port: the listening sockets, which HTTP workers accept on them, and the takeovers from and by other daemons.

Life: made → take (at once, or by a takeover when the daemon is ready: server/launcher/takeover.py) → given to a next
daemon (server/launcher/hand_over.py), or stop. Never torch. Imports server.launcher.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from engine.interface.control import Activate, State
from engine.interface.metrics import MetricsDelta
from server.launcher.control_server import ControlServer
from server.launcher.engine_lease import EngineLease
from server.launcher.engine_set import ChildKey
from server.launcher.hand_over import HandOver
from server.launcher.listener import listeners_by_worker
from server.launcher.run_dir import RunDir
from server.launcher.systemd import Notifier
from server.launcher.takeover import Takeover
from server.launcher.takeover_form import EngineFacts

logger = logging.getLogger(__name__)


class Port:
    """The listening sockets of a daemon. Use inside one event loop.

    takeover: if a running daemon has them. has_started: whether this daemon has been ready. on_given: called once, when
    a next daemon has the port. lease, facts: of the engine, whose memory a next daemon may need; engine_socket: where
    it listens. count: adds to the metrics.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        run_dir: RunDir,
        *,
        num_workers: int,
        takeover: Takeover | None,
        control: ControlServer,
        notifier: Notifier,
        has_started: Callable[[], bool],
        on_given: Callable[[], None],
        lease: EngineLease,
        facts: Callable[[], EngineFacts],
        engine_socket: str,
        count: Callable[[MetricsDelta], None] = lambda delta: None,
    ) -> None:
        self.is_taken = False  # this daemon has the port, or had it
        self._num_workers = num_workers
        self._takeover = takeover
        self._control = control
        self._notifier = notifier
        self._engine_socket = engine_socket
        self._count = count
        self.holds_engine = takeover is not None and takeover.form.is_instead  # until the running daemon has ended its
        self._hand_over = HandOver(
            run_dir,
            listeners,
            control=control,
            notifier=notifier,
            has_started=has_started,
            on_given=on_given,
            lease=lease,
            facts=facts,
            on_failed=lambda: count(MetricsDelta({("takeovers_failed_total", ""): 1.0})),
        )
        self._shares = listeners_by_worker(listeners, num_workers=num_workers) if listeners else []
        self._prepared: set[ChildKey] = set()  # workers that have loaded
        self._serving: set[ChildKey] = set()  # workers that accept connections
        control.set_state(accepts=takeover is None)

    @property
    def is_owned(self) -> bool:
        """False as long as another daemon has the listening sockets too."""
        return (self._takeover is None or self._takeover.is_done) and not self._hand_over.is_shared

    @property
    def is_given(self) -> bool:
        """True once a next daemon has the port: workers serve the connections that are open, and end."""
        return self._hand_over.is_done

    @property
    def needs_stand_in(self) -> bool:
        """True if no worker accepts connections, and nobody else does."""
        return not self._serving and self.is_taken

    def of_worker(self, index: int) -> list[socket.socket]:
        """Return the sockets of a worker."""
        return self._shares[index]

    def close_of_worker(self, index: int) -> None:
        """Let the kernel assign no connections to a worker that has ended for good."""
        if len(self._shares) > 1:
            for listener in self._shares[index]:
                listener.close()

    def prepare(self, worker: ChildKey) -> None:
        """Record that a worker has loaded."""
        self._prepared.add(worker)

    def serve(self, worker: ChildKey) -> None:
        """Record that a worker accepts connections."""
        self._serving.add(worker)

    def end(self, child: ChildKey) -> None:
        """Record that a child has ended."""
        self._prepared.discard(child)
        self._serving.discard(child)

    async def take(self, *, watch: Callable[[], None]) -> None:
        """Have the port: at once, or in a takeover when clients would find this daemon ready.

        watch: starts the reports to the service manager that the running daemon had.
        """
        if self._takeover is not None:
            offer, form = self._takeover.offer, self._takeover.form
            logger.info(
                "takes the port over when it is ready pid=%d version=%s form=%s reason=%r",
                offer.pid,
                offer.version,
                "instead" if form.is_instead else "beside",
                form.reason,
            )
            began_s = None
            if form.is_instead:
                began_s = await self._takeover.release(is_held=self._is_held, activate=self._activate, state=self._tell)
            taken = await self._takeover.complete(
                is_prepared=lambda: self._is_ready(self._prepared),
                accept=lambda: self._control.set_state(accepts=True),
                is_serving=lambda: self._is_ready(self._serving),
                notify_address=self._notifier.address,
            )
            if taken is None:
                logger.warning(
                    "the daemon whose port was to be taken over has ended before, or does not answer pid=%d", offer.pid
                )
            elif taken.is_main:
                had_manager = bool(self._notifier.address)  # then it is the same one, and reports to it go on
                self._notifier.adopt(offer.notify_address, watchdog_s=offer.watchdog_s)
                if not had_manager:
                    watch()
            logger.info("has the port pid=%d", os.getpid())
            if began_s is not None:
                pause_s = time.monotonic() - began_s
                logger.info("open requests of the daemon before go on here pid=%d after_s=%.1f", offer.pid, pause_s)
                self._count(MetricsDelta({}, {("takeover_pause_seconds", ""): pause_s}))
        self._hand_over.start()
        self.is_taken = True

    def stop(self) -> None:
        """Accept no more takeovers."""
        self._hand_over.stop()

    def close(self) -> None:
        """Close the connection to the running daemon, which goes on if it still has the port."""
        if self._takeover is not None:
            self._takeover.close()

    async def wait_guests(self) -> None:
        """Wait until no open request of the daemon that had the port before needs this one."""
        if self._takeover is not None:
            await self._takeover.wait_guests()

    def _is_held(self) -> bool:
        state = self._control.state
        is_prepared = len(self._prepared) == self._num_workers
        return is_prepared and state.stage.name == "standby" and not state.is_draining

    def _activate(self) -> None:
        self.holds_engine = False
        self._control.send(Activate(), role="standby")

    def _tell(self) -> State:
        state = self._control.state  # another daemon's engine, if this one has given its own up as well
        return msgspec.structs.replace(state, engine_socket=state.engine_socket or self._engine_socket)

    def _is_ready(self, workers: set[ChildKey]) -> bool:
        state = self._control.state
        return state.is_serving and not state.is_draining and len(workers) == self._num_workers
