"""SIGTERM under open streams: how many are cut, how long the server takes to end, and what new requests are told.

    python -m benchmarks.drain --streams 40 --rounds 5 --json out.json
In each round a server is started, so many clients ask for streams of nine kinds (benchmarks/kills.py), and the server
gets a SIGTERM once all of them have text. A stream is cut if it ends without its last event, and differs if its text is
not that of an undisturbed answer. Meanwhile a new request is sent ten times a second. Other flags are passed to
`quire serve`.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.kills import Body, Streamed, ask, requests, spread, wait_started

_NEW_S = 0.1
_LONGEST_S = 120.0  # until every stream has begun


@dataclass
class Round:
    """The outcome of one SIGTERM. new: outcomes of new requests, by status or error. exit_s: until the end."""

    streams: list[Streamed]
    new: Counter[str]
    exit_code: int
    exit_s: float
    load: float

    def num_different(self, expected: dict[str, dict[str, str]]) -> int:
        """Return the number of whole streams with another text than the undisturbed answer."""
        return sum(each.is_whole and each.texts != expected[each.kind] for each in self.streams)


async def ask_anew(address: tuple[str, int], body: tuple[str, str, Body], is_over: asyncio.Event) -> Counter[str]:
    """Send new requests until the server has ended; return what became of them."""
    outcomes: Counter[str] = Counter()
    while not is_over.is_set():
        found = await ask(address, *body)
        outcomes[str(found.status) if found.status else "no connection"] += 1
        await asyncio.sleep(_NEW_S)
    return outcomes


async def wait_begun(streams: list[Streamed], reading: list["asyncio.Task[Streamed]"]) -> None:
    """Wait for an event of every stream. Raises RuntimeError if one ends without any, or none comes in _LONGEST_S."""
    latest_s = time.monotonic() + _LONGEST_S
    while not all(streamed.arrivals_s for streamed in streams):
        for streamed, task in zip(streams, reading, strict=True):
            if task.done() and not streamed.arrivals_s:
                task.result()
                raise RuntimeError(
                    f"a stream ({streamed.kind}) ended before its first event: status {streamed.status} "
                    f"{streamed.error}".rstrip()
                )
        if time.monotonic() > latest_s:
            raise RuntimeError(f"not every stream had an event within {_LONGEST_S:g} s")
        await asyncio.sleep(0.01)


async def drain(
    server: "subprocess.Popen[bytes]", address: tuple[str, int], args: argparse.Namespace
) -> tuple[Round, dict[str, dict[str, str]]]:
    """Open streams, send SIGTERM, and wait for the end. Return the outcome, and the texts of undisturbed answers."""
    asked = [(kind, path, body) for kind, (path, body) in requests(args.tokens).items()]
    undisturbed = [await ask(address, *each) for each in asked]
    streams = [Streamed(asked[number % len(asked)][0], time.monotonic()) for number in range(args.streams)]
    reading = [
        asyncio.create_task(ask(address, *asked[number % len(asked)], into=streamed))
        for number, streamed in enumerate(streams)
    ]
    await wait_begun(streams, reading)
    num_open = sum(not streamed.is_whole for streamed in streams)
    server.send_signal(signal.SIGTERM)
    begun_s, is_over = time.monotonic(), asyncio.Event()
    asking = asyncio.create_task(ask_anew(address, asked[0], is_over))
    exit_code = await asyncio.to_thread(server.wait, 120)
    exit_s = time.monotonic() - begun_s
    is_over.set()
    await asyncio.gather(*reading)
    if not num_open:
        raise RuntimeError("every stream had ended before the signal: more --tokens or --streams are needed")
    outcome = Round(streams, await asking, exit_code, exit_s, os.getloadavg()[0])
    return outcome, {each.kind: each.texts for each in undisturbed}


def run_round(args: argparse.Namespace, flags: list[str]) -> tuple[Round, dict[str, dict[str, str]]]:
    """Start a server and end it."""
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-format", "text"]
    command += ["--drain-timeout", f"{args.drain_timeout:g}", *flags]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        server = subprocess.Popen(command, stderr=log)
        try:
            address = wait_started(server, Path(log.name))
            return asyncio.run(drain(server, address, args))
        finally:
            server.kill()
            server.wait(60)


def figures(rounds: list[Round], expected: dict[str, dict[str, str]]) -> dict[str, object]:
    """Return the figures of all rounds."""
    streams = [each for one in rounds for each in one.streams]
    return {
        "rounds": len(rounds),
        "streams": len(streams),
        "cut": sum(not each.is_whole for each in streams),
        "errors": dict(Counter(each.error for each in streams if each.error)),
        "different": sum(one.num_different(expected) for one in rounds),
        "until_the_server_ended_s": spread([one.exit_s for one in rounds]),
        "exit_codes": dict(Counter(str(one.exit_code) for one in rounds)),
        "new_requests": dict(sum((one.new for one in rounds), Counter())),
    }


def main() -> int:
    """Measure, print and save; return 1 if a stream was cut."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drain", description=__doc__)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=60, help="of the longest answers")
    parser.add_argument("--drain-timeout", type=float, default=25.0, help="as in quire serve")
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    found = [run_round(args, flags) for _ in range(args.rounds)]
    rounds, outcome = [one for one, _ in found], figures([one for one, _ in found], found[0][1])
    machine = {
        "cpus": os.cpu_count(),
        "load_average": round(max(one.load for one in rounds), 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    settings = {"streams": args.streams, "tokens": args.tokens, "drain_timeout_s": args.drain_timeout}
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "server_flags": flags}
    report |= {"settings": settings, "figures": outcome}
    text = json.dumps(report, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return int(bool(outcome["cut"]))


if __name__ == "__main__":
    sys.exit(main())
