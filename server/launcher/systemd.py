"""Reports the daemon's state to a service manager: sd_notify(3) over the datagram socket in NOTIFY_SOCKET.

Imports engine.interface.control and server.launcher.console. Life: made from the environment → loading and watch, a
task that sends STATUS, and WATCHDOG while the engine makes progress → ready → stopping, or hand_over: then the next
daemon adopts the socket. Without NOTIFY_SOCKET it sends nothing.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping

from engine.interface.control import Stage, State
from server.launcher.console import Console, Summary, stage_text

logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 1.0
_NUM_TRIES, _RETRY_S = 500, 0.02
_PINGS_PER_TIMEOUT = 3  # sd_watchdog_enabled(3) advises two at least


class Notifier:
    """The socket of the service manager, if there is one. Sending never blocks and never raises."""

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        self.address = ""  # as in NOTIFY_SOCKET
        self.watchdog_s: float | None = None
        self._socket: socket.socket | None = None
        self.adopt(address or "", watchdog_s=watchdog_s)
        self._serving = ""  # STATUS once the daemon is ready
        self._status = ""
        self._unsent: list[str] = []
        self._has_failed = self._is_stopping = self._is_handed_over = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """Read and remove the service manager's variables, which are for this process and not for its children."""
        address = environment.pop("NOTIFY_SOCKET", "")
        timeout_us = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        if address and address[0] not in "/@":
            logger.warning("NOTIFY_SOCKET=%s is no unix socket; the service manager gets no notifications", address)
            address = ""
        has_watchdog = timeout_us.isdecimal() and int(timeout_us) > 0 and pid in ("", str(os.getpid()))
        return cls(address or None, watchdog_s=int(timeout_us) / 1e6 if has_watchdog else None)

    def adopt(self, address: str, *, watchdog_s: float | None) -> None:
        """Report to this service manager from now on: it was that of the daemon whose port was taken over."""
        self.close()
        self.address, self.watchdog_s = address, watchdog_s
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    async def hand_over(self, pid: int, *, address: str) -> bool:
        """Name the next daemon to the service manager, as the process to watch, and say no more to it.

        address: of that daemon's own service manager, "" without one. Returns whether this one knows it: False if that
        is another one, or if it cannot be told. Waits for a busy manager: if it heard of the end of this process first,
        it would end the next one.
        """
        if self._socket is None or address not in ("", self.address):
            self.stopping()
            return False
        self._is_handed_over = True
        self._unsent = []
        can_hear = self._send(f"MAINPID={pid}")
        for _ in range(_NUM_TRIES):
            if not can_hear or not self._unsent:
                break
            await asyncio.sleep(_RETRY_S)
            can_hear = self._send()
        if not can_hear or self._unsent:
            logger.error("the service manager does not hear which process has the port pid=%d", pid)
        return can_hear

    async def watch(self, *, state: Callable[[], State]) -> None:
        """Send the stage whenever it changed, and WATCHDOG=1 in time as long as /health is 200. Runs for ever."""
        if self._socket is None:
            return
        while True:
            self.observe(state())
            interval_s = min(_STATUS_INTERVAL_S, (self.watchdog_s or 60.0) / _PINGS_PER_TIMEOUT)  # adopt() changes it
            await asyncio.sleep(interval_s)

    def observe(self, state: State) -> None:
        """Send one observation of the daemon."""
        if not self._is_handed_over:
            self._tell(self._describe(state))
            if self.watchdog_s is not None and state.is_alive:
                self._send("WATCHDOG=1")
        self._send()

    def loading(self, stage: Stage) -> None:
        """Report a stage of the first start."""
        if stage.name != "ready":
            self._tell(stage_text(stage))

    def ready(self, summary: Summary) -> None:
        """Report that the daemon answers requests."""
        self._serving = self._status = f"Serving {summary.model_name} on {summary.url}"
        self._send("READY=1", f"STATUS={self._status}")

    def stopping(self) -> None:
        """Report that the daemon ends, once."""
        if not self._is_stopping and not self._is_handed_over:
            self._is_stopping = True
            self._status = "Stopping: running requests may finish"
            self._send("STOPPING=1", f"STATUS={self._status}")

    def close(self) -> None:
        """Close the socket; nothing is sent any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _describe(self, state: State) -> str:
        if self._is_stopping:
            return self._status
        if state.fault == "stalled":
            return "The engine makes no progress"
        if state.stage.name == "ready" and state.fault == "dead":
            return "The HTTP workers do not come back"
        if state.stage.name == "ready":
            return self._serving or "Starting HTTP workers"
        text = stage_text(state.stage)
        if state.fault:
            restarting = "Restarting the engine" if state.fault == "restarting" else "The engine does not come back"
            return restarting + (f": {text}" if state.stage.name != "restarting" else "")
        return text

    def _tell(self, status: str) -> None:
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")

    def _send(self, *lines: str) -> bool:
        """Send lines, after those that a busy manager did not accept. Returns False if it cannot be reached."""
        waiting = [*self._unsent, *lines]
        if self._socket is None or not waiting:
            return True
        self._unsent = []
        message = "\n".join(line.replace("\n", " ") for line in waiting)
        try:
            address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
            self._socket.sendto(message.encode("utf-8", "replace"), address)
        except BlockingIOError:
            status = [line for line in waiting if line.startswith("STATUS=")][-1:]
            kept = [line for line in waiting if line in ("READY=1", "STOPPING=1") or line.startswith("MAINPID=")]
            self._unsent = kept + status
        except OSError as error:
            if not self._has_failed:
                logger.warning("notification of the service manager failed reason=%r", error.strerror or str(error))
            self._has_failed = True
            return False
        return True


class NotifyingConsole:
    """A Console that also notifies the service manager."""

    def __init__(self, console: Console, notifier: Notifier) -> None:
        self._console = console
        self._notifier = notifier

    def stage(self, stage: Stage) -> None:
        self._notifier.loading(stage)
        self._console.stage(stage)

    def ready(self, summary: Summary) -> None:
        self._notifier.ready(summary)
        self._console.ready(summary)

    def stop(self) -> None:
        self._notifier.stopping()
        self._console.stop()
