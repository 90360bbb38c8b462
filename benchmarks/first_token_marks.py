"""Marks of a request's way through the processes of a daemon, for benchmarks/first_token_stages.py. Never torch.

The benchmark's folder with `sitecustomize` is first on the path of a daemon's processes. There install() wraps the
functions between which the time is taken: of the HTTP worker when it starts, of the engine when it is made. A daemon
without that folder has none of this. A mark is a time (time.monotonic_ns(), one clock for all processes of a host), a
number of MARKS and a value; it is written to a mapped file, which needs no end of the process.

Only marks of the first token are made: of the step that begins a request, and of the message with `started`. The value
of WRITES is 0 if the first token has no text yet, as the first bytes of a character.
"""

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BENCH_MARKS_FOLDER"
WRITES = "worker writes"
# In the order in which a request meets them. On the host but the last three, which are µs on the device
MARKS = (
    "worker has bytes", "worker sends message", "engine wakes", "engine has message", "request queued",
    "step planned", "forward begins", "graph begins", "graph launched", "forward returns", "sampling launched",
    "engine waits", "token is read", "message leaves engine", "worker has message", WRITES,
    "device: layers", "device: logits and sampling", "device: whole step",
)  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(MARKS)}
_MARK = struct.Struct("<qqd")
_MAX_MARKS = 1 << 16  # of a process; later ones are dropped


class MarkFile:
    """The marks of one process, in a file of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        with (folder / f"{os.getpid()}.marks").open("w+b") as file:
            file.truncate(_MARK.size * _MAX_MARKS)
            self._map = mmap.mmap(file.fileno(), _MARK.size * _MAX_MARKS)
        self._place = 0

    def add(self, name: str, value: float = 0.0, *, at_ns: int | None = None) -> None:
        """Write a mark. at_ns: its time; None: now."""
        if self._place < _MAX_MARKS:
            now = time.monotonic_ns() if at_ns is None else at_ns
            _MARK.pack_into(self._map, self._place * _MARK.size, now, _NUMBERS[name], value)
            self._place += 1


def read_marks(folder: Path) -> list[tuple[int, str, float]]:
    """Return the marks of all processes, by time: (ns, name, value)."""
    marks = []
    for path in folder.glob("*.marks"):
        for at_ns, number, value in _MARK.iter_unpack(path.read_bytes()):
            if not at_ns:
                break
            marks.append((at_ns, MARKS[number], value))
    return sorted(marks)


def install() -> None:
    """Wrap what this process will use, if it is a worker or an engine of a measured daemon."""
    folder, command = os.environ.get(FOLDER_VARIABLE), " ".join(sys.orig_argv)
    if folder is None:
        return
    if "-m server.http.worker" in command:
        _mark_worker(MarkFile(Path(folder)))
    elif "-m engine.process" in command:
        _mark_engines(lambda: MarkFile(Path(folder)))


def _mark_worker(marks: MarkFile) -> None:
    from engine.interface.protocol import StepEvents
    from engine.interface.socket_client import SocketEngineClient
    from server.http import h11_protocol

    is_first = False  # the next write is of a first token

    def has_bytes(protocol: Any, data: bytes) -> None:
        marks.add("worker has bytes")

    def sends(client: Any, mailbox: Any) -> None:
        marks.add("worker sends message")

    def has_message(client: Any, message: Any, now: float) -> None:
        nonlocal is_first
        if isinstance(message, StepEvents) and message.started:
            is_first = True
            marks.add("worker has message")

    def writes(joined: Any, data: bytes) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            marks.add(WRITES, float(b"data: " in joined._held + data))  # 0: the head alone, for want of text

    _wrap(h11_protocol.HttpProtocol, "data_received", before=has_bytes)
    _wrap(SocketEngineClient, "_send", before=sends)
    _wrap(SocketEngineClient, "_dispatch", before=has_message)
    _wrap(h11_protocol._JoinedWrites, "write_now", before=writes)


def _mark_engines(open_marks: Callable[[], MarkFile]) -> None:
    from engine.core.engine import Engine
    from engine.interface.transport import SocketTransport

    def is_made(engine: Any, parts: Any) -> None:
        if isinstance(parts.transport, SocketTransport):  # not that of the self-test
            _mark_engine(engine, parts.transport, open_marks())

    _wrap(Engine, "__init__", after=is_made)


def _mark_engine(engine: Any, transport: Any, marks: MarkFile) -> None:
    from engine.interface.protocol import AddRequest, StepEvents

    woken_ns = 0
    select, schedule, handle, send = (
        transport._selector.select, engine.scheduler.schedule, engine._handle, transport.send,
    )  # fmt: skip

    def marked_select(timeout: float | None = None) -> Any:
        nonlocal woken_ns
        found = select(timeout)
        woken_ns = time.monotonic_ns()
        return found

    def marked_handle(client_id: int, message: Any) -> None:
        is_request = isinstance(message, AddRequest)
        if is_request:
            marks.add("engine wakes", at_ns=woken_ns)
            marks.add("engine has message")
        handle(client_id, message)
        if is_request:
            marks.add("request queued")

    def marked_schedule(now: float) -> Any:
        plan = schedule(now)
        if plan is not None and plan.inits:
            marks.add("step planned")
        return plan

    def marked_send(client_id: int, message: Any) -> None:
        if isinstance(message, StepEvents) and message.started:
            marks.add("message leaves engine")
        send(client_id, message)

    transport._selector.select, transport.send = marked_select, marked_send
    engine.scheduler.schedule, engine._handle = marked_schedule, marked_handle
    engine._executor = _MarkedExecutor(engine._executor, marks)


class _MarkedExecutor:
    """An Executor that marks the steps that begin requests."""

    def __init__(self, executor: Any, marks: MarkFile) -> None:
        self._executor = executor
        self._marks = marks
        self._events: list[Any] = []  # of CUDA: before the graph or the step, behind it, behind the sampling
        self._record: Callable[[], None] = lambda: None
        self._is_first = False
        device = getattr(executor, "device", None)
        if device is not None and device.type == "cuda":
            cuda = sys.modules["torch"].cuda

            def record() -> None:
                self._events.append(cuda.Event(enable_timing=True))
                self._events[-1].record()

            self._record = record
        graphs = getattr(executor, "mixed_graphs", None)
        if graphs is not None:
            _wrap(graphs, "replay", before=self._begin_replay, after=self._end_replay)

    def forward(self, plan: Any) -> Any:
        """See Executor.forward."""
        if not plan.inits:
            return self._executor.forward(plan)
        self._is_first = True
        self._events.clear()
        self._marks.add("forward begins")
        step = self._executor.forward(plan)
        self._is_first = False
        self._marks.add("forward returns")
        return _MarkedStep(step, self)

    def close(self) -> None:
        """See Executor.close."""
        self._executor.close()

    def end_sampling(self) -> None:
        """Mark that all of the step is launched."""
        self._marks.add("sampling launched")
        if len(self._events) == 2:
            self._record()

    def begin_wait(self) -> None:
        """Mark that the loop waits for the device."""
        self._marks.add("engine waits")

    def end_wait(self) -> None:
        """Mark that the tokens are on the host, and how long the device took."""
        self._marks.add("token is read")
        if len(self._events) == 3:
            begun, computed, sampled = self._events
            sampled.synchronize()
            self._marks.add("device: layers", begun.elapsed_time(computed) * 1e3)
            self._marks.add("device: logits and sampling", computed.elapsed_time(sampled) * 1e3)
            self._marks.add("device: whole step", begun.elapsed_time(sampled) * 1e3)

    def _begin_replay(self, *arguments: Any, **named: Any) -> None:
        if self._is_first:
            self._marks.add("graph begins")
            self._record()

    def _end_replay(self, *arguments: Any, **named: Any) -> None:
        if self._is_first:
            self._marks.add("graph launched")
            self._record()


class _MarkedStep:
    """The StepHandle of a marked step."""

    def __init__(self, step: Any, executor: _MarkedExecutor) -> None:
        self._step = step
        self._executor = executor
        self.step_id = step.step_id

    def sample(self, masks: Any = None) -> None:
        """See StepHandle.sample."""
        self._step.sample(masks)
        self._executor.end_sampling()

    def is_done(self) -> bool:
        """See StepHandle.is_done."""
        return bool(self._step.is_done())

    def wait(self) -> Any:
        """See StepHandle.wait."""
        self._executor.begin_wait()
        result = self._step.wait()
        self._executor.end_wait()
        return result


def _wrap(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Call `before` and `after` with the arguments of each call of owner.name."""
    function = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments, **named)
        result = function(*arguments, **named)
        if after is not None:
            after(*arguments, **named)
        return result

    setattr(owner, name, wrapped)


def site_lines(tree: Path) -> Iterator[str]:
    """Yield the lines of the `sitecustomize` that calls install() of this file in the processes of a checkout."""
    yield "import sys"
    yield "from importlib.util import module_from_spec, spec_from_file_location"
    yield f"sys.path.insert(0, {str(tree)!r})  # as the process does, but later"
    yield f"_spec = spec_from_file_location('first_token_marks', {__file__!r})"
    yield "_module = module_from_spec(_spec)"
    yield "_spec.loader.exec_module(_module)"
    yield "_module.install()"
