"""One engine of a prefill and a decode engine, for a test: EngineConfig in JSON in argv[1].

Each line of its input is an AddRequest in JSON; it prints the tokens of each, in order, and last, at the end of its
input, what it has counted of blocks. Both as lines of JSON behind MARK.
"""

import json
import queue
import sys
import threading

import msgspec

from engine.interface.config import EngineConfig
from engine.interface.protocol import AddRequest, StepEvents
from engine.offline import OfflineEngine

MARK = "test: "


def main() -> None:
    offline = OfflineEngine.load(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    engine, transport = offline.engine, offline.transport
    offline.loaded.peers.attach(engine.scheduler, on_socket=lambda sock: None, off_socket=lambda sock: None)
    arrivals, links = engine.scheduler.kv.tiers.arrivals, offline.loaded.peers._links
    while arrivals is not None and not (arrivals.peers or links.refusals):
        engine.run_once(0.01)
    ranks = offline.loaded.ranks
    _tell([[] if ranks is None else ranks.pids])
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
                    _tell(tokens)
                    tokens = []
        while not lines.empty():
            line = lines.get()
            if not line:
                _tell(_counts(offline))
                offline.loaded.close()
                return
            transport.inbox.append((0, msgspec.json.decode(line, type=AddRequest)))


def _tell(what: object) -> None:
    print(MARK + json.dumps(what), flush=True)


def _counts(offline: OfflineEngine) -> dict[str, object]:
    tiers = offline.engine.scheduler.kv.tiers
    offline.engine.scheduler.check()
    if tiers.arrivals is None:
        return {"offered": tiers.offers.num_offered, "open": tiers.offers.num_open, "lost": tiers.offers.num_lost}
    arrivals = tiers.arrivals
    return {**arrivals.num_blocks, **arrivals.num_by_result, "bytes": arrivals.num_bytes, "peers": arrivals.peers}


if __name__ == "__main__":
    main()
