"""GPUs of this host and their memory in use over time, as nvidia-smi reports them. Never imports torch."""

import shutil
import subprocess
import threading
from types import TracebackType

_INTERVAL_S = 2.0
_TIMEOUT_S = 10.0


class GpuMemoryWatch:
    """Samples the memory in use on all GPUs of this host, by any process. Use as a context manager."""

    def __init__(self) -> None:
        self.peak_gib: float | None = None  # after the end; None: no nvidia-smi, or no answer from it
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "GpuMemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        command = shutil.which("nvidia-smi")
        if command is None:
            return
        query = [command, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while True:
            is_last = self._is_over.wait(_INTERVAL_S)
            try:
                reply = subprocess.run(
                    query, capture_output=True, text=True, timeout=_TIMEOUT_S, start_new_session=True
                )
            except (OSError, subprocess.TimeoutExpired):
                return
            used = used_gib(reply.stdout)
            if used is not None:
                self.peak_gib = max(used, self.peak_gib or 0.0)
            if is_last:
                return


def gpu_names() -> list[str]:
    """Return the names of this host's GPUs; none if nvidia-smi is missing or does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        reply = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return reply.stdout.splitlines() if reply.returncode == 0 else []


def used_gib(reply: str) -> float | None:
    """Return the sum of nvidia-smi's lines, one of MiB per GPU; None if there are none."""
    numbers = [int(line) for line in reply.split() if line.isdigit()]
    return sum(numbers) / 1024 if numbers else None
