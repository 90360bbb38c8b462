"""The process of a tensor-parallel rank after the first: loads its share of the model, then runs the received plans.

    python -m engine.rank_process FD        (engine/tensor_parallel/ranks.py starts it; FD: its socket to the engine)
It exits when the socket closes and, on Linux, is killed when the engine dies. Imports torch only to load.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.core.step import Executor, StepHandle, StepPlan
from engine.interface.child_process import die_with_parent
from engine.interface.errors import StartupError, first_line, sentence
from engine.interface.logs import configure_logging
from engine.interface.transport import encode_frame
from engine.tensor_parallel.disk_shares import ShareDone, ShareFiles, ShareJob
from engine.tensor_parallel.peer_shares import EndStep, PeerDone, PeerJob, PeerShare, ReadSlots
from engine.tensor_parallel.ranks import RankConfig, RankFailed, read_frame
from engine.tensor_parallel.slot_shares import Pinning, PinSlots, SlotsReady, slots_ready

logger = logging.getLogger(__name__)

_NOTICE_S = 1.0
_Job = ShareJob | PeerJob | PinSlots


def run_plans(
    executor: Executor, receive: Callable[[], bytes | None], begin_job: Callable[[_Job], None] | None = None
) -> None:
    """Run plans until receive() returns None. At most two steps are in flight, as on the first rank.

    begin_job: called with the jobs that come between plans, when the steps that they follow have ended.
    """
    decoder: msgspec.msgpack.Decoder[StepPlan | _Job] = msgspec.msgpack.Decoder(StepPlan | _Job)
    in_flight: StepHandle | None = None
    last_step = -1  # that of in_flight
    while (body := receive()) is not None:
        told = decoder.decode(body)
        if not isinstance(told, StepPlan):
            assert begin_job is not None
            # the first rank has ended this step, so the wait is short; -1: steps of an earlier engine may be in flight
            after = told.after_step if isinstance(told, ShareJob | ReadSlots | EndStep) else None
            if in_flight is not None and after is not None and (after < 0 or last_step <= after):
                in_flight.wait()
                in_flight = None
            begin_job(told)
            continue
        step = executor.forward(told)
        if in_flight is not None:
            in_flight.wait()
        step.sample()
        in_flight, last_step = step, told.step_id


def main() -> int:
    """Entry point of `python -m engine.rank_process FD`."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    body = read_frame(sock)
    if body is None or _is_ended(sock):
        return 1
    config = msgspec.msgpack.decode(body, type=RankConfig)
    peer = config.engine.peer
    name = f"rank {config.rank}" if peer is None else f"{peer.name} rank {config.rank}"
    configure_logging(level=config.log_level, log_format=config.log_format, process=name)
    exit_code = 3
    sending = threading.Lock()  # threads answer for jobs

    def answer(done: ShareDone | PeerDone | SlotsReady | RankFailed) -> None:
        with sending, suppress(OSError):  # the engine has ended
            sock.sendall(encode_frame(done))

    try:
        from engine.startup.kv_peers import open_transport
        from engine.startup.load import load_rank

        executor = load_rank(config)
        gc.collect()
        gc.freeze()
        exit_code = 1
        files = share = pins = None
        if executor.host_pages is not None:
            pins = executor.host_pages.pins
            if config.engine.kv_disk is not None:
                files = ShareFiles(Path(config.engine.kv_disk), executor.host_pages.slot_memory, answer)
            if peer is not None:
                transport = open_transport(peer, executor.host_pages)
                share = PeerShare(transport, answer, lambda error: _end(error, answer))
        run_plans(executor, lambda: read_frame(sock), lambda job: _begin(job, files, share, pins, answer))
    except StartupError as error:
        with sending:
            sock.sendall(encode_frame(RankFailed(error.message, error.exit_code)))
        return error.exit_code
    except BaseException as error:  # a device fault or a bug
        time.sleep(_NOTICE_S)  # if another rank's exit is the cause, the engine dies now and ends this process
        if exit_code == 1 or config.debug:
            logger.exception("rank fault")
        during, hint = ("serving", "") if exit_code == 1 else ("loading", " (--debug shows where)")
        what = f"{type(error).__name__} while {during}: {first_line(error)}"
        with sending:
            sock.sendall(encode_frame(RankFailed(sentence(what + hint), exit_code)))
        return exit_code
    return 0


def _begin(
    job: _Job,
    files: ShareFiles | None,
    share: PeerShare | None,
    pins: Pinning | None,
    answer: Callable[[SlotsReady], None],
) -> None:
    """Begin a job of the disk, or of another engine, or to pin memory."""
    if isinstance(job, ShareJob):
        assert files is not None
        files.begin(job)
    elif isinstance(job, PinSlots):
        assert pins is not None
        pins.pin_rest(lambda: answer(slots_ready(pins)))
    else:
        assert share is not None
        share.begin(job)


def _end(error: BaseException, answer: Callable[[RankFailed], None]) -> None:
    """End the process by the fault of a thread."""
    logger.error("rank fault", exc_info=error)
    answer(RankFailed(sentence(f"{type(error).__name__} while serving: {first_line(error)}"), 1))
    os._exit(1)


def _is_ended(sock: socket.socket) -> bool:
    """Return True if the engine died before die_with_parent(), so that no signal would end this process."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # no clean-up: destructors would wait for ranks that have exited
