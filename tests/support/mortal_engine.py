"""MortalEngine: the demo model in a thread, whose engine ends after given steps and is followed by the next one.

An end closes the sockets between two steps, one of which is still in flight, as a kill would. The next engine is a new
one over the same weights: its queue, its cache and its matchers are empty.
"""

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from engine.interface.config import EngineConfig
from engine.interface.metrics import Metrics
from engine.interface.protocol import EngineReady
from engine.interface.transport import SocketTransport
from engine.offline import OfflineEngine
from engine.startup.loaded_engine import LoadedEngine
from server.config.model_source import DEMO_FOLDER


class MortalEngine:
    """A loaded model, which serves on a unix socket inside of `lives()`."""

    def __init__(self, **changes: object) -> None:
        settings = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 32} | changes
        self._loaded = OfflineEngine.load(EngineConfig(model=str(DEMO_FOLDER), **settings)).loaded
        self.num_ends = 0
        self.metrics = Metrics()

    @property
    def ready(self) -> EngineReady:
        """What its engines greet with."""
        sizes, model = self._loaded.scheduler_config, self._loaded.model_config
        return EngineReady(
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            num_blocks=sizes.num_pages,
            block_size=sizes.block_size,
            vocab_size=model.vocab_size,
            max_queued_requests=100,
            hidden_size=model.hidden_size,
            max_queued_tokens=100_000,
        )

    @contextmanager
    def lives(self, path: str, steps: Sequence[int] = (), *, is_caching: bool = False) -> Iterator[None]:
        """Serve: the first engine ends after steps[0] committed steps, the next after steps[1] …, the last lives on."""
        sizes = msgspec.structs.replace(self._loaded.scheduler_config, enable_prefix_caching=is_caching)
        loaded = dataclasses.replace(self._loaded, scheduler_config=sizes)
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(loaded, path, steps, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, loaded: LoadedEngine, path: str, steps: Sequence[int], stop: threading.Event) -> None:
        self.num_ends = 0
        for num_steps in (*steps, None):
            transport = SocketTransport(path, self.ready)
            engine = loaded.engine(transport, self.metrics)
            while not stop.is_set() and (num_steps is None or engine.scheduler.committed_step_id + 1 < num_steps):
                engine.run_once(0.02)
            if engine._in_flight is not None:
                engine._in_flight.wait()  # on a device that is shared with the next engine
            transport.close()
            if stop.is_set():
                return
            self.num_ends += 1

    def close(self) -> None:
        """Release the model."""
        self._loaded.close()
