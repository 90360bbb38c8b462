"""Seconds without service when the engine of a server with --standby is killed, for a real shape with random weights.

    python -m benchmarks.standby_gpu --kills 3 --json out.json
Streams run while the engine gets a SIGKILL. After each kill: the time until the next engine is ready, until the first
stream goes on, until all do, and until a request that is sent at the kill has its first token. First a stream is
checked to be whole. Streams are greedy and have a seed; one is cut if it ends without its last event.
Other flags are passed to `quire serve`. A run ends after --max-seconds at the latest, with the kills it had until then.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.kills import Streamed, ask, wait_started
from benchmarks.online import SHAPES, write_model_folder
from benchmarks.startup import engine_of

_READY_AGAIN = "engine ready again"
_STANDBY_WAITS = "standby waits"
_POLL_S = 0.005
_SETTLE_S = 1.0  # of streams before a kill


class Killed(msgspec.Struct, kw_only=True):
    """One kill; seconds from it. None: it did not come within the time."""

    standby_loaded_s: float  # from the readiness of the engine that is killed
    ready_s: float | None  # by the launcher's log
    first_stream_s: float | None
    last_stream_s: float | None
    new_request_s: float | None  # the first token of a request that was sent at the kill
    new_request_status: int  # of its reply; 0: none came
    open_streams: int


async def measure(launcher: int, address: tuple[str, int], log: Path, args: argparse.Namespace) -> dict[str, object]:
    """Run streams and kill engines; return the kills and what became of the streams. Raises RuntimeError."""
    end_s = time.monotonic() + args.max_seconds
    path, body = "/v1/completions", {"prompt": "Once", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    checked = await ask(address, "check", path, {**body, "model": args.model})
    if not checked.is_whole:
        raise RuntimeError(f"undisturbed, a stream ended with {checked.status} {checked.error}")
    streams: list[Streamed] = []
    is_over = asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not is_over.is_set():
            streams.append(Streamed(str(number), time.monotonic()))
            asked = {**body, "prompt": f"{number} once", "max_tokens": args.tokens, "seed": number, "model": args.model}
            await ask(address, str(number), path, asked, into=streams[-1])

    clients = [asyncio.create_task(keep_asking(number)) for number in range(args.streams)]
    kills: list[Killed] = []
    try:
        while len(kills) < args.kills and time.monotonic() < end_s:
            begun_s = time.monotonic()
            if not await _told(log, _STANDBY_WAITS, len(kills), end_s):
                break
            loaded_s = time.monotonic() - begun_s
            await asyncio.sleep(_SETTLE_S)
            kills.append(await _kill(launcher, address, log, (path, {**body, "model": args.model}), streams, end_s))
            kills[-1].standby_loaded_s = round(loaded_s, 3)
    finally:
        is_over.set()
        _, pending = await asyncio.wait(clients, timeout=max(end_s - time.monotonic(), 5.0))
        for task in pending:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    ended = [each for each in streams if each.is_whole or each.error]
    return {
        "kills": msgspec.to_builtins(kills),
        "streams": len(streams),
        "streams_that_ended": len(ended),
        "cut": sum(not each.is_whole for each in ended),
        "errors": sorted({each.error for each in ended if each.error}),
    }


async def _kill(
    launcher: int,
    address: tuple[str, int],
    log: Path,
    request: tuple[str, dict[str, object]],
    streams: list[Streamed],
    end_s: float,
) -> Killed:
    """Kill the engine and await what follows, until end_s at the latest."""
    num_before = await asyncio.to_thread(_count, log, _READY_AGAIN)
    is_open = [each for each in streams if not (each.is_whole or each.error) and each.arrivals_s]
    os.kill(engine_of(launcher), signal.SIGKILL)
    killed_s = time.monotonic()
    fresh = Streamed("fresh", killed_s)
    asking = asyncio.create_task(ask(address, "fresh", *request, into=fresh))
    ready_s = await _told(log, _READY_AGAIN, num_before, end_s)
    going_on: list[float] = []
    while ready_s is not None and len(going_on) < len(is_open) and time.monotonic() < end_s:
        await asyncio.sleep(_POLL_S)
        # what was on its way at the kill came long before the next engine can be ready
        going_on = [later for each in is_open if (later := _after(each, killed_s + _SETTLE_S / 10)) is not None]
        if all(each.is_whole or each.error or _after(each, killed_s + _SETTLE_S / 10) for each in is_open):
            break
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asking, max(end_s - time.monotonic(), 1.0))
    firsts = sorted(at_s - killed_s for at_s in going_on)
    return Killed(
        standby_loaded_s=0.0,
        ready_s=None if ready_s is None else round(ready_s - killed_s, 3),
        first_stream_s=round(firsts[0], 3) if firsts else None,
        last_stream_s=round(firsts[-1], 3) if firsts else None,
        new_request_s=round(fresh.arrivals_s[0] - killed_s, 3) if fresh.arrivals_s else None,
        new_request_status=fresh.status,
        open_streams=len(is_open),
    )


def _after(streamed: Streamed, at_s: float) -> float | None:
    return next((later for later in streamed.arrivals_s if later >= at_s), None)


async def _told(log: Path, words: str, num_before: int, end_s: float) -> float | None:
    """Wait until a log has words more often than before; return the time, or None if end_s came first."""
    while await asyncio.to_thread(_count, log, words) <= num_before:
        if time.monotonic() > end_s:
            return None
        await asyncio.sleep(_POLL_S)
    return time.monotonic()


def _count(log: Path, words: str) -> int:
    return log.read_text().count(words)


def main() -> int:
    """Start the server, measure, print a table and save; return 1 if a stream was cut or a kill is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standby_gpu", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="of the run, after the first start")
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    report: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "shape": args.shape}
    report |= {"server_flags": flags, "settings": {"streams": args.streams, "tokens": args.tokens}}
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
        args.model = "shape"
        command = [sys.executable, "-m", "server", "serve", folder, "--load-format", "dummy", "--port", "0"]
        command += ["--served-model-name", args.model, "--standby", "--max-queue-wait", "0", "--log-format", "text"]
        started_s = time.monotonic()
        server = subprocess.Popen([*command, *flags], stderr=log)
        try:
            address = wait_started(server, Path(log.name))
            report["start_s"] = round(time.monotonic() - started_s, 2)
            outcome = asyncio.run(measure(server.pid, address, Path(log.name), args))
        finally:
            server.terminate()
            server.wait(60)
        text = Path(log.name).read_text()
    report |= outcome
    report["log"] = [line for line in text.splitlines() if "engine" in line and " DEBUG " not in line][-60:]
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    kills = outcome["kills"]
    assert isinstance(kills, list)
    names = list(Killed.__struct_fields__)
    print("  ".join(name.rjust(16) for name in names))
    for kill in kills:
        print("  ".join(str(kill[name]).rjust(16) for name in names))
    print(f"start {report['start_s']} s, streams {outcome['streams']}, cut {outcome['cut']}")
    return int(bool(outcome["cut"]) or len(kills) < args.kills)


if __name__ == "__main__":
    sys.exit(main())
