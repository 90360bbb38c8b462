"""Port: the listening sockets, which HTTP workers accept on them, and the takeovers from and by other daemons.

Life: made → take (at once, or by a takeover when the daemon is ready: server/launcher/takeover.py) → given to a next
daemon (server/launcher/hand_over.py), or stop. Never torch. Imports server.launcher.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence

from server.launcher.control_server import ControlServer
from server.launcher.engine_set import ChildKey
from server.launcher.hand_over import HandOver
from server.launcher.listener import listeners_by_worker
from server.launcher.run_dir import RunDir
from server.launcher.systemd import Notifier
from server.launcher.takeover import Takeover

logger = logging.getLogger(__name__)


class Port:
    """The listening sockets of a daemon. Use inside one event loop.

    takeover: if a running daemon has them. has_started: whether this daemon has been ready. on_given: called once, when
    a next daemon has the port.
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
    ) -> None:
        self.is_taken = False  # this daemon has the port, or had it
        self._num_workers = num_workers
        self._takeover = takeover
        self._control = control
        self._notifier = notifier
        self._hand_over = HandOver(
            run_dir, listeners, control=control, notifier=notifier, has_started=has_started, on_given=on_given
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
            offer = self._takeover.offer
            logger.info("takes the port over when it is ready pid=%d version=%s", offer.pid, offer.version)
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
        self._hand_over.start()
        self.is_taken = True

    def stop(self) -> None:
        """Accept no more takeovers. The running daemon goes on, if it still has the port."""
        self._hand_over.stop()
        if self._takeover is not None:
            self._takeover.close()

    def _is_ready(self, workers: set[ChildKey]) -> bool:
        state = self._control.state
        return state.is_serving and not state.is_draining and len(workers) == self._num_workers
