"""Serves conversations with a disk behind host memory until it is killed, for a test: config JSON in argv[1].

Prints, as lines of JSON, each answer of the prompts in argv[2], then those of random prompts. With argv[3] "settle" it
first waits until every block is on disk.
"""

import json
import random
import sys
import time

import msgspec

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def main() -> None:
    offline = OfflineEngine.load(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    tiers = offline.engine.scheduler.kv.tiers
    offline.loaded.disk.attach(offline.engine.scheduler)
    threads = offline.loaded.disk._threads
    while not threads.is_ready:
        time.sleep(0.001)
    prompts = json.loads(sys.argv[2])
    for prompt in prompts:
        (result,) = offline.generate([prompt], [GREEDY])
        if sys.argv[3] == "settle":
            while threads.num_queued_bytes or not offline.engine.is_idle:
                offline.engine.run_once(0)
        print(json.dumps([result.token_ids, result.num_cached_tokens, tiers.disk.num_read]), flush=True)
    while True:
        prompt = [random.randrange(60) for _ in range(100)]
        offline.generate([prompt], [GREEDY])


if __name__ == "__main__":
    main()
