"""A rank after the first of a model that is split over devices: loads its share, then runs every plan it is sent.

    python -m engine.rank_process FD        (engine/tensor_parallel/ranks.py starts it; FD: its socket to the engine)
It ends with the engine: when the socket does, and on Linux with the engine's death. Imports torch only to load.
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

from engine.core.executor import Executor, StepHandle
from engine.core.step import StepPlan
from engine.interface.child_process import die_with_parent
from engine.interface.errors import StartupError, sentence
from engine.interface.logs import configure_logging
from engine.interface.transport import encode_frame
from engine.tensor_parallel.ranks import RankConfig, RankFailed, read_frame

logger = logging.getLogger(__name__)

_NOTICE_S = 1.0


def run_plans(executor: Executor, receive: Callable[[], bytes | None]) -> None:
    """Run plans until there are no more. At most two steps are in flight, as at the first rank."""
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
    except BaseException as error:  # a fault of the device, or a bug
        time.sleep(_NOTICE_S)  # or another rank's end, of which the engine dies now, and so does this process
        if exit_code == 1 or config.debug:
            logger.exception("rank fault")
        during, hint = ("serving", "") if exit_code == 1 else ("loading", " (--debug shows where)")
        what = f"{type(error).__name__} while {during}: {str(error).strip().partition(chr(10))[0]}"
        sock.sendall(encode_frame(RankFailed(sentence(what + hint), exit_code)))
        return exit_code
    return 0


def _is_ended(sock: socket.socket) -> bool:
    """Whether the engine died before the kernel was asked to tell: nothing would end this process then."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # now: destructors would wait for ranks that are gone
