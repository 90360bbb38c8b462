"""Streams of every kind while the engine is killed again and again: how many are cut, and how long each one pauses.

    python -m benchmarks.kills --streams 200 --seconds 120 --every 5 --json out.json
    python -m benchmarks.kills --streams 20 --kills 100 --every 5 --standby --json out.json --resume
First each request is answered once undisturbed. Then so many clients ask them in turn, and the engine gets a SIGKILL
when it has served for --every seconds. A stream is cut if it ends without its last event; it differs if its text is not
that of the undisturbed answer. Requests that the server refuses while it has no engine (503) are asked again; none is
refused for the length of the queue (--max-queue-wait 0). Other flags are passed to `quire serve`; with --standby an
engine is killed no sooner than the next one is loaded beside it.

A run ends after --seconds or, counted with those of the file, after --kills; SIGTERM ends it earlier. With --resume it
goes on with the file of an earlier run that had the same settings.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.http_stream import ReplyError, StreamedReply
from benchmarks.startup import engine_of

_LISTENING = re.compile(r"listening url=http://([^:]+):(\d+)")
_READY_AGAIN = "engine ready again"
_STANDBY_WAITS = "standby waits"
_RETRY_S = 0.25
_POLL_S = 0.02
_LONGEST_S = 300.0  # of a load of an engine
ENDS = {b"[DONE]", "response.completed", "response.incomplete", "message_stop"}
_TEXTS = ("content", "reasoning", "text", "delta", "arguments", "partial_json", "thinking")
_STORY = [{"role": "user", "content": "Tell me a short story about a fox."}]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
Body = dict[str, Any]


def requests(num_tokens: int) -> dict[str, tuple[str, Body]]:
    """Return a request of each kind, by name: its path and body. num_tokens: of the longest answers."""
    chat, free = "/v1/chat/completions", {"messages": _STORY, "max_tokens": num_tokens, "ignore_eos": True}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True}}
    tools = {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"}
    return {
        "plain": (chat, {**free, "temperature": 0}),
        "seeded": ("/v1/completions", {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "seed": 7}),
        "schema": (chat, {"messages": _STORY, "max_tokens": 60, "seed": 1, "response_format": schema}),
        "n = 3": (chat, {**free, "max_tokens": num_tokens // 3, "seed": 3, "n": 3}),
        "tools": (chat, {"messages": _STORY, "max_tokens": 80, "temperature": 0, **tools}),
        "reasoning": (chat, {**free, "temperature": 0, "reasoning_effort": "low", "thinking_token_budget": 8}),
        "logprobs": (chat, {**free, "seed": 8, "logprobs": True, "top_logprobs": 3}),
        "Responses": (
            "/v1/responses",
            {"input": "Tell me a story.", "temperature": 0, "max_output_tokens": num_tokens},
        ),
        "Messages": ("/v1/messages", {"messages": _STORY, "temperature": 0, "max_tokens": num_tokens}),
    }


@dataclass
class Streamed:
    """One stream: when its events came, its text by place, and how it ended."""

    kind: str
    begun_s: float
    status: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    is_whole: bool = False
    error: str = ""

    def take(self, payload: bytes, now_s: float) -> None:
        """Add one event."""
        self.arrivals_s.append(now_s)
        if payload in ENDS:
            self.is_whole = not self.error
            return
        event = json.loads(payload)
        if event.get("error"):
            self.error = str(event["error"].get("code") or event["error"].get("type"))
        elif event.get("type") in ENDS:
            self.is_whole = not self.error
        elif event.get("type") not in ("message_start", "response.created", "response.in_progress"):
            self._fold(event, "")

    def _fold(self, value: object, place: str) -> None:
        if isinstance(value, dict):
            own = f"{place}{value.get('index', '')}"
            for key, part in value.items():
                self._fold(part, f"{own}.{key}")
        elif isinstance(value, list):
            for part in value:
                self._fold(part, place)
        elif isinstance(value, str) and place.endswith(_TEXTS):
            self.texts[place] = self.texts.get(place, "") + value


async def ask(address: tuple[str, int], kind: str, path: str, body: Body, *, into: Streamed | None = None) -> Streamed:
    """Send one streaming request and read its whole reply. into: where to keep what comes, for others to see."""
    streamed, reply = into or Streamed(kind, time.monotonic()), StreamedReply()
    data = json.dumps({"model": "quire-demo", **body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    try:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while not reply.is_complete and (part := await reader.read(1 << 16)):
            now_s = time.monotonic()
            for payload in reply.feed(part):
                streamed.take(payload, now_s)
        writer.close()
    except (OSError, ReplyError) as error:
        streamed.error = str(error)
    streamed.status = reply.status
    return streamed


class Kill(msgspec.Struct):
    """One kill. ready_s: when the next engine was ready; load: processes that wanted a core, mean of a minute.

    standby_s: seconds in which the standby for this kill was loaded, beside what served; None: there is none.
    """

    killed_s: float
    ready_s: float
    load: float
    standby_s: float | None = None


class Tally(msgspec.Struct, kw_only=True):
    """The outcome of one run, or of several with the same settings: counts, and seconds in no order."""

    streams_of_each_kind: dict[str, int] = {}
    refused_without_an_engine: int = 0
    cut: int = 0
    errors: dict[str, int] = {}
    different_of_each_kind: dict[str, int] = {}
    without_an_engine_s: list[float] = []  # one for each kill
    until_the_first_stream_goes_on_s: list[float] = []
    pause_of_a_stream_s: list[float] = []
    until_a_standby_is_loaded_s: list[float] = []
    loads: list[float] = []


async def keep_asking(
    address: tuple[str, int], number: int, asked: list[tuple[str, str, Body]], is_over: asyncio.Event
) -> list[Streamed]:
    """Ask one request after the other until the time is over; the last answer is awaited."""
    done: list[Streamed] = []
    while not is_over.is_set():
        done.append(await ask(address, *asked[number % len(asked)]))
        if done[-1].status == 503:
            await asyncio.sleep(_RETRY_S)
        else:
            number += 1
    return done


async def keep_killing(
    launcher: int, log: Path, *, every_s: float, end_s: float, most: float, has_standby: bool, is_over: asyncio.Event
) -> list[Kill]:
    """Kill each engine when it has served for every_s, until end_s or `most` kills; then set is_over.

    A launcher's oldest engine process is the one that serves; log: where the launcher tells of the next one. After the
    last kill the streams have every_s to go on. Raises RuntimeError, with is_over set, if no next engine comes.
    """
    try:
        return await _keep_killing(launcher, log, every_s, end_s, most, has_standby, is_over)
    finally:
        is_over.set()


async def _keep_killing(
    launcher: int, log: Path, every_s: float, end_s: float, most: float, has_standby: bool, is_over: asyncio.Event
) -> list[Kill]:
    kills: list[Kill] = []
    ready_s = time.monotonic()
    while not is_over.is_set():
        loaded = asyncio.create_task(_wait_told(log, _STANDBY_WAITS, len(kills))) if has_standby else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), every_s)
        if is_over.is_set() or len(kills) >= most or time.monotonic() >= end_s:
            if loaded is not None:
                loaded.cancel()
            break
        standby_s = await loaded - ready_s if loaded is not None else None
        os.kill(engine_of(launcher), signal.SIGKILL)
        killed_s = time.monotonic()
        ready_s = await _wait_told(log, _READY_AGAIN, len(kills))
        kills.append(Kill(killed_s, ready_s, os.getloadavg()[0], standby_s))
    return kills


async def _wait_told(log: Path, words: str, num_before: int) -> float:
    """Wait until a log has words more often than before; return the time. Raises RuntimeError after _LONGEST_S."""
    latest_s = time.monotonic() + _LONGEST_S
    while await asyncio.to_thread(lambda: log.read_text().count(words)) <= num_before:
        if time.monotonic() > latest_s:
            raise RuntimeError(f"the daemon did not log {words!r} within {_LONGEST_S:g} s")
        await asyncio.sleep(_POLL_S)
    return time.monotonic()


def wait_started(server: "subprocess.Popen[bytes]", log: Path) -> tuple[str, int]:
    """Wait until the daemon has written its address and is ready. Raises RuntimeError if it ends before."""
    while (found := _LISTENING.search(log.read_text())) is None:
        if server.poll() is not None:
            raise RuntimeError(f"the daemon ended before it was ready:\n{log.read_text()}")
        time.sleep(_POLL_S)
    address = found[1], int(found[2])
    wait_ready(address)
    return address


def wait_ready(address: tuple[str, int]) -> None:
    """Poll /ready."""
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address[0]}:{address[1]}/ready"):
            return
        time.sleep(_POLL_S)


def tally(streams: list[Streamed], kills: list[Kill], expected: dict[str, dict[str, str]]) -> Tally:
    """Return what became of the streams of one run.

    Pauses: of each stream open at a kill, from it until the first event by the next engine.
    """
    served = [each for each in streams if each.status != 503]
    pauses, first = [], []
    for kill in kills:
        by_next = [
            later - kill.killed_s
            for each in served
            if each.begun_s < kill.killed_s
            and (later := next((at_s for at_s in each.arrivals_s if at_s >= kill.ready_s), None)) is not None
        ]
        pauses += by_next
        first += [min(by_next)] if by_next else []
    return Tally(
        streams_of_each_kind=dict(Counter(each.kind for each in served)),
        refused_without_an_engine=len(streams) - len(served),
        cut=sum(not each.is_whole for each in served),
        errors=dict(Counter(each.error for each in served if each.error)),
        different_of_each_kind=dict(
            Counter(each.kind for each in served if each.is_whole and each.texts != expected[each.kind])
        ),
        without_an_engine_s=[round(kill.ready_s - kill.killed_s, 3) for kill in kills],
        until_the_first_stream_goes_on_s=[round(pause_s, 3) for pause_s in first],
        pause_of_a_stream_s=[round(pause_s, 3) for pause_s in pauses],
        until_a_standby_is_loaded_s=[round(kill.standby_s, 3) for kill in kills if kill.standby_s is not None],
        loads=[round(kill.load, 1) for kill in kills],
    )


def added(one: Tally, other: Tally) -> Tally:
    """Return the sum of two tallies."""
    sums: dict[str, Any] = {}
    for name in Tally.__struct_fields__:
        mine, others = getattr(one, name), getattr(other, name)
        sums[name] = dict(Counter(mine) + Counter(others)) if isinstance(mine, dict) else mine + others
    return Tally(**sums)


def figures(total: Tally) -> dict[str, object]:
    """Return the figures of a tally."""
    return {
        "kills": len(total.without_an_engine_s),
        "streams": sum(total.streams_of_each_kind.values()),
        "streams_of_each_kind": total.streams_of_each_kind,
        "refused_without_an_engine": total.refused_without_an_engine,
        "cut": total.cut,
        "errors": total.errors,
        "different": sum(total.different_of_each_kind.values()),
        "different_of_each_kind": total.different_of_each_kind,
        "streams_open_at_a_kill": len(total.pause_of_a_stream_s),
        "without_an_engine_s": spread(total.without_an_engine_s),
        "until_the_first_stream_goes_on_s": spread(total.until_the_first_stream_goes_on_s),
        "pause_of_a_stream_s": spread(total.pause_of_a_stream_s),
        "until_a_standby_is_loaded_s": spread(total.until_a_standby_is_loaded_s),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum."""
    ordered = sorted(values)
    if not ordered:
        return {}
    places = {"p50": (len(ordered) - 1) // 2, "p99": (99 * len(ordered) + 99) // 100 - 1, "max": len(ordered) - 1}
    return {name: round(ordered[place], 3) for name, place in places.items()}


async def measure(
    launcher: int, address: tuple[str, int], log: Path, args: argparse.Namespace, *, most: float, has_standby: bool
) -> Tally:
    """Ask undisturbed, then under at most so many kills; return what came of it."""
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    asked = [(kind, path, body) for kind, (path, body) in requests(args.tokens).items()]
    undisturbed = [await ask(address, *each) for each in asked]
    for each in undisturbed:
        if not each.is_whole:
            raise RuntimeError(f"undisturbed, {each.kind} ended with {each.status} {each.error}")
    end_s = time.monotonic() + args.seconds
    killing = asyncio.create_task(
        keep_killing(
            launcher, log, every_s=args.every, end_s=end_s, most=most, has_standby=has_standby, is_over=is_over
        )
    )
    clients = [keep_asking(address, number, asked, is_over) for number in range(args.streams)]
    streams = [each for part in await asyncio.gather(*clients) for each in part]
    return tally(streams, await killing, {each.kind: each.texts for each in undisturbed})


def earlier_tally(path: Path, identity: dict[str, object]) -> Tally:
    """Return the tally of an earlier run's file, or none if there is no file. Raises ValueError for other settings."""
    if not path.exists():
        return Tally()
    report = json.loads(path.read_bytes())
    if any(report[name] != value for name, value in identity.items()):
        raise ValueError(f"{path} is of a run with other settings: {report['settings']} {report['server_flags']}")
    return msgspec.convert(report["tally"], Tally)


def main() -> int:
    """Start the daemon, measure, print and save; return 1 if a stream was cut."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="of the run; 120 without --kills")
    parser.add_argument("--kills", type=int, default=0, help="end after so many")
    parser.add_argument("--every", type=float, default=5.0, help="seconds that each engine serves")
    parser.add_argument("--tokens", type=int, default=60, help="of the longest answers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="add to the file of --json")
    args, flags = parser.parse_known_args()
    if args.resume and args.json is None:
        parser.error("--resume needs --json")
    if args.seconds is None:
        args.seconds = float("inf") if args.kills else 120.0
    settings = {"streams": args.streams, "every_s": args.every, "tokens": args.tokens}
    identity: dict[str, object] = {"server_flags": flags, "settings": settings}
    total = earlier_tally(args.json, identity) if args.resume else Tally()
    most = args.kills - len(total.without_an_engine_s) if args.kills else float("inf")
    if most > 0:
        total = added(total, run(args, flags, most=most))
    machine = {
        "cpus": os.cpu_count(),
        "load_average": median(total.loads or os.getloadavg()[:1]),  # at the kills: others may use the cores
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    outcome = figures(total)
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine} | identity
    report["figures"] = outcome
    print(json.dumps(report, indent=1))
    if args.json is not None:
        report["tally"] = msgspec.to_builtins(total)
        text = re.sub(r"(?<=\d,)\n +(?=\d)", " ", json.dumps(report, indent=1))  # a list of numbers is one line
        args.json.write_text(text + "\n")
    return int(bool(outcome["cut"]))


def run(args: argparse.Namespace, flags: list[str], *, most: float) -> Tally:
    """Start a daemon and measure it."""
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-format", "text"]
    command += ["--max-queue-wait", "0", *flags]  # else a request is refused that would wait long
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        server = subprocess.Popen(command, stderr=log)
        try:
            address = wait_started(server, Path(log.name))
            return asyncio.run(
                measure(server.pid, address, Path(log.name), args, most=most, has_standby="--standby" in flags)
            )
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    sys.exit(main())
