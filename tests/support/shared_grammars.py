"""SharedGrammarChecker: for apps of tests, whose grammars one process compiles for all that have equal tokenizers.

To start a process takes 0.2 s of processor time, and hundreds of tests make an app that asks one. CheckProcesses owns
the processes. Each checker has verdicts of its own, and one that ends its process leaves the next call another.
"""

import hashlib
import itertools
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.interface.errors import ShuttingDown
from server.structured_output.compile_check import GrammarChecker, GrammarMeter, _CheckProcess

_MOST = 4  # processes at once: tests of one tokenizer follow one another


class CheckProcesses:
    """The processes by tokenizer, the least recently used first."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)  # of checks: a process tells those of several checkers apart by them
        self._processes: OrderedDict[bytes, _CheckProcess] = OrderedDict()
        self._lock = threading.Lock()
        self._starter = ThreadPoolExecutor(1)  # a process ends with the thread that started it, and an app's soon ends

    def of(self, folder: Path) -> _CheckProcess:
        """Return the process for a folder's tokenizer; start it if there is none, or the last one has ended."""
        file = folder / "tokenizer.json"
        key = hashlib.sha256(file.read_bytes()).digest() if file.is_file() else str(folder).encode()
        with self._lock:
            process = self._processes.pop(key, None)
            if process is None or process.popen.poll() is not None:
                process = self._starter.submit(_CheckProcess, folder).result()
            self._processes[key] = process
            while len(self._processes) > _MOST:
                self._processes.popitem(last=False)[1].kill()
            return process

    def close(self) -> None:
        """End all."""
        with self._lock:
            while self._processes:
                self._processes.popitem()[1].kill()
        self._starter.shutdown()


class SharedGrammarChecker(GrammarChecker):
    """A GrammarChecker whose process is one of CheckProcesses."""

    def __init__(self, processes: CheckProcesses, folder: Path, *, meter: GrammarMeter | None = None) -> None:
        super().__init__(folder, meter=meter)
        self._processes = processes
        self._ids = processes.ids

    def _started(self) -> _CheckProcess:
        with self._starting:
            if self._is_closed:
                raise ShuttingDown("It is closed.")
            if self._process is None:
                self._process = self._processes.of(self._folder)
            return self._process
