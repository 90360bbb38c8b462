"""Kills of the engine of a server with --standby: seconds without service, and each stream's tokens, on a GPU.

    python -m benchmarks.standby_gpu --kills 3 --json out.json          a real shape, random weights
    python -m benchmarks.standby_gpu --shape demo --json out.json       the built-in model, with trained weights
Half of the streams are greedy, half are sampled with a seed. Twice all run at once undisturbed; then they run again and
again while the engine gets a SIGKILL. After each kill: the time until the next engine is ready, until the first stream
goes on, until all do, and until a request that is sent at the kill has its first token. A stream is cut if it ends
without its last event. Each one's tokens are compared with those of its first undisturbed run (replayed_tokens.py).
Then one greedy and one sampled stream run alone, undisturbed twice and with a kill. So every step has one row; but the
replay computes the earlier tokens in one step. A request with these tokens as its prompt does so as well, without a
kill. With --enforce-eager both have the same steps, so tokens and log-probabilities must be equal to the last bit. With
graphs they need not be: a step is padded to the smallest that is captured, and few are soon after a takeover.
Other flags are passed to `quire serve`. A run ends after --max-seconds at the latest, with the kills it had until then.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu_memory import gpu_names
from benchmarks.kills import Body, Streamed, ask, wait_started
from benchmarks.online import SHAPES, write_model_folder
from benchmarks.replayed_tokens import ASKED, TokenStream, compared, summary, typical_gap
from benchmarks.report import format_table, host_facts, now
from benchmarks.startup import engine_of

_READY_AGAIN = "engine ready again"
_STANDBY_WAITS = "standby waits"
_POLL_S = 0.005
_SETTLE_S = 1.0  # of streams before a kill
_IN_FLIGHT_S = 0.1  # after a kill: what was on its way came long before the next engine can be ready
_KINDS = ("greedy", "sampled")  # requests with an even and with an odd number
_DEMO = "demo"
_LOG_LINES = 60


class Killed(msgspec.Struct, kw_only=True):
    """One kill; seconds from it. None: it did not come within the time."""

    at_s: float  # by this process's clock; in a report from the first kill
    standby_loaded_s: float = 0.0  # from the readiness of the engine that is killed
    ready_s: float | None  # by the launcher's log
    first_stream_s: float | None
    last_stream_s: float | None
    new_request_s: float | None  # the first token of a request that was sent at the kill
    new_request_status: int  # of its reply; 0: none came, or none was sent
    open_streams: int


@dataclass(frozen=True)
class Server:
    """The server that is measured; end_s: when the measurement must be over."""

    launcher: int
    address: tuple[str, int]
    log: Path
    model: str
    num_tokens: int  # of each answer
    end_s: float

    async def ask(self, number: int, into: TokenStream | None = None, **others: Any) -> TokenStream:
        """Send the request of a number: greedy if it is even, sampled with it as the seed if it is odd."""
        sampling: Body = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        body = {"model": self.model, "prompt": f"{number} once", "max_tokens": self.num_tokens, **sampling, **ASKED}
        stream = TokenStream(str(number), time.monotonic()) if into is None else into
        await ask(self.address, str(number), "/v1/completions", {**body, **others}, into=stream)
        return stream

    async def ask_undisturbed(self, number: int, **others: Any) -> TokenStream:
        """Ask; raise RuntimeError if the stream is not whole."""
        stream = await self.ask(number, **others)
        if not stream.is_whole or len(stream.token_ids) != len(stream.logprobs):
            raise RuntimeError(f"undisturbed, a stream ended with {stream.status} {stream.error}")
        return stream


async def measure(server: Server, *, num_streams: int, num_kills: int) -> dict[str, object]:
    """Run streams and kill engines; return the kills and what became of the streams. Raises RuntimeError."""
    numbers = range(num_streams)
    standbys = _Standbys(server)
    watching = asyncio.create_task(standbys.watch())
    once, twice = [
        await asyncio.gather(*(server.ask_undisturbed(number) for number in numbers)) for _ in range(2)
    ]  # one run after the other
    streams: list[TokenStream] = []
    is_over = asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not is_over.is_set():
            streams.append(TokenStream(str(number), time.monotonic()))
            await server.ask(number, into=streams[-1])

    clients = [asyncio.create_task(keep_asking(number)) for number in numbers]
    kills: list[Killed] = []
    try:
        while len(kills) < num_kills and (loaded_s := await standbys.wait(kills)) is not None:
            await asyncio.sleep(_SETTLE_S)
            kills.append(await _kill(server, streams))
            kills[-1].standby_loaded_s = loaded_s
    finally:
        is_over.set()
        _, pending = await asyncio.wait(clients, timeout=max(server.end_s - time.monotonic(), 5.0))
        for task in pending:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    alone = {
        name: await _alone(server, number, kills, standbys)
        for number, name in enumerate(_KINDS)
        if time.monotonic() < server.end_s
    }
    watching.cancel()
    ended = [each for each in streams if each.is_whole or each.error]
    return {
        "kills": [{**msgspec.to_builtins(kill), "at_s": round(kill.at_s - kills[0].at_s, 3)} for kill in kills],
        "streams": len(streams),
        "streams_that_ended": len(ended),
        "cut": sum(not each.is_whole for each in ended),
        "errors": sorted({each.error for each in ended if each.error}),
        "gap_of_two_most_likely_p50": typical_gap(once),
        "at_once": at_once(once, twice, [each for each in ended if each.is_whole], kills),
        "alone": alone,
    }


def at_once(
    once: Sequence[TokenStream], twice: Sequence[TokenStream], streams: Sequence[TokenStream], kills: Sequence[Killed]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compare streams with the first undisturbed run: the second one, and those with and without a replay."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for parity, name in enumerate(_KINDS):
        mine = [each for each in streams if int(each.kind) % 2 == parity]
        found[name] = {
            "undisturbed_again": summary([compared(twice[i], once[i]) for i in range(parity, len(once), 2)]),
            "not_replayed": summary([compared(each, once[int(each.kind)]) for each in mine if not each.num_replays]),
            "replayed": summary(
                [
                    compared(each, once[int(each.kind)], begin=replayed_from(each, kills))
                    for each in mine
                    if each.num_replays
                ]
            ),
        }
    return found


def replayed_from(stream: TokenStream, kills: Sequence[Killed]) -> int:
    """Return the number of tokens that a stream had when its last replay began."""
    last_s = max((each.at_s for each in kills if stream.begun_s < each.at_s <= stream.arrivals_s[-1]), default=0.0)
    return stream.num_tokens_at(last_s + _IN_FLIGHT_S)


async def _alone(server: Server, number: int, kills: list[Killed], standbys: "_Standbys") -> dict[str, object]:
    """Kill the engine under one stream; compare its tokens with undisturbed ones and with those of the long prompt."""
    once, twice = [await server.ask_undisturbed(number) for _ in range(2)]
    found: dict[str, object] = {"undisturbed_again": summary([compared(twice, once)])}
    loaded_s = await standbys.wait(kills)
    if loaded_s is None:
        return found
    stream = TokenStream(str(number), time.monotonic())
    asking = asyncio.create_task(server.ask(number, into=stream))
    while not asking.done() and len(stream.token_ids) < server.num_tokens // 4:
        await asyncio.sleep(_POLL_S)
    kills.append(await _kill(server, [stream], sends_request=False))
    kills[-1].standby_loaded_s = loaded_s
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asking, max(server.end_s - time.monotonic(), 5.0))
    found |= {"cut": int(not stream.is_whole), "replays": stream.num_replays}
    if not (stream.is_whole and stream.num_replays):
        return found
    begin = replayed_from(stream, kills[-1:])
    prompt = [*stream.prompt_ids, *stream.token_ids[:begin]]
    salt = f"nothing cached {number}"
    long = await server.ask_undisturbed(number, prompt=prompt, max_tokens=server.num_tokens - begin, cache_salt=salt)
    found |= {"replayed_from": begin, "replayed": summary([compared(stream, once, begin=begin)])}
    return found | {"as_a_prompt": summary([compared(long, stream, ahead=begin)])}


class _Standbys:
    """When each standby was loaded, by the launcher's log, and which kill waits for which."""

    def __init__(self, server: Server) -> None:
        self._server, self._begun_s = server, time.monotonic()
        self._loaded_s: list[float] = []

    async def watch(self) -> None:
        """Note every standby, until the server's end_s."""
        log, end_s = self._server.log, self._server.end_s
        while (told_s := await _told(log, _STANDBY_WAITS, len(self._loaded_s), end_s)) is not None:
            self._loaded_s.append(told_s)

    async def wait(self, kills: Sequence[Killed]) -> float | None:
        """Wait for the standby after these kills; return its seconds from the engine's readiness, or None: too late."""
        ready_s: float | None = self._begun_s
        if kills:
            ready_s = None if kills[-1].ready_s is None else kills[-1].at_s + kills[-1].ready_s
        while len(self._loaded_s) <= len(kills) and time.monotonic() < self._server.end_s:
            await asyncio.sleep(_POLL_S)
        if ready_s is None or len(self._loaded_s) <= len(kills) or time.monotonic() > self._server.end_s:
            return None
        return round(self._loaded_s[len(kills)] - ready_s, 3)


async def _kill(server: Server, streams: Sequence[Streamed], *, sends_request: bool = True) -> Killed:
    """Kill the engine and await what follows, until the server's end_s at the latest."""
    end_s = server.end_s
    num_before = await asyncio.to_thread(_count, server.log, _READY_AGAIN)
    is_open = [each for each in streams if not (each.is_whole or each.error) and each.arrivals_s]
    os.kill(engine_of(server.launcher), signal.SIGKILL)
    killed_s = time.monotonic()
    fresh = TokenStream("fresh", killed_s)
    asking = asyncio.create_task(server.ask(0, into=fresh, max_tokens=32)) if sends_request else None
    ready_s = await _told(server.log, _READY_AGAIN, num_before, end_s)
    going_on: list[float] = []
    while ready_s is not None and len(going_on) < len(is_open) and time.monotonic() < end_s:
        await asyncio.sleep(_POLL_S)
        going_on = [later for each in is_open if (later := _after(each, killed_s + _IN_FLIGHT_S)) is not None]
        if all(each.is_whole or each.error or _after(each, killed_s + _IN_FLIGHT_S) for each in is_open):
            break
    if asking is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asking, max(end_s - time.monotonic(), 1.0))
    firsts = sorted(at_s - killed_s for at_s in going_on)
    return Killed(
        at_s=killed_s,
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
    """Start the server, measure, print tables and save; return 1 if a stream was cut or something is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standby_gpu", description=__doc__)
    shapes = sorted(path.name for path in SHAPES.iterdir())
    parser.add_argument("--shape", default="llama-3.1-8b", choices=[*shapes, _DEMO])
    parser.add_argument("--kills", type=int, default=3, help="under all streams; two more under one alone")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--max-seconds", type=float, default=90.0, help="of the run, after the first start")
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    if args.streams < 2:
        parser.error(f"--streams {args.streams} must be at least 2: one greedy, one sampled")
    report: dict[str, object] = {"date": now(), "host": host_facts(), "gpus": gpu_names(), "shape": args.shape}
    report |= {"server_flags": flags, "settings": {"streams": args.streams, "tokens": args.tokens}}
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        model: list[str] = []
        if args.shape != _DEMO:
            write_model_folder(SHAPES / args.shape / "config.json", Path(folder))
            model = [folder, "--load-format", "dummy"]
        command = [sys.executable, "-m", "server", "serve", *model, "--port", "0", "--served-model-name", "shape"]
        command += ["--standby", "--max-queue-wait", "0", "--log-format", "text"]
        started_s = time.monotonic()
        process = subprocess.Popen([*command, *flags], stderr=log)
        try:
            address = wait_started(process, Path(log.name))
            report["start_s"] = round(time.monotonic() - started_s, 2)
            end_s = time.monotonic() + args.max_seconds
            server = Server(process.pid, address, Path(log.name), "shape", args.tokens, end_s)
            outcome = asyncio.run(measure(server, num_streams=args.streams, num_kills=args.kills))
        except BaseException:
            print("\n".join(Path(log.name).read_text().splitlines()[-_LOG_LINES:]), flush=True)
            raise
        finally:
            process.terminate()
            process.wait(60)
        text = Path(log.name).read_text()
    report |= outcome
    report["log"] = [line for line in text.splitlines() if "engine" in line and " DEBUG " not in line][-_LOG_LINES:]
    if args.json is not None:
        args.json.write_text(re.sub(r"(?<=\d,)\n +(?=\d)", " ", json.dumps(report, indent=1)) + "\n")
    kills, alone = outcome["kills"], outcome["alone"]
    assert isinstance(kills, list)
    assert isinstance(alone, dict)
    _print_tables(kills, {"at once": outcome["at_once"], "alone": alone})
    print(f"start {report['start_s']} s, streams {outcome['streams']}, cut {outcome['cut']}")
    cut = [outcome["cut"], *(kind.get("cut") for kind in alone.values())]
    is_whole = len(kills) == args.kills + len(_KINDS) and all("as_a_prompt" in kind for kind in alone.values())
    if not is_whole:
        print(f"after {args.max_seconds:g} s there were {len(kills)} kills; alone: {alone}")
    return int(any(cut) or not is_whole)


def _print_tables(kills: list[dict[str, object]], texts: dict[str, Any]) -> None:
    names = [name for name in Killed.__struct_fields__ if name != "at_s"]
    print(format_table([names, *([str(kill[name]) for name in names] for kill in kills)]))
    columns = ["streams", "differed_before", "equal", "tokens", "tokens_for_a_difference", "share_of_logprobs_equal"]
    rows = [["tokens beside the first undisturbed run", *columns, "logprob_distance p50, max", "first differing"]]
    for place, kinds in texts.items():
        for kind, groups in kinds.items():
            for group, figures in groups.items():
                if isinstance(figures, dict):
                    cells = [str(figures[name]) for name in columns]
                    distance = figures["logprob_distance"]
                    cells.append(f"{distance.get('p50')}, {distance.get('max')}")
                    cells.append(str(figures["first_differing_positions"][:6]))
                    rows.append([f"{place}, {kind}, {group}", *cells])
    print(format_table(rows))


if __name__ == "__main__":
    sys.exit(main())
