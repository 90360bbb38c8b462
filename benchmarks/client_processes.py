"""Starts the client processes of one load together, ends them early on Ctrl-C, and gathers their results."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import msgspec

from benchmarks.agents import NUM_AGENTS
from benchmarks.load import LoadConfig
from benchmarks.load_client import LoadResult, serve_load
from benchmarks.report import BenchError
from benchmarks.workloads import AGENT

_STOP_TIMEOUT_S = 10.0


def run_clients(config: LoadConfig, num_processes: int) -> tuple[list[LoadResult], bool]:
    """Spread the load over processes. Blocks. Returns their results, and True if Ctrl-C ended them early."""
    return run_shares(split(config, num_processes))


def run_shares(shares: Sequence[LoadConfig]) -> tuple[list[LoadResult], bool]:
    """Send each load, which may go to a server of its own, from a process of its own; see run_clients."""
    processes: list[tuple[SpawnProcess, Connection]] = []
    is_interrupted = False
    try:
        with _without_sigint():
            processes += [_start(share) for share in shares]
        for _, connection in processes:
            _receive(connection)  # every process is up before the first request
        for _, connection in processes:
            connection.send_bytes(b"go")
        try:
            for _, connection in processes:
                connection.poll(None)
        except KeyboardInterrupt:
            is_interrupted = True
            for _, connection in processes:
                with contextlib.suppress(OSError):
                    connection.send_bytes(b"stop")
        return [_decode(_receive(connection)) for _, connection in processes], is_interrupted
    finally:
        for process, connection in processes:
            connection.close()
            process.join(_STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()


def split(config: LoadConfig, num_processes: int) -> list[LoadConfig]:
    """Split the load into shares: Poisson processes of partial rates add up to one of the whole rate.

    The parts of a workload draw the same requests with one seed, and each sends its own.
    """
    limit = config.concurrency if config.rate_per_s == 0 else config.num_requests
    if config.workload == AGENT:
        limit = NUM_AGENTS
    count = max(1, min(num_processes, limit, config.num_requests))
    return [
        msgspec.structs.replace(
            config,
            num_requests=config.num_requests // count + (i < config.num_requests % count),
            concurrency=max(config.concurrency // count + (i < config.concurrency % count), 1),
            rate_per_s=config.rate_per_s / count,
            seed=config.seed + i * (not config.workload),
            part=i,
            num_parts=count,
        )
        for i in range(count)
    ]


def _start(config: LoadConfig) -> tuple[SpawnProcess, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_load, args=(theirs, config), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _receive(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError) as error:
        raise BenchError("A client process ended before its load did.") from error


def _decode(message: bytes) -> LoadResult:
    return msgspec.msgpack.decode(message, type=LoadResult)


@contextlib.contextmanager
def _without_sigint() -> Iterator[None]:
    """Make child processes ignore SIGINT: Ctrl-C reaches all processes, and only this one acts on it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
