"""KvSnapshot: what an engine tells of its KV pool to those that watch it: the page /kv and `quire top`. Never torch.

The engine makes it (engine/core/kv_snapshot.py) when it is asked (AskKv of engine/interface/protocol.py). Imports
msgspec alone.
"""

from typing import Literal, get_args

import msgspec

# Where the search for a prompt's cached prefix ended, and why (docs/reference/api.md, "The prefix cache")
CacheReason = Literal[
    "all", "new", "differs", "evicted", "no_checkpoint", "window_left", "other_salt", "other_adapter", "too_short",
    "computed_whole", "no_room", "off",
]  # fmt: skip
LayerKind = Literal["full", "window", "state"]
CACHE_REASONS: tuple[CacheReason, ...] = get_args(CacheReason)


class KvRequest(msgspec.Struct, array_like=True):
    """One request of a KvSnapshot. state: "gate" (its grammar compiles) | "waiting" | "running" | "retiring"."""

    request_id: str
    state: str
    num_runs: int  # its share of KvSnapshot.runs: the next num_runs
    num_blocks: int
    num_shared_blocks: int  # blocks that other requests also hold
    num_computed_tokens: int  # tokens with launched keys and values
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int  # prompt tokens found in the prefix cache at first admission
    age_s: float
    num_preemptions: int
    num_group_runs: list[int] = []  # of num_runs, those of each group of layers
    num_state_blocks: int = 0  # of num_blocks, those of its live states
    restored_tokens: int = 0  # tokens before the saved state that it began with; 0: it began with none
    saved_tokens: list[int] = []  # tokens before each state that it saved and that can still be found
    cache_reason: CacheReason | None = None  # why no more of its prompt was cached; None: not admitted yet
    num_host_blocks: int = 0  # that are being copied to the pool from host memory, before its admission
    num_disk_blocks: int = 0  # that are being read from disk into host memory, before these copies


class KvKind(msgspec.Struct, array_like=True):
    """The blocks of one kind of layer: "full" | "window" | "state"."""

    kind: str
    num_used: int
    num_cached: int  # free, but still in the prefix cache


class KvGroup(msgspec.Struct, array_like=True):
    """One group of layers whose caches live alike."""

    kind: LayerKind
    num_tokens: int  # of a cache block; of states: of where they may be saved
    num_pages: int  # of a cache block, each a block of the snapshot


class KvStates(msgspec.Struct, array_like=True):
    """States of recurrent layers: those of requests, those that can be found; the last four since the engine's start.

    A request has one of each group of such layers.
    """

    num_live: int
    num_saved: int
    num_live_blocks: int
    num_saved_blocks: int
    num_made: int
    num_skipped: int  # not saved for want of memory
    num_restored: int
    num_evicted: int


class KvTier(msgspec.Struct, array_like=True):
    """A tier behind the pool. Its blocks are those of groups of layers, of one page or more."""

    name: Literal["host", "disk"]
    num_blocks: int  # that can be found
    num_bytes: int  # that are not free
    max_bytes: int
    num_incoming: int  # blocks in flight to this tier, or queued
    num_outgoing: int  # blocks in flight from this tier, or queued
    num_waiting: int  # requests that wait for its blocks
    num_hit_tokens: int  # this and the next two: since the engine's start
    num_evictions: int
    num_errors: int
    is_paused: bool  # it is left alone after errors in a row


class KvSnapshot(msgspec.Struct, tag=True):
    """The state of the KV pool between two loop iterations. It contains no token ids and no text.

    Blocks are pages here: those of a request are the tables of its groups of layers, one after another.

    runs, cached_runs: blocks as pairs of native 32-bit integers: first block and count; with a negative count the block
    numbers descend. runs has the block tables of `requests`, in order; cached_runs the free blocks that are still in
    the prefix cache. Blocks are numbered from 1 to num_blocks.
    """

    step_id: int  # of the last committed step
    now_s: float  # time.monotonic()
    cost_s: float  # time to create this snapshot
    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int
    num_used: int
    num_shared: int  # used blocks with at least two holders
    num_cached: int  # free blocks that are still in the prefix cache
    requests: list[KvRequest]  # all that hold blocks; the pending and the queued ones up to a limit
    num_unlisted: int  # pending and queued requests beyond this limit
    runs: bytes
    cached_runs: bytes
    num_queried_tokens: int  # this and the next three: since the engine's start
    num_hit_tokens: int
    num_evictions: int
    num_preemptions: int
    kinds: list[KvKind] = []
    groups: list[KvGroup] = []  # in the order of a request's tables
    states: KvStates | None = None  # None: the model has none
    tiers: list[KvTier] = []  # behind the pool, the fastest first
