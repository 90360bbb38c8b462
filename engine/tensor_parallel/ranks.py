"""Ranks: starts the tensor-parallel ranks after the first, sends them every plan, and watches them. Never torch.

A model split over N devices has N processes: the engine, which is rank 0 and has the scheduler, and N - 1 child
processes (engine/rank_process.py). Each child has a socket to the engine: it receives a RankConfig, then every
StepPlan, the same bytes for all ranks, and what it is to do for blocks on disk (ShareJob) and for those of another
engine (PeerJob), and when to pin its host memory (PinSlots); it answers these, and sends at most one RankFailed. A step
cannot complete without every rank, so if one rank dies, the engine exits. If the engine dies, the closed socket and the
kernel end the ranks.
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

from engine.core.step import Executor, StepHandle, StepPlan
from engine.interface.child_process import describe_exit
from engine.interface.config import EngineConfig, LoraSource
from engine.interface.transport import encode_frame
from engine.tensor_parallel.disk_shares import ShareDone, ShareJob
from engine.tensor_parallel.peer_shares import PeerDone, PeerJob
from engine.tensor_parallel.slot_shares import PinSlots, SlotsReady

logger = logging.getLogger(__name__)

_Rank = tuple[subprocess.Popen[bytes], socket.socket]

_PROJECT_ROOT = Path(__file__).resolve().parent.parent.parent
_LENGTH = struct.Struct("<I")
_END_S = 2.0  # less than the launcher's timeout for an engine
_NOTICE_S = 1.0  # maximum time until the kernel closes a dead process's socket
_FAULT = 1  # exit code


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a rank process."""

    engine: EngineConfig
    rank: int
    max_model_len: int  # tokens for which the model is built
    pins_later: bool  # most of host memory when PinSlots comes
    rendezvous: str  # path of the file through which the ranks find each other
    log_level: str
    log_format: str  # text | json
    debug: bool


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Reports a rank's failure: one sentence, and the exit code for the engine."""

    message: str
    exit_code: int


_FromRank = RankFailed | ShareDone | PeerDone | SlotsReady


class NeverRaised(Exception):
    """The memory_error of an executor that cannot drop a step."""


def _end_at_once(message: str, exit_code: int) -> None:
    logger.error("%s", message)
    os._exit(exit_code)


@dataclass(frozen=True)
class RankHost:
    """Settings of the other ranks that come from the process of rank 0.

    on_lost: called in another thread when a rank exits unexpectedly, with a sentence and an exit code. It must end the
    process, since the main thread may wait for that rank without end.
    """

    on_lost: Callable[[str, int], None] = _end_at_once
    folder: Path | None = None  # for the rendezvous file; None: the default folder of temporary files
    log_level: str = "warning"
    log_format: str = "text"
    debug: bool = False  # log faults while loading with their traceback


class Ranks:
    """The processes of ranks 1 to size - 1. Life: start and load → send(plan) for each step → close() or exit."""

    def __init__(self, config: EngineConfig, host: RankHost, *, max_model_len: int, pins_later: bool = False) -> None:
        """max_model_len: tokens for which the model is built. pins_later: most of host memory after tell(PinSlots)."""
        self._host = host
        # Called in another thread, with the rank
        self.on_share: Callable[[int, ShareDone], None] | None = None
        self.on_peer: Callable[[int, PeerDone], None] | None = None
        self.on_slots: Callable[[int, SlotsReady], None] | None = None
        self._pins_later = pins_later
        self._is_closing = False
        self._lost, self._told = threading.Event(), threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ranks-", dir=host.folder)  # only this user can enter
        self.rendezvous = str(Path(self._folder.name) / "rendezvous")
        told = _with_whole_paths(config)
        self._sending = [threading.Lock() for _ in range(1, config.tensor_parallel_size)]  # plans, and jobs of threads
        self._ranks = [self._start(told, rank, max_model_len) for rank in range(1, config.tensor_parallel_size)]

    @property
    def pids(self) -> list[int]:
        """The process ids, in rank order."""
        return [process.pid for process, _ in self._ranks]

    def send(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Blocks only for a rank that is many steps behind."""
        frame = encode_frame(plan)
        for (_, sock), sending in zip(self._ranks, self._sending, strict=True):
            with sending:
                sock.sendall(frame)

    def tell(self, rank: int, job: ShareJob | PeerJob | PinSlots) -> None:
        """Send a job to a rank after the first, from any thread."""
        with self._sending[rank - 1]:
            self._ranks[rank - 1][1].sendall(encode_frame(job))

    def await_blame(self) -> None:
        """If a rank has exited, wait until on_lost has reported it; return if none has within a second.

        A library whose connection to that rank broke fails earlier, without the cause.
        """
        if self._lost.wait(_NOTICE_S):
            self._told.wait(_END_S)

    def close(self) -> None:
        """End the ranks and wait for their exit."""
        self._is_closing = True
        for _, sock in self._ranks:
            sock.shutdown(socket.SHUT_RDWR)
        self._wait(_END_S)

    def kill(self) -> None:
        """Kill the ranks immediately."""
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
                process_group=0,  # only the first rank handles Ctrl-C of a terminal
            )
        host = self._host
        told = RankConfig(
            engine=config,
            rank=rank,
            max_model_len=max_model_len,
            pins_later=self._pins_later,
            rendezvous=self.rendezvous,
            log_level=host.log_level,
            log_format=host.log_format,
            debug=host.debug,
        )
        ours.sendall(encode_frame(told))
        threading.Thread(target=self._watch, args=(rank, process, ours), name=f"rank-{rank}", daemon=True).start()
        return process, ours

    def _watch(self, rank: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        """Wait for a rank's failure or exit, and call on_lost. Pass on what it says of its jobs meanwhile."""
        decoder: msgspec.msgpack.Decoder[_FromRank] = msgspec.msgpack.Decoder(_FromRank)
        failed: RankFailed | None = None
        while failed is None and (body := read_frame(sock)) is not None:
            told = decoder.decode(body)
            if isinstance(told, RankFailed):
                failed = told
            elif isinstance(told, ShareDone) and self.on_share is not None:
                self.on_share(rank, told)
            elif isinstance(told, PeerDone) and self.on_peer is not None:
                self.on_peer(rank, told)
            elif isinstance(told, SlotsReady) and self.on_slots is not None:
                self.on_slots(rank, told)
        if self._is_closing:
            return
        self._lost.set()
        if failed is None:
            message, exit_code = f"Rank {rank} {describe_exit(process.wait())}.", _FAULT
        else:
            message, exit_code = f"Rank {rank}: {failed.message}", failed.exit_code
        self._folder.cleanup()  # before on_lost(), which may exit the process
        self._host.on_lost(message, exit_code)
        self._told.set()


class RankedExecutor:
    """The Executor of several ranks, of which the first is in this process."""

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
    """Wait for one frame and return its body; None if the connection is closed."""
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
    """Return the configuration with absolute paths, for a process with another working directory."""
    loras = [LoraSource(source.name, str(Path(source.folder).resolve())) for source in config.loras]
    disk = None if config.kv_disk is None else str(Path(config.kv_disk).resolve())
    return msgspec.structs.replace(config, model=str(Path(config.model).resolve()), loras=loras, kv_disk=disk)
