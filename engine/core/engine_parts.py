"""EngineParts: the collaborators and the limits of an Engine (engine/core/engine.py). Plain Python; never torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.grammars import Grammars
from engine.core.outputs import Transport
from engine.core.scheduler import Scheduler
from engine.core.spare_work import SpareWork
from engine.core.speculative import Drafter
from engine.core.step import Executor
from engine.interface.metrics import Metrics
from engine.interface.protocol import SamplingParams


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The collaborators and the limits of an Engine."""

    executor: Executor
    scheduler: Scheduler
    transport: Transport
    metrics: Metrics
    clock: Callable[[], float]  # seconds
    vocab_size: int
    overlap_depth: int = 2  # steps in flight: 2 overlaps host and device, 1 does not
    max_queued_requests: int = 2048  # requests
    max_queued_tokens: int | None = None  # None: any number
    max_queue_wait_s: float | None = None  # predicted time to the first token at which new requests are refused
    # the executor raises it if the device has too little memory for a step
    memory_error: type[Exception] = MemoryError
    # called after a memory_error: waits for all launched steps, then frees unused memory
    release_memory: Callable[[], None] = lambda: None
    grammars: Grammars | None = None  # None: requests with a grammar fail
    can_generate: bool = True  # False: only requests for embeddings are accepted
    num_loras: int = 0  # adapters of the executor
    adapter_digests: Sequence[bytes] = ()  # of their files, in order; (): prefixes are not known by other processes
    # called for each generating request without grammar and token filter; None: no speculation
    make_drafter: Callable[[SamplingParams], Drafter | None] | None = None
    bytes_per_block: int = 0  # size of a page on each rank, for KV snapshots and metrics
    num_ranks: int = 1
    spare_work: SpareWork | None = None  # what this engine does besides, until nothing of it is left
