"""GrammarChecker: checks that a request's grammar compiles before the request goes to the engine. Never torch.

A separate process (engine/grammar_check_process.py) compiles each grammar in a fork of its own, which is killed at a
limit of run time: a schema of a few bytes can take a minute to compile, another can overflow the stack. Costly grammars
take turns with the others there. The process starts with the first grammar and ends with the worker.
"""

import asyncio
import contextlib
import hashlib
import itertools
import re
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import msgspec

from engine.interface.child_process import PROJECT_ROOT
from engine.interface.errors import EngineError, GrammarError, Overloaded, ShuttingDown, error_from_code, sentence
from engine.interface.protocol import GrammarCheck, GrammarSpec, GrammarVerdict
from engine.interface.tenant import Tenant
from server.structured_output.grammar_spec import LARK_FIELD

COMPILE_DEADLINE_S = 5.0  # of run time
_START_DEADLINE_S = 60.0  # a large tokenizer loads in a second
_MAX_VERDICTS = 1024
_MAX_QUEUED = 64  # a burst of quick ones is none too many
_MAX_OF_CLIENT = 16  # of one API key
_TURN_DEADLINE_S = 20.0  # for all of a check, beside others
_COSTLY_S = 0.25  # of processor time
_TIMEOUT_KEPT_S = 60.0  # a grammar may have been slow because the machine was
_NO_TENANT = Tenant()
_GENERATED = re.compile(r"^(at )?\d+\(\d+\): |^failed to compile JSON schema: ")  # places in text that we wrote


_WORDS = {  # for those that name settings of llguidance's, which no client has
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf.": (
        "oneOf is enforced where its alternatives exclude each other by their types, as different constant strings, or "
        "by such constants of a property that each requires; anyOf allows what any of them allows"
    )
}


class GrammarMeter(Protocol):
    """Limits the processor time that a tenant's grammars may take: EngineClient."""

    def check_grammar(self, tenant: Tenant) -> None:
        """Raise RateLimited while a tenant has none left."""
        ...

    def spend_grammar_s(self, tenant: Tenant, seconds: float) -> None:
        """Charge a tenant."""
        ...


class _Kept(NamedTuple):
    verdict: GrammarVerdict
    until_s: float  # time.monotonic()


class _Trial:
    """A grammar that is being compiled, the client that began it, and the number of requests that wait for it."""

    def __init__(self, task: asyncio.Task[GrammarVerdict], client: str) -> None:
        self.task = task
        self.client = client
        self.num_waiting = 0


class _Ended(Exception):
    """The process has ended."""


class _CheckProcess:
    """The process, its pipes, and a thread that gives each verdict to whom it is for."""

    def __init__(self, folder: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "engine.grammar_check_process", str(folder)],
            cwd=PROJECT_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash prints parts of the grammar, which is a client's
        )
        self.pid = self.popen.pid
        self.loaded: Future[GrammarVerdict] = Future()  # on the tokenizer
        self.heard_s = time.monotonic()  # when it began, or gave its last verdict
        self._waiting = {0: self.loaded}
        self._lock = threading.Lock()
        self._is_ended = False
        self._thread = threading.Thread(target=self._read, name="grammar-verdicts", daemon=True)
        self._thread.start()

    def send(self, check: GrammarCheck, verdict: Future[GrammarVerdict] | None = None) -> None:
        """Send a check, and set `verdict` when its verdict comes. Blocks. Raises _Ended, here or in `verdict`."""
        assert self.popen.stdin is not None
        with self._lock:
            if self._is_ended:
                raise _Ended
            if verdict is not None:
                self._waiting[check.id] = verdict
            else:
                self._waiting.pop(check.id, None)
            try:
                self.popen.stdin.write(msgspec.json.encode(check) + b"\n")
                self.popen.stdin.flush()
            except (OSError, ValueError):  # it is dead, or its pipe is closed
                raise _Ended from None

    def kill(self) -> None:
        """End it. Blocks until it has ended."""
        self.popen.kill()
        self.popen.wait()
        self._thread.join()
        with contextlib.suppress(OSError):
            for pipe in (self.popen.stdin, self.popen.stdout):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            verdict = msgspec.json.decode(line, type=GrammarVerdict)
            self.heard_s = time.monotonic()
            with self._lock:
                future = self._waiting.pop(verdict.id, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(verdict)
        with self._lock:
            self._is_ended = True
            left = list(self._waiting.values())
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(_Ended())


class GrammarChecker:
    """Owns the process, and the verdicts on recent grammars. As an async context manager it ends the process."""

    def __init__(
        self, folder: Path, *, deadline_s: float = COMPILE_DEADLINE_S, meter: GrammarMeter | None = None
    ) -> None:
        self._folder = folder
        self._meter = meter
        self._deadline_s = deadline_s
        self._process: _CheckProcess | None = None
        self._verdicts: OrderedDict[bytes, _Kept] = OrderedDict()  # by digest; least recent first
        self._trials: dict[bytes, _Trial] = {}
        self._ids = itertools.count(1)
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
                self._process.popen.kill()  # who waits for it gets _Ended, and then finds this closed
        await asyncio.gather(*(trial.task for trial in self._trials.values()), return_exceptions=True)
        self.kill()

    async def check(
        self, spec: GrammarSpec, *, param: str | None = None, client: str = "", tenant: Tenant = _NO_TENANT
    ) -> GrammarSpec:
        """Return a grammar that compiles, with its cost. `client`, `tenant`: its key's, if keys are asked for.

        Raises GrammarError, UnsupportedFeature or Overloaded, naming the field.
        """
        key = hashlib.sha256(msgspec.json.encode(spec)).digest()
        verdict = self._kept(key)
        if verdict is None:
            if self._meter is not None:
                self._meter.check_grammar(tenant)
            verdict = await self._ask_with_others(key, spec, client, tenant)
        if verdict.code is not None:
            raise error_from_code(verdict.code, _message(verdict, param), param)
        return msgspec.structs.replace(spec, is_costly=True) if verdict.cpu_s > _COSTLY_S else spec

    def kill(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _kept(self, key: bytes) -> GrammarVerdict | None:
        kept = self._verdicts.get(key)
        if kept is None or kept.until_s < time.monotonic():
            return None
        self._verdicts.move_to_end(key)
        return kept.verdict

    async def _ask_with_others(self, key: bytes, spec: GrammarSpec, client: str, tenant: Tenant) -> GrammarVerdict:
        """Wait for the verdict together with other requests. If all leave, the check is given up."""
        trial = self._trials.get(key)
        if trial is None:
            if len(self._trials) >= _MAX_QUEUED:
                raise Overloaded(f"Too many grammars wait to be compiled; the limit is {_MAX_QUEUED}.")
            if client and sum(trial.client == client for trial in self._trials.values()) >= _MAX_OF_CLIENT:
                raise Overloaded(
                    f"Too many grammars of this API key are being compiled; the limit is {_MAX_OF_CLIENT}."
                )
            # a task of its own: a client that leaves must not end what others wait for
            trial = self._trials[key] = _Trial(asyncio.create_task(self._try(key, spec, tenant)), client)
            trial.task.add_done_callback(lambda task: self._forget(key, task))
        trial.num_waiting += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting:
                trial.task.cancel()
                self._forget(key, trial.task)

    def _forget(self, key: bytes, task: asyncio.Task[GrammarVerdict]) -> None:
        trial = self._trials.get(key)
        if trial is not None and trial.task is task:  # another may have taken its place
            del self._trials[key]

    async def _try(self, key: bytes, spec: GrammarSpec, tenant: Tenant) -> GrammarVerdict:
        began_s, spent_s = time.monotonic(), None
        try:
            async with asyncio.timeout(_TURN_DEADLINE_S):
                verdict, kept_s = await self._ask(spec)
            spent_s = verdict.cpu_s or None
        except TimeoutError:
            process = self._process
            if process is not None and time.monotonic() - process.heard_s > _TURN_DEADLINE_S:  # it hangs
                await asyncio.to_thread(self._drop, process)
            message = f"Other grammars take so long to compile that this one had no turn within {_TURN_DEADLINE_S:g} s."
            raise Overloaded(message) from None
        finally:
            if self._meter is not None:  # one that was killed or given up has no time of its own
                seconds = min(time.monotonic() - began_s, self._deadline_s) if spent_s is None else spent_s
                self._meter.spend_grammar_s(tenant, seconds)
        self._verdicts[key] = _Kept(verdict, time.monotonic() + kept_s)
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, spec: GrammarSpec) -> tuple[GrammarVerdict, float]:
        """Return the verdict on a grammar, and for how many seconds it holds."""
        for _ in range(2):  # again if the process ended, of which something else may be the cause
            process = await asyncio.to_thread(self._started)
            check = GrammarCheck(next(self._ids), spec, self._deadline_s)
            future: Future[GrammarVerdict] = Future()
            try:
                loaded = await self._loaded(process)
                if loaded.code is not None:
                    return loaded, float("inf")
                sent = asyncio.create_task(asyncio.to_thread(process.send, check, future))
                try:
                    await asyncio.shield(sent)
                    verdict = await asyncio.wrap_future(future)
                except asyncio.CancelledError:
                    sent.add_done_callback(partial(_give_up, process, check.id))  # never before the check itself
                    raise
            except _Ended:
                await asyncio.to_thread(self._drop, process)
                continue
            if verdict.code == GrammarError.code and verdict.is_final:
                verdict.message = f"does not compile: {verdict.message}"
            return verdict, float("inf") if verdict.is_final else _TIMEOUT_KEPT_S
        raise self._end_error()

    def _started(self) -> _CheckProcess:
        """Return the process, a new one if there is none. Blocks for the time of a fork. Raises ShuttingDown."""
        with self._starting:
            if self._is_closed:
                raise _shutting_down()
            if self._process is None:
                self._process = _CheckProcess(self._folder)
            return self._process

    def _drop(self, process: _CheckProcess) -> None:
        with self._starting:
            if self._process is process:
                self.kill()

    async def _loaded(self, process: _CheckProcess) -> GrammarVerdict:
        """Wait until the process has loaded; return its verdict on the tokenizer. Raises _Ended, EngineError."""
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                return await asyncio.shield(asyncio.wrap_future(process.loaded))
        except TimeoutError:
            await asyncio.to_thread(self._drop, process)
            raise self._end_error() from None

    def _end_error(self) -> EngineError | ShuttingDown:
        if self._is_closed:
            return _shutting_down()
        return EngineError("The process that compiles grammars does not start, or ends at once.")


def _give_up(process: _CheckProcess, check_id: int, sent: asyncio.Task[None]) -> None:
    """Tell the process that nobody waits for a check that was sent. In a thread, as its pipe may be full."""

    def tell() -> None:
        with contextlib.suppress(_Ended):
            process.send(GrammarCheck(check_id))

    if not sent.cancelled() and sent.exception() is None:
        threading.Thread(target=tell, name="grammar-given-up", daemon=True).start()


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down and compiles no more grammars.")


def _message(verdict: GrammarVerdict, param: str | None) -> str:
    """Return an error message that names the field, without positions in a text that the client did not write."""
    if verdict.code != GrammarError.code:
        return verdict.message
    head, colon, reason = verdict.message.partition("does not compile: ")
    while colon and param != LARK_FIELD and (shorter := _GENERATED.sub("", reason, count=1)) != reason:
        reason = shorter
    reason = _WORDS.get(reason.strip(), reason)
    return f"{param or 'The grammar'} {head}{colon}{sentence(reason) if reason else ''}"
