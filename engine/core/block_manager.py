"""BlockManager: allocates the blocks of the KV pool to requests and keeps the prefix cache.

Plain Python; imports request only. Block 0 belongs to padding rows and is never allocated. A block's life:
free → in one block table (refcount 1) → full and computed: published under the hash of all tokens up to its end →
shared with other tables (refcount 2, 3, …) → free but still published, reused in least-recently-used order → allocated
again and no longer published. Blocks are published at commit only, so the keys and values of a hit always exist.
The blocks of a request whose output is not finite are tainted: no longer published, and dirty once they are free.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256

from engine.core.request import Request


class BlockManager:
    """Ref-counted blocks with a prefix cache. Every operation is O(1) per block; no order depends on a hash."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # in order of reuse
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._tainted: set[int] = set()  # held blocks with values that are not finite, perhaps
        self.dirty: list[int] = []  # free blocks to clean in the next step: those that were tainted
        self.num_evictions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_free(self) -> int:
        """Blocks held by no table, published ones included."""
        return len(self._free)

    @property
    def num_usable_tokens(self) -> int:
        """The capacity of all blocks, in tokens."""
        return self.num_usable * self.block_size

    @property
    def num_used(self) -> int:
        """Blocks held by tables."""
        return self.num_usable - len(self._free)

    @property
    def ref_counts(self) -> Sequence[int]:
        """The number of tables that hold each block, by block id."""
        return self._ref_counts

    @property
    def published(self) -> Collection[int]:
        """The blocks in the prefix cache, held or free."""
        return self._published.values()

    def admit(self, request: Request, *, num_reserved: int = 0) -> bool:
        """Allocate blocks for all tokens of a waiting request, cached ones first; set num_computed_tokens to the hit.

        The last token is never taken from the cache: it must be computed to sample the next one. Returns False and
        changes nothing if fewer than `num_reserved` blocks would remain free.
        """
        if len(self._free) <= num_reserved:
            return False
        hits = self._find(request)
        num_new = -(-request.num_tokens // self.block_size) - len(hits)
        num_revived = sum(not self._ref_counts[block_id] for block_id in hits)
        if num_new + num_revived + num_reserved > len(self._free):
            return False
        for block_id in hits:
            if not self._ref_counts[block_id]:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
        request.block_ids = hits + [self._take() for _ in range(num_new)]
        request.num_published_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size
        if self.enable_prefix_caching and not request.num_preemptions:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += request.num_computed_tokens
        return True

    def grow(self, request: Request) -> int:
        """Append one block to the request's table and return it. The caller has checked that one is free."""
        block_id = self._take()
        request.block_ids.append(block_id)
        return block_id

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Add the full blocks among the first `num_computed_tokens` to the prefix cache; their step is committed."""
        num_full = num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or num_full <= request.num_published_blocks:
            return
        self._hash(request, num_full)
        for index in range(request.num_published_blocks, num_full):
            block_hash, block_id = request.block_hashes[index], request.block_ids[index]
            if block_hash not in self._published:  # else another request computed it, too; that block stays
                self._published[block_hash] = block_id
                self._hash_of[block_id] = block_hash
        request.num_published_blocks = num_full

    def free(self, request: Request) -> None:
        """Free the request's blocks. Its last blocks are reused first, unpublished blocks before all published ones."""
        for block_id in reversed(request.block_ids):
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                if block_id in self._tainted:
                    self._tainted.remove(block_id)
                    self.dirty.append(block_id)
                self._free[block_id] = None
                if self._hash_of[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
        request.block_ids = []
        request.num_published_blocks = request.num_computed_tokens = 0

    def taint(self, requests: list[Request]) -> None:
        """Take the requests' blocks out of the prefix cache, the hits too; once free, they are dirty."""
        for block_id in (block_id for request in requests for block_id in request.block_ids):
            self._tainted.add(block_id)
            self._unpublish(block_id)

    def num_held_alone(self, request: Request) -> int:
        """Return the number of blocks that become free when this request's blocks are freed."""
        return sum(self._ref_counts[block_id] == 1 for block_id in request.block_ids)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert invariant 1 (docs/explanation/architecture.md) against the tables of all requests that hold blocks."""
        held = Counter(block_id for request in requests for block_id in request.block_ids)
        assert 0 not in held
        assert self._ref_counts == [held[block_id] for block_id in range(len(self._ref_counts))]
        assert sorted(self._free) == [b for b, count in enumerate(self._ref_counts) if b and not count]
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert request.num_published_blocks * self.block_size <= request.num_computed_tokens
            for index, block_id in enumerate(request.block_ids):
                if held[block_id] > 1 and block_id not in self._tainted:
                    assert index < request.num_published_blocks
                    assert self._hash_of[block_id] == request.block_hashes[index]
        for block_hash, block_id in self._published.items():
            assert self._hash_of[block_id] == block_hash
        assert not any(self._hash_of[block_id] for block_id in self._tainted.union(self.dirty))
        assert len(self._published) == sum(block_hash is not None for block_hash in self._hash_of)

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._ref_counts[block_id] = 1
        self.num_evictions += self._unpublish(block_id)
        return block_id

    def _unpublish(self, block_id: int) -> bool:
        """Remove a block from the prefix cache; return whether it was there."""
        block_hash, self._hash_of[block_id] = self._hash_of[block_id], None
        if block_hash is not None:
            del self._published[block_hash]
        return block_hash is not None

    def _find(self, request: Request) -> list[int]:
        """Return the blocks of the longest published prefix of the request's cacheable tokens."""
        hits: list[int] = []
        if self.enable_prefix_caching:
            num_full = request.num_cacheable_tokens // self.block_size
            self._hash(request, num_full)
            for index in range(num_full):
                block_id = self._published.get(request.block_hashes[index])
                if block_id is None:
                    break
                hits.append(block_id)
        return hits

    def _hash(self, request: Request, num_full: int) -> None:
        """Extend the request's hash chain. A hash covers its parent: equal hashes mean equal prefix, salt, adapter."""
        hashes, block_size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else _root(request)
        for start in range(len(hashes) * block_size, num_full * block_size, block_size):
            parent = sha256(parent + array("I", request.token_ids(start, start + block_size)).tobytes()).digest()
            hashes.append(parent)


def _root(request: Request) -> bytes:
    """Return the parent of a request's first hash, of its salt and of its adapter, on which keys and values depend."""
    salt = sha256(request.cache_salt.encode()).digest()
    return sha256(f"adapter {request.lora_index}: ".encode() + salt).digest() if request.lora_index else salt
