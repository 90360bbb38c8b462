"""One engine of a prefill and a decode engine, for a test: EngineConfig in JSON in argv[1].

Each line of its input is an AddRequest in JSON; it prints the tokens of each, in order, and last, at the end of its
input, what it has counted of blocks. Both as lines of JSON.
"""

import json
import queue
import sys
import threading

import msgspec

from engine.interface.config import EngineConfig
from engine.interface.protocol import AddRequest, StepEvents
from engine.offline import OfflineEngine


def main() -> None:
    offline = OfflineEngine.load(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    engine, transport = offline.engine, offline.transport
    offline.loaded.peers.attach(engine.scheduler, on_socket=lambda sock: None, off_socket=lambda sock: None)
    ranks = offline.loaded.ranks
    print(json.dumps([[] if ranks is None else ranks.pids]), flush=True)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    tokens: list[int] = []
    while True:
        engine.run_once(0.001)
        while transport.outbox:
            events = transport.outbox.popleft()
            if isinstance(events, StepEvents):
                tokens += events.token_ids
                if events.finished:
                    print(json.dumps(tokens), flush=True)
                    tokens = []
        while not lines.empty():
            line = lines.get()
            if not line:
                print(json.dumps(_counts(offline)), flush=True)
                offline.loaded.close()
                return
            transport.inbox.append((0, msgspec.json.decode(line, type=AddRequest)))


def _counts(offline: OfflineEngine) -> dict[str, object]:
    tiers = offline.engine.scheduler.kv.tiers
    offline.engine.scheduler.check()
    if tiers.arrivals is None:
        return {"offered": tiers.offers.num_offered, "open": tiers.offers.num_open, "lost": tiers.offers.num_lost}
    arrivals = tiers.arrivals
    return {**arrivals.num_blocks, **arrivals.num_by_result, "bytes": arrivals.num_bytes, "peers": arrivals.peers}


if __name__ == "__main__":
    main()
