"""The ranks after the first: how the engine starts them, tells them every step, and ends with them. Never torch.

One model split over N devices has N processes: the engine, which is rank 0 and has the scheduler, and N - 1 children
of engine/rank_process.py. Each has a socket to the engine: first a RankConfig goes down it, then every StepPlan, as the
same bytes to all; up comes nothing but a RankFailed. What one rank begins the others must finish, so there is no going
on without one: its end is the engine's, and by the socket's end and the kernel the engine's end is theirs.
"""

import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.core.executor import Executor, StepHandle
from engine.core.step import StepPlan
from engine.interface.child_process import describe_exit
from engine.interface.config import EngineConfig, LoraSource
from engine.interface.transport import encode_frame

logger = logging.getLogger(__name__)

_Rank = tuple[subprocess.Popen[bytes], socket.socket]

_PROJECT_ROOT = Path(__file__).resolve().parent.parent.parent
_LENGTH = struct.Struct("<I")
_END_S = 2.0  # less than the launcher gives an engine
_NOTICE_S = 1.0  # what the kernel takes at most to show a process's end at its socket
_FAULT = 1  # exit code


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank is told."""

    engine: EngineConfig
    rank: int
    max_model_len: int  # tokens for which the model is built
    rendezvous: str  # path of a file by which the ranks find each other
    log_level: str
    log_format: str  # text | json
    debug: bool


class RankFailed(msgspec.Struct, frozen=True):
    """Why a rank ends: one sentence, and the exit code that the engine ends with."""

    message: str
    exit_code: int


class NeverRaised(Exception):
    """The memory error of an executor that cannot give up a step."""


def _end_at_once(message: str, exit_code: int) -> None:
    logger.error("%s", message)
    os._exit(exit_code)


@dataclass(frozen=True)
class RankHost:
    """What the process of rank 0 has for the others.

    on_lost: called from another thread when a rank ends by itself, with a sentence and an exit code. It must end the
    process, whose main thread may wait for that rank for ever.
    """

    on_lost: Callable[[str, int], None] = _end_at_once
    folder: Path | None = None  # in which the ranks meet; None: that of temporary files
    log_level: str = "warning"
    log_format: str = "text"
    debug: bool = False  # a fault while loading is logged with its traceback


class Ranks:
    """Ranks 1 to size - 1. Life: the processes start, and load → send(plan) for each step → close, or our own end."""

    def __init__(self, config: EngineConfig, host: RankHost, *, max_model_len: int) -> None:
        """max_model_len: tokens for which the model is built."""
        self._host = host
        self._is_closing = False
        self._lost, self._told = threading.Event(), threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ranks-", dir=host.folder)  # only this user can enter
        self.rendezvous = str(Path(self._folder.name) / "rendezvous")
        told = _with_whole_paths(config)
        self._ranks = [self._start(told, rank, max_model_len) for rank in range(1, config.tensor_parallel_size)]

    @property
    def pids(self) -> list[int]:
        """Their processes, by rank."""
        return [process.pid for process, _ in self._ranks]

    def send(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Blocks only for a rank that is many steps behind."""
        frame = encode_frame(plan)
        for _, sock in self._ranks:
            sock.sendall(frame)

    def await_blame(self) -> None:
        """Wait until a rank that has ended is told of: its end may be why something failed here. Returns if none has.

        A library whose connection to it broke says so sooner, and does not know why.
        """
        if self._lost.wait(_NOTICE_S):
            self._told.wait(_END_S)

    def close(self) -> None:
        """End the ranks, and wait until they have."""
        self._is_closing = True
        for _, sock in self._ranks:
            sock.shutdown(socket.SHUT_RDWR)
        self._wait(_END_S)

    def kill(self) -> None:
        """End the ranks at once, whatever they wait for."""
        self._is_closing = True
        self._wait(0.0)

    def _wait(self, timeout_s: float) -> None:
        for process, sock in self._ranks:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            sock.close()
        self._folder.cleanup()

    def _start(self, config: EngineConfig, rank: int, max_model_len: int) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "engine.rank_process", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                cwd=_PROJECT_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in a terminal is the first rank's to answer
            )
        host = self._host
        told = RankConfig(
            engine=config,
            rank=rank,
            max_model_len=max_model_len,
            rendezvous=self.rendezvous,
            log_level=host.log_level,
            log_format=host.log_format,
            debug=host.debug,
        )
        ours.sendall(encode_frame(told))
        threading.Thread(target=self._watch, args=(rank, process, ours), name=f"rank-{rank}", daemon=True).start()
        return process, ours

    def _watch(self, rank: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        """Wait for the one message of a rank, or its end."""
        body = read_frame(sock)
        if self._is_closing:
            return
        self._lost.set()
        if body is None:
            message, exit_code = f"Rank {rank} {describe_exit(process.wait())}.", _FAULT
        else:
            failed = msgspec.msgpack.decode(body, type=RankFailed)
            message, exit_code = f"Rank {rank}: {failed.message}", failed.exit_code
        self._folder.cleanup()  # what is called now may end this process without another word
        self._host.on_lost(message, exit_code)
        self._told.set()


class RankedExecutor:
    """An Executor of several ranks: the first is in this process."""

    def __init__(self, first: Executor, others: Ranks) -> None:
        self._first = first
        self._others = others

    def forward(self, plan: StepPlan) -> StepHandle:
        """See Executor.forward."""
        self._others.send(plan)
        return self._first.forward(plan)

    def close(self) -> None:
        """See Executor.close."""
        self._others.close()
        self._first.close()


def read_frame(sock: socket.socket) -> bytes | None:
    """Wait for one frame and return what is in it; None: the other side is gone."""
    try:
        head = sock.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        body = sock.recv(length, socket.MSG_WAITALL)
    except OSError:
        return None
    return body if len(body) == length else None


def _with_whole_paths(config: EngineConfig) -> EngineConfig:
    """The same for a process in another folder."""
    loras = [LoraSource(source.name, str(Path(source.folder).resolve())) for source in config.loras]
    return msgspec.structs.replace(config, model=str(Path(config.model).resolve()), loras=loras)
