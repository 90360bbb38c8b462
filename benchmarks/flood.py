"""Measures on a device how one key's requests delay another key's first tokens: python -m benchmarks.flood.

[--shape NAME] [--rows 64] [--seconds 7] [--rounds 2] [--device cpu] [--json FILE]

As the fairness of benchmarks/overload.py, with a model of random weights in place of the simulation: the engine's loop
without HTTP, and a load in real time. A key sends requests of 512 tokens, two a second, alone and then after another
key has sent 500 at once, whose rate of tokens is counted: in each round once with launches as soon as the step before
begins, and once with launches shortly before it ends (engine/core/launch_delay.py). All floods have the same lengths.
"""

import argparse
import contextlib
import random
import sys
import time
from collections import deque
from statistics import median, quantiles

import msgspec

from benchmarks.offline import versions
from benchmarks.online import SHAPES
from benchmarks.report import Report, check_outputs, format_table, host_facts, now, write_report
from engine.core.local_client import LocalTransport
from engine.interface.config import EngineConfig
from engine.interface.metrics import Metrics
from engine.interface.protocol import (
    AddRequest,
    ClientGone,
    RequestFailed,
    SamplingParams,
    StepEvents,
    ToEngine,
    pack_token_ids,
)
from engine.interface.tenant import Charge, Tenant
from engine.startup.load import load_engine
from engine.startup.loaded_engine import LoadedEngine
from server.config.value_types import integer

_FLOOD, _PAUSE_S = 500, 0.5
_CLIENTS = {"guest": 1, "flood": 2}
_SETTLE_S = 1.0  # from the flood to the first request that counts


class TimedTransport(LocalTransport):
    """A transport whose requests arrive at their time."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: deque[AddRequest] = deque()  # by arrival_s

    def receive(self, timeout_s: float | None) -> list[tuple[int, ToEngine | ClientGone]]:
        """Return what has arrived; if nothing has, wait for the next request, at most timeout_s."""
        now_s = time.monotonic()
        if timeout_s and not self.inbox and self.coming and self.coming[0].arrival_s > now_s:
            time.sleep(min(timeout_s, self.coming[0].arrival_s - now_s))
        while self.coming and self.coming[0].arrival_s <= time.monotonic():
            message = self.coming.popleft()
            self.inbox.append((_CLIENTS[message.tenant.name], message))
        return super().receive(0 if self.coming else timeout_s)


class Flood:
    """One engine and its two keys."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self.transport = TimedTransport()
        self.engine = loaded.engine(self.transport, Metrics(), max_queued_requests=1_000_000)
        self._random, self._vocab_size, self._number = random.Random(1), loaded.model_config.vocab_size, 0

    def run(self, seconds: float, *, has_flood: bool, delays_launches: bool, seed: int) -> Report:
        """Measure one key's first tokens, and tokens of the other one, after which nothing runs. seed: of lengths."""
        assert self.engine.launch_delay is not None
        self.engine.launch_delay.is_on = delays_launches
        transport, rng = self.transport, random.Random(seed)
        sizes = [(rng.randint(32, 768), rng.randint(16, 240)) for _ in range(_FLOOD * has_flood)]
        requests = [self._request("flood", 0.0, *each) for each in sizes]
        begun_s = time.monotonic()
        transport.coming.extend(msgspec.structs.replace(request, arrival_s=begun_s) for request in requests)
        counted_s = begun_s + _SETTLE_S * has_flood
        at_s, end_s = counted_s, counted_s + seconds
        sent_s: dict[str, float] = {}
        while at_s < end_s - _PAUSE_S:
            request = self._request("guest", at_s + _PAUSE_S * rng.random(), 512, 32)
            transport.coming.append(request)
            sent_s[request.request_id] = request.arrival_s
            at_s += _PAUSE_S
        num_late, num_delayed = self.engine.launch_delay.num_late, self.engine.launch_delay.num_delayed
        ttfts_s, num_tokens = self._follow(sent_s, counted_s=counted_s, end_s=end_s)
        return {
            "delays_launches": delays_launches,
            "has_flood": has_flood,
            "ttft_p50_s": median(ttfts_s),
            "ttft_p95_s": quantiles(ttfts_s, n=20)[18],
            "num_requests": len(ttfts_s),
            "of_the_flood_tok_per_s": num_tokens / seconds,
            "num_launches_delayed": self.engine.launch_delay.num_delayed - num_delayed,
            "num_launches_too_late": self.engine.launch_delay.num_late - num_late,
        }

    def _follow(self, sent_s: dict[str, float], *, counted_s: float, end_s: float) -> tuple[list[float], int]:
        """Run until end_s, then end all. Returns times to first tokens, and the other key's tokens since counted_s."""
        ttfts_s, num_tokens = list[float](), 0
        while (now_s := time.monotonic()) < end_s:
            self.engine.run_once(0.001)
            while self.transport.outbox:
                message = self.transport.outbox.popleft()
                if isinstance(message, RequestFailed):
                    raise RuntimeError(message.message)
                if isinstance(message, StepEvents):
                    now_s = time.monotonic()
                    for started in message.started:
                        request_id = message.request_ids[started.row]
                        if request_id in sent_s:
                            ttfts_s.append(now_s - sent_s[request_id])
                    if now_s >= counted_s:
                        rows = zip(message.request_ids, message.num_tokens, strict=True)
                        num_tokens += sum(count for request_id, count in rows if request_id.startswith("flood"))
        self.transport.inbox.extend((client_id, ClientGone()) for client_id in _CLIENTS.values())
        while self.transport.inbox or not self.engine.is_idle:
            self.engine.run_once(0.001)
        self.transport.outbox.clear()
        return ttfts_s, num_tokens

    def _request(self, tenant: str, at_s: float, num_prompt: int, num_tokens: int) -> AddRequest:
        self._number += 1
        prompt = [self._random.randrange(100, self._vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0)
        return AddRequest(
            f"{tenant}-{self._number}",
            pack_token_ids(prompt),
            params,
            arrival_s=at_s,
            tenant=Tenant(name=tenant),
            charge=Charge(num_prompt, num_prompt + num_tokens),
        )


def measure(loaded: LoadedEngine, *, seconds: float, rounds: int) -> list[Report]:
    """Return all runs, in their order, after one that is not counted."""
    flood, runs = Flood(loaded), []
    flood.run(2.0, has_flood=True, delays_launches=True, seed=0)
    for number in range(1, rounds + 1):
        for has_flood, delays_launches in ((False, True), (True, False), (True, True)):
            length_s = seconds if has_flood else seconds / 2
            runs.append(flood.run(length_s, has_flood=has_flood, delays_launches=delays_launches, seed=number))
            print(runs[-1], file=sys.stderr, flush=True)
    return runs


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flood", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="sizes of the model (llama-3.1-8b)")
    parser.add_argument("--rows", type=integer(1, 1024), default=64, help="requests that run at once (64)")
    parser.add_argument("--seconds", type=float, default=7.0, help="of each flood (7)")
    parser.add_argument("--rounds", type=integer(1, 100), default=2, help="of both kinds of launches (2)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    check_outputs(json_path=args.json, plot_path=None, html_path=None)
    config = EngineConfig(
        model=str(SHAPES / args.shape),
        load_format="dummy",
        device=args.device,
        max_model_len=2048,
        max_num_seqs=args.rows,
        overlap_depth=2,
    )
    with contextlib.closing(load_engine(config, lambda stage: None)) as loaded:
        runs = measure(loaded, seconds=args.seconds, rounds=args.rounds)
        facts = loaded.facts
    table = [["launches", "beside the flood", "first token p50, p95, ms", "requests", "flood tok/s", "late of delayed"]]
    for run in runs:
        times = f"{1e3 * run['ttft_p50_s']:.1f}, {1e3 * run['ttft_p95_s']:.1f}"
        late = f"{run['num_launches_too_late']} of {run['num_launches_delayed']}"
        way = "delayed" if run["delays_launches"] else "at once"
        words = [way, "yes" if run["has_flood"] else "no", times, str(run["num_requests"])]
        table.append([*words, f"{run['of_the_flood_tok_per_s']:,.0f}", late])
    print(format_table(table))
    if args.json:
        report: Report = {"benchmark": "flood", "date": now(), "host": host_facts(), "versions": versions()}
        settings = {"model": args.shape, "rows": args.rows, "seconds": args.seconds}
        write_report(args.json, report | settings | {"facts": facts, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
