"""Measures a real daemon under overload: goodput, refusals and fairness between API keys.

    python -m benchmarks.overload_daemon [--load 3] [--max-queue-wait 2] [--duration 40] [--json FILE] [SERVE FLAGS]
The parts and their words are those of benchmarks/overload.py, which is simulated and exact; here the demo model answers
over HTTP, and the clients take their share of the cores. Answers have 16 to 64 tokens. Capacity is measured before and
after the overload, in the same server, and the mean counts. Other flags are passed to `quire serve`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.http_stream import ReplyError, StreamedReply
from benchmarks.kills import wait_started

_WORDS = ["red", "fox", "tree", "sun", "river", "stone", "cat", "house", "night", "song"]
_KEYS = {"flood": "key-of-flood-0001", "guest": "key-of-guest-0001"}
_FLOOD = 500
_PAUSE_S = 0.5  # between two requests of the other key
_RETRY_S = 0.25  # after a refusal, while capacity is measured: asking at once would take the server's cores


@dataclass
class Outcome:
    """One request. Times from its sending, in seconds; None: it did not come so far."""

    sent_s: float
    status: int = 0
    ttft_s: float | None = None
    end_s: float | None = None


class Client:
    """Sends completions of random length to one server."""

    def __init__(self, address: tuple[str, int], *, seed: int) -> None:
        self._address = address
        self._random = random.Random(seed)
        self._number = 0

    async def ask(self, name: str = "guest", *, into: Outcome | None = None) -> Outcome:
        """Send one request and read its whole reply. into: filled meanwhile, so that a cancelled one is known too."""
        self._number += 1
        words = self._random.choices(_WORDS, k=self._random.randint(8, 80))
        body = {
            "model": "quire-demo",
            "prompt": f"{self._number} {' '.join(words)}",  # no prefix in common
            "max_tokens": self._random.randint(16, 64),
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._address[0]}\r\nauthorization: Bearer {_KEYS[name]}\r\n"
        head += f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        outcome, reply = into or Outcome(time.monotonic()), StreamedReply()
        with contextlib.suppress(OSError, ReplyError):
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                writer.write(head.encode() + data)
                while not reply.is_complete and (part := await reader.read(1 << 16)):
                    payloads, outcome.status = reply.feed(part), reply.status
                    if payloads and outcome.ttft_s is None:
                        outcome.ttft_s = time.monotonic() - outcome.sent_s
            finally:
                writer.close()
        outcome.end_s = time.monotonic() - outcome.sent_s
        return outcome

    async def capacity(self, duration_s: float, *, num_open: int) -> float:
        """Return the requests that are answered in a second while so many are open."""
        begun_s = time.monotonic()
        ends: list[float] = []

        async def keep_asking() -> None:
            while True:
                outcome = await self.ask()
                if outcome.status == 200:
                    ends.append(time.monotonic() - begun_s)
                else:
                    await asyncio.sleep(_RETRY_S)

        await _run_for([keep_asking() for _ in range(num_open)], duration_s)
        warm_s = duration_s / 4
        return sum(end_s >= warm_s for end_s in ends) / (duration_s - warm_s)

    async def load(self, duration_s: float, *, rate: float) -> list[Outcome]:
        """Send `rate` requests a second at random times; return all, with what they had at the end."""
        begun_s, outcomes, tasks = time.monotonic(), list[Outcome](), []
        at_s = self._random.expovariate(rate)
        while at_s < duration_s:
            await asyncio.sleep(max(begun_s + at_s - time.monotonic(), 0))
            outcomes.append(Outcome(time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(into=outcomes[-1])))
            at_s += self._random.expovariate(rate)
        done, pending = await asyncio.wait(tasks, timeout=max(begun_s + duration_s - time.monotonic(), 0.01))
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
        return outcomes


async def _run_for(coroutines: Iterable[Coroutine[Any, Any, None]], duration_s: float) -> None:
    tasks = [asyncio.create_task(each) for each in coroutines]
    await asyncio.sleep(duration_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def daemon(flags: list[str]) -> Iterator[tuple[str, int]]:
    """Start a server with two API keys and end it."""
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder) / "keys", Path(folder) / "log"
        keys.write_text("".join(f"{key} inference name={name}\n" for name, key in _KEYS.items()))
        command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-format", "text"]
        with log.open("w") as file:
            server = subprocess.Popen([*command, "--api-key-file", str(keys), *flags], stderr=file)
        try:
            yield wait_started(server, log)
        finally:
            server.kill()
            server.wait(60)


async def overload(args: argparse.Namespace, flags: list[str], *, max_wait_s: float) -> dict[str, object]:
    """Measure capacity and goodput with one limit of the wait; 0: none."""
    limit_s, duration_s = args.max_queue_wait, args.duration
    flags = [*flags, "--max-queue-wait", f"{max_wait_s:g}"]
    with daemon(flags) as address:
        client = Client(address, seed=1)
        before = await client.capacity(duration_s / 2, num_open=2 * args.num_seqs)
        outcomes = await client.load(duration_s, rate=args.load * before)
        load = os.getloadavg()[0]
        after = 0.0
        if max_wait_s:  # else the queue is long
            after = await client.capacity(duration_s / 2, num_open=2 * args.num_seqs)
    base = (before + after) / 2 if after else before
    begun_s = min(outcome.sent_s for outcome in outcomes)
    counted = [o for o in outcomes if duration_s / 4 <= o.sent_s - begun_s < duration_s - limit_s]
    accepted = [o for o in counted if o.status in (0, 200)]
    refusals = [o.end_s for o in outcomes if o.status == 429 and o.end_s is not None]
    in_time = sum(o.ttft_s is not None and o.ttft_s <= limit_s for o in accepted)
    goodput = in_time / (duration_s * 3 / 4 - limit_s)
    times = sorted(o.ttft_s for o in accepted if o.ttft_s is not None)
    return {
        "max_queue_wait_s": max_wait_s or None,
        "capacity_per_s": [round(before, 2), round(after, 2)] if after else [round(before, 2)],
        "requests_per_s": round(len(outcomes) / duration_s, 2),
        "goodput_per_s": round(goodput, 2),
        "goodput_ratio": round(goodput / base, 3),
        "refused_share": round(len(refusals) / len(outcomes), 3),
        "late_share": round(1 - in_time / max(len(accepted), 1), 3),
        "ttft_p50_s": round(median(times), 3) if times else None,
        "refusal_p50_s": round(median(refusals), 3) if refusals else None,
        "refusal_max_s": round(max(refusals), 3) if refusals else None,
        "statuses": dict(Counter(str(o.status or "no answer yet") for o in outcomes)),
        "load_average": round(load, 1),
    }


async def fairness(args: argparse.Namespace, flags: list[str]) -> dict[str, object]:
    """Measure one key's requests, one after another, alone and after another key has sent 500 at once."""
    with daemon([*flags, "--max-queue-wait", "0"]) as address:
        client, times, num_ended = Client(address, seed=2), [], 0
        for has_flood in (False, True):
            flood = [asyncio.create_task(client.ask("flood")) for _ in range(_FLOOD * has_flood)]
            await asyncio.sleep(2.0)
            found, end_s = [], time.monotonic() + args.duration
            while time.monotonic() < end_s:
                outcome = await client.ask()
                found += [] if outcome.ttft_s is None else [outcome.ttft_s]
                await asyncio.sleep(_PAUSE_S)
            times.append(found)
            num_ended = sum(task.done() for task in flood)
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
    alone, beside = times
    return {
        "alone_p50_s": round(median(alone), 3),
        "beside_p50_s": round(median(beside), 3),
        "fairness_ratio": round(median(beside) / median(alone), 2),
        "alone_p95_s": round(quantiles(alone, n=20)[18], 3),
        "beside_p95_s": round(quantiles(beside, n=20)[18], 3),
        "of_the_flood_answered_meanwhile": num_ended,
        "load_average": round(os.getloadavg()[0], 1),
    }


async def measure(args: argparse.Namespace, flags: list[str]) -> dict[str, object]:
    """Run all three parts."""
    flags = [*flags, "--max-num-seqs", str(args.num_seqs)]
    return {
        "limited": await overload(args, flags, max_wait_s=args.max_queue_wait),
        "unlimited": await overload(args, flags, max_wait_s=0.0),
        "fairness": await fairness(args, flags),
    }


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload_daemon", description=__doc__)
    parser.add_argument("--load", type=float, default=3.0, help="multiple of the capacity (3)")
    parser.add_argument("--max-queue-wait", type=float, default=2.0, help="seconds to the first token (2)")
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of each load (40)")
    parser.add_argument("--num-seqs", type=int, default=16, help="requests that run at once (16)")
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    settings: dict[str, object] = {"load": args.load, "limit_s": args.max_queue_wait, "duration_s": args.duration}
    settings["num_seqs"] = args.num_seqs
    report: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine}
    report |= {"server_flags": flags, "settings": settings}
    report |= asyncio.run(measure(args, flags))
    text = json.dumps(report, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
