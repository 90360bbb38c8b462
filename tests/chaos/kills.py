"""Acts with signals: engine, worker and launcher are stopped, let go on, and killed, while streams are open."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import httpx

from tests.chaos.client import Answer, ask, completion
from tests.chaos.target import NUM_WORKERS, Target
from tests.support.daemon import role_of, wait_for

_ENGINE, _WORKER = "engine.process", "server.http.worker"
_STALL_S = 10.0  # without a step for so long, /health is 503
_WITH_USAGE = {"include_usage": True}


async def stop_engine(target: Target) -> list[Answer]:
    """SIGSTOP the engine until /health says that it is stalled, then SIGCONT: every stream ends whole."""
    engine = target.daemon.child(_ENGINE)
    streams = _streams(target, max_tokens=200)
    await _until(lambda: _is_running(target), "running requests")
    os.kill(engine, signal.SIGSTOP)
    try:
        if target.scale >= 1:
            await _until(lambda: target.daemon.get("/health").status_code == 503, "a stalled engine", _STALL_S + 20)
        else:
            await asyncio.sleep(1)
    finally:
        os.kill(engine, signal.SIGCONT)
    answers = await asyncio.gather(*streams)
    await _until(lambda: target.daemon.get("/health").status_code == 200, "health")
    _check_whole(target, answers, num_tokens=200)
    return answers


async def stop_worker(target: Target) -> list[Answer]:
    """SIGSTOP one of two workers for some seconds, then SIGCONT: every stream ends whole."""
    worker = target.rng.choice(target.daemon.running(_WORKER))
    streams = _streams(target, max_tokens=200)
    await asyncio.sleep(0.2)
    os.kill(worker, signal.SIGSTOP)
    try:
        await asyncio.sleep(5 * target.scale)
    finally:
        os.kill(worker, signal.SIGCONT)
    answers = await asyncio.gather(*streams)
    _check_whole(target, answers, num_tokens=200)
    return answers


async def kill_engine(target: Target) -> list[Answer]:
    """Kill -9 the engine: later requests get a 503 until the next engine serves, and each stream goes on with it."""
    engine = target.daemon.child(_ENGINE)
    streams = _streams(target, max_tokens=300)
    await _until(lambda: _is_running(target), "running requests")
    os.kill(engine, signal.SIGKILL)
    killed_s = time.monotonic()
    answers: list[Answer] = []
    while not answers or answers[-1].outcome != "200":
        answers.append(await ask(target.address, completion("Again", max_tokens=2)))
        if answers[-1].outcome not in ("200", "503") or time.monotonic() > killed_s + 60:
            target.faults.append(f"without an engine the answer is {answers[-1].outcome}")
            break
        await asyncio.sleep(0.1)
    target.restart_s = time.monotonic() - killed_s
    whole = await asyncio.gather(*streams)
    _check_whole(target, whole, num_tokens=300)
    return [*answers, *whole]


async def kill_worker(target: Target) -> list[Answer]:
    """Kill -9 one of two workers: its streams break off, those of the other go on, its requests free their blocks."""
    worker = target.rng.choice(target.daemon.running(_WORKER))
    streams = _streams(target, max_tokens=300)
    await _until(lambda: _is_running(target), "running requests")
    os.kill(worker, signal.SIGKILL)
    killed_s = time.monotonic()

    def is_replaced() -> bool:
        running = target.daemon.running(_WORKER)
        return len(running) == NUM_WORKERS and worker not in running

    await _until(is_replaced, "two workers")
    answers = [await ask(target.address, completion("Again", max_tokens=2)) for _ in range(8)]  # some wait for the new
    target.restart_s = time.monotonic() - killed_s
    _check_whole(target, answers, num_tokens=2)
    ended = await asyncio.gather(*streams)
    _check_whole(target, [answer for answer in ended if answer.end != "cut"], num_tokens=300)
    return [*answers, *ended]


async def kill_checkers(target: Target) -> list[Answer]:
    """Kill -9 the processes that try grammars while they work; each request is answered, the next grammar is tried."""
    asked = [asyncio.create_task(ask(target.address, _by_schema(target))) for _ in range(target.num(40))]

    def checkers() -> list[int]:
        return [pid for pid in target.processes() if role_of(pid) == "grammar checker"]

    await _until(lambda: bool(checkers()), "a grammar checker")
    for pid in checkers():
        os.kill(pid, signal.SIGKILL)
    answers = await asyncio.gather(*asked)
    if unexpected := {answer.outcome for answer in answers} - {"200", "429", "503"}:
        target.faults.append(f"schemas got {sorted(unexpected)} when their checker was killed")
    later = [await ask(target.address, _by_schema(target)) for _ in range(8)]
    _check_whole(target, later, num_tokens=4)
    return [*answers, *later]


async def kill_launcher(target: Target) -> list[Answer]:
    """Kill -9 the launcher: every process of the server ends by itself, and the next start serves."""
    streams = _streams(target, max_tokens=1500)
    await _until(lambda: _is_running(target), "running requests")
    pids = set(target.processes())
    target.daemon.process.kill()
    killed_s = time.monotonic()
    await asyncio.to_thread(target.daemon.process.wait, 60)
    answers = await asyncio.gather(*streams)
    target.faults += await asyncio.to_thread(target.left_processes, pids)
    await asyncio.to_thread(target.begin_again)
    target.restart_s = time.monotonic() - killed_s
    for answer in answers:  # the counters ended with the server
        answer.is_counted = False
    return answers


def _streams(target: Target, *, max_tokens: int) -> list["asyncio.Task[Answer]"]:
    """Open streams; they go on while the caller does something else."""
    request = completion("The workshop", max_tokens=max_tokens, stream_options=_WITH_USAGE)
    return [asyncio.create_task(ask(target.address, request)) for _ in range(target.num(12))]


def _by_schema(target: Target) -> bytes:
    """Return a request with a schema that was not there before."""
    names = [f"p{target.rng.randrange(10**9)}" for _ in range(50)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    return completion("{", max_tokens=4, structured_outputs={"json": schema}, stream_options=_WITH_USAGE)


def _check_whole(target: Target, answers: list[Answer], *, num_tokens: int) -> None:
    for answer in answers:
        if answer.outcome != "200" or answer.usage.get("completion_tokens", num_tokens) != num_tokens:
            target.faults.append(f"a stream ended with {answer.outcome}, {answer.usage}, {answer.error}")


def _is_running(target: Target) -> bool:
    return target.daemon.metrics()["quire_num_requests_running"] > 0


async def _until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Wait in a thread, so that the clients go on. A connection that breaks off counts as no."""

    def holds() -> bool:
        try:
            return condition()
        except httpx.TransportError:
            return False

    await asyncio.to_thread(wait_for, holds, timeout_s=timeout_s, what=what)
