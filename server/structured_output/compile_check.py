"""GrammarChecker: checks that a request's grammar compiles before the request goes to the engine. Never torch.

A separate process (engine/grammar_check_process.py) compiles one grammar at a time, and is killed at a deadline: a
schema of a few bytes can take a minute to compile, another can overflow the stack. The process starts with the first
grammar and ends with the worker.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from engine.interface.child_process import PROJECT_ROOT
from engine.interface.errors import EngineError, GrammarError, Overloaded, ShuttingDown, error_from_code, sentence
from engine.interface.protocol import GrammarSpec, GrammarVerdict
from server.structured_output.grammar_spec import LARK_FIELD

COMPILE_DEADLINE_S = 5.0
_START_DEADLINE_S = 60.0  # a large tokenizer loads in a second
_MAX_VERDICTS = 1024
_MAX_QUEUED = 64  # a burst of quick ones is none too many
_TURN_DEADLINE_S = 20.0  # for a queue of slow ones
_TIMEOUT_KEPT_S = 60.0  # a grammar may have been slow because the machine was
_GENERATED = re.compile(r"^(at )?\d+\(\d+\): |^failed to compile JSON schema: ")  # places in text that we wrote


class _Kept(NamedTuple):
    verdict: GrammarVerdict
    until_s: float  # time.monotonic()


class _Trial:
    """A grammar that is compiling or queued, and the number of requests that wait for its verdict."""

    def __init__(self, task: asyncio.Task[GrammarVerdict]) -> None:
        self.task = task
        self.num_waiting = 0
        self.has_begun = False


class _TimedOut(Exception):
    """The process did not reply in time."""


class _Crashed(Exception):
    """The process ended without a reply."""


class GrammarChecker:
    """Owns the process, and the verdicts on recent grammars. As an async context manager it ends the process."""

    def __init__(self, folder: Path, *, deadline_s: float = COMPILE_DEADLINE_S) -> None:
        self._folder = folder
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._verdicts: OrderedDict[bytes, _Kept] = OrderedDict()  # by digest; least recent first
        self._trials: dict[bytes, _Trial] = {}
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._starting = threading.Lock()  # held to start a process, and to close

    async def __aenter__(self) -> None:
        """Start no process yet: the first grammar starts it."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._starting:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()  # its readers get EOF, and then find this closed
        await asyncio.gather(*(trial.task for trial in self._trials.values()), return_exceptions=True)
        self.kill()

    async def check(self, spec: GrammarSpec, *, param: str | None = None) -> None:
        """Return if a grammar compiles. Raises GrammarError, UnsupportedFeature or Overloaded, naming the field."""
        key = hashlib.sha256(msgspec.json.encode(spec)).digest()
        verdict = self._kept(key)
        if verdict is None:
            verdict = await self._ask_with_others(key, spec)
        if verdict.code is not None:
            raise error_from_code(verdict.code, _message(verdict, param), param)

    def kill(self) -> None:
        """Kill the process."""
        process, self._process, self._unread = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _kept(self, key: bytes) -> GrammarVerdict | None:
        kept = self._verdicts.get(key)
        if kept is None or kept.until_s < time.monotonic():
            return None
        self._verdicts.move_to_end(key)
        return kept.verdict

    async def _ask_with_others(self, key: bytes, spec: GrammarSpec) -> GrammarVerdict:
        """Wait for the verdict together with other requests. If all leave before its turn, it is not compiled."""
        trial = self._trials.get(key)
        if trial is None:
            if len(self._trials) >= _MAX_QUEUED:
                raise Overloaded(f"Too many grammars wait to be compiled; the limit is {_MAX_QUEUED}.")
            # a task of its own: a client that leaves must not end what others wait for, or break into the dialogue
            trial = self._trials[key] = _Trial(asyncio.create_task(self._try(key, spec)))
            trial.task.add_done_callback(lambda task: self._forget(key, task))
        trial.num_waiting += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting and not trial.has_begun:
                trial.task.cancel()
                self._forget(key, trial.task)

    def _forget(self, key: bytes, task: asyncio.Task[GrammarVerdict]) -> None:
        trial = self._trials.get(key)
        if trial is not None and trial.task is task:  # another may have taken its place
            del self._trials[key]

    async def _try(self, key: bytes, spec: GrammarSpec) -> GrammarVerdict:
        trial = self._trials[key]
        try:
            async with asyncio.timeout(_TURN_DEADLINE_S):
                await self._turn.acquire()
        except TimeoutError:
            message = f"Other grammars take so long to compile that this one had no turn within {_TURN_DEADLINE_S:g} s."
            raise Overloaded(message) from None
        try:
            trial.has_begun = True
            verdict, kept_s = await asyncio.to_thread(self._ask, spec)
        finally:
            self._turn.release()
        self._verdicts[key] = _Kept(verdict, time.monotonic() + kept_s)
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _ask(self, spec: GrammarSpec) -> tuple[GrammarVerdict, float]:
        """Return the verdict on a grammar, and for how many seconds it holds. Blocks up to the deadlines."""
        for _ in range(2):  # again after a crash, of which something else may be the cause
            try:
                if self._process is None or self._process.poll() is not None:
                    loaded = self._start()
                    if loaded.code is not None:
                        return loaded, float("inf")
                return self._exchange(spec), float("inf")
            except _TimedOut:
                self.kill()
                message = f"takes longer to compile than {self._deadline_s:g} s, the limit."
                return GrammarVerdict(GrammarError.code, message), _TIMEOUT_KEPT_S
            except _Crashed:
                self.kill()
        message = "is nested too deeply, or needs too much memory, to be compiled."
        return GrammarVerdict(GrammarError.code, message), _TIMEOUT_KEPT_S

    def _start(self) -> GrammarVerdict:
        """Start the process; return its verdict on the tokenizer."""
        with contextlib.suppress(_TimedOut):
            for _ in range(2):  # as in _ask
                with contextlib.suppress(_Crashed):
                    return self._read(self._spawn(), _START_DEADLINE_S)
        self.kill()
        if self._is_closed:
            raise _shutting_down()
        raise EngineError("The process that compiles grammars does not start.")

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.kill()
        with self._starting:
            if self._is_closed:
                raise _shutting_down()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.grammar_check_process", str(self._folder)],
                cwd=PROJECT_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a crash prints parts of the grammar, which is a client's
            )
            return self._process

    def _exchange(self, spec: GrammarSpec) -> GrammarVerdict:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.flush()
        except OSError:
            raise _Crashed from None
        verdict = self._read(process, self._deadline_s)
        if verdict.code == GrammarError.code:
            verdict.message = f"does not compile: {verdict.message}"
        return verdict

    def _read(self, process: subprocess.Popen[bytes], timeout_s: float) -> GrammarVerdict:
        """Return the next verdict. Raises _TimedOut, _Crashed."""
        assert process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise _TimedOut
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    raise _Crashed
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return msgspec.json.decode(line, type=GrammarVerdict)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down and compiles no more grammars.")


def _message(verdict: GrammarVerdict, param: str | None) -> str:
    """Return an error message that names the field, without positions in a text that the client did not write."""
    if verdict.code != GrammarError.code:
        return verdict.message
    head, colon, reason = verdict.message.partition("does not compile: ")
    while colon and param != LARK_FIELD and (shorter := _GENERATED.sub("", reason, count=1)) != reason:
        reason = shorter
    return f"{param or 'The grammar'} {head}{colon}{sentence(reason) if reason else ''}"
