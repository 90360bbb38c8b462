"""SideThread: work that pauses where it chooses, while its caller goes on."""

import threading
from collections.abc import Callable


class WorkStopped(BaseException):
    """Raised in paused work that is to end: not by an error, so nothing should catch it."""


class SideThread:
    """Runs `work` in a thread of its own, but only while resume() waits for it: one of both runs at a time."""

    def __init__(self, work: Callable[[], None], *, name: str) -> None:
        self._work = work
        self._resumed, self._returned = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_stopping = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self) -> bool:
        """Let the work go on until it pauses or ends; return True if it has ended. Raises what it raised."""
        if not self._has_ended:
            self._resumed.release()
            self._returned.acquire()
        if self._has_ended:
            self._thread.join()
            if self._error is not None:
                raise self._error
        return self._has_ended

    def pause(self) -> None:
        """Return when the caller resumes the work. Only the work may call it.

        Raises:
            WorkStopped: stop() was called.
        """
        if not self._is_stopping:  # else nobody resumes it
            self._returned.release()
            self._resumed.acquire()
        if self._is_stopping:
            raise WorkStopped

    def stop(self) -> None:
        """End the work where it has paused, if it has not ended. Blocks until it has."""
        self._is_stopping = True
        self._resumed.release()
        self._thread.join()

    def _run(self) -> None:
        self._resumed.acquire()
        try:
            if not self._is_stopping:
                self._work()
        except WorkStopped:
            pass  # kept, its traceback would keep what the work had in hand
        except BaseException as error:  # resume() raises it
            self._error = error
        self._has_ended = True
        self._returned.release()
