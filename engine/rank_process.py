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
import time
from collections.abc import Callable

import msgspec

from engine.core.step import Executor, StepHandle, StepPlan
from engine.interface.child_process import die_with_parent
from engine.interface.errors import StartupError, first_line, sentence
from engine.interface.logs import configure_logging
from engine.interface.transport import encode_frame
from engine.tensor_parallel.ranks import RankConfig, RankFailed, read_frame

logger = logging.getLogger(__name__)

_NOTICE_S = 1.0


def run_plans(executor: Executor, receive: Callable[[], bytes | None]) -> None:
    """Run plans until receive() returns None. At most two steps are in flight, as on the first rank."""
    decoder = msgspec.msgpack.Decoder(StepPlan)
    in_flight: StepHandle | None = None
    while (body := receive()) is not None:
        step = executor.forward(decoder.decode(body))
        if in_flight is not None:
            in_flight.wait()
        step.sample()
        in_flight = step


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
    configure_logging(level=config.log_level, log_format=config.log_format, process=f"rank {config.rank}")
    exit_code = 3
    try:
        from engine.startup.load import load_rank

        executor = load_rank(config)
        gc.collect()
        gc.freeze()
        exit_code = 1
        run_plans(executor, lambda: read_frame(sock))
    except StartupError as error:
        sock.sendall(encode_frame(RankFailed(error.message, error.exit_code)))
        return error.exit_code
    except BaseException as error:  # a device fault or a bug
        time.sleep(_NOTICE_S)  # if another rank's exit is the cause, the engine dies now and ends this process
        if exit_code == 1 or config.debug:
            logger.exception("rank fault")
        during, hint = ("serving", "") if exit_code == 1 else ("loading", " (--debug shows where)")
        what = f"{type(error).__name__} while {during}: {first_line(error)}"
        sock.sendall(encode_frame(RankFailed(sentence(what + hint), exit_code)))
        return exit_code
    return 0


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
