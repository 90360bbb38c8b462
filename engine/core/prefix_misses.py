"""PrefixMisses: the reason why the prefix cache had no more of a prompt. Plain Python; never torch.

Asked once for each request, at its first admission. Places are told by block, never by token: by tokens, a client could
guess the prompt of another, one token after the other.
What a request is told of other salts and adapters is no more than its client could find out by another request: that
the prompt's first block is cached without a salt (of the same API key), or with the same salt for another adapter. It
is never told that a prompt is cached under somebody's salt.
What must be remembered is bounded: keys of blocks that were overwritten (RecentKeys), one continuation of each block,
and the newest adapters.
"""

from engine.core.cache_layout import CacheLayout, GroupLayout
from engine.core.page_pool import PagePool
from engine.core.prefix_hits import Hit
from engine.core.request import Request, link_hash, root_hash
from engine.interface.kv_snapshot import CacheReason, LayerKind
from engine.interface.protocol import CacheReport

_NUM_CONTINUATIONS = 1 << 15
_NUM_ADAPTERS = 8


class PrefixMisses:
    """Explains hits; owns what it needs to remember for that. O(1) per block."""

    def __init__(self, layout: CacheLayout, pool: PagePool) -> None:
        self._layout = layout
        self._pool = pool
        self._newer: dict[bytes, bytes] = {}  # by hash of a prefix: the key of the last block published behind it
        self._older: dict[bytes, bytes] = {}
        self._adapters: dict[bytes, None] = {}  # of admitted requests, the newest last; b"": none

    def note_published(self, request: Request, columns: range) -> None:
        """Remember what follows upon prefixes: blocks of the first full group in these columns have been published."""
        links, hashes = self._layout.full[0].links, request.block_hashes
        if len(self._newer) >= _NUM_CONTINUATIONS:
            self._newer, self._older = {}, self._newer
        ends = hashes[(columns.start + 1) * links - 1 : columns.stop * links : links]
        first = hashes[columns.start * links - 1] if columns.start else self._root(request)
        self._newer.update(zip([first, *ends[:-1]], ends, strict=True))

    def parting_point(self, request: Request, hit: Hit) -> int:
        """Return where others have gone on behind all that a hit takes; 0: they have not.

        The full groups know a longer prefix there than the hit. With states it must have been continued, too: a turn
        that follows upon an answer parts from nobody, and its own states serve the next turn better.
        """
        if hit.num_full_tokens <= hit.num_tokens:
            return 0
        before = request.block_hashes[hit.num_matched_tokens // self._layout.unit - 1]
        return hit.num_full_tokens if not self._layout.states or self._following(before) is not None else 0

    def explain(self, request: Request, found: Hit, *, is_taken: bool) -> CacheReport:
        """Return the report of an admission. is_taken: the hit was used, since there was room for both."""
        reason, kind = self._reason(request, found)
        if not is_taken and found.num_tokens:
            reason, kind = "no_room", "state"
        self._adapters.pop(request.adapter, None)
        self._adapters[request.adapter] = None
        if len(self._adapters) > _NUM_ADAPTERS:
            del self._adapters[next(iter(self._adapters))]
        return CacheReport(reason, found.num_tokens if is_taken else 0, found.num_matched_tokens, kind)

    def _reason(self, request: Request, found: Hit) -> tuple[CacheReason, LayerKind | None]:
        layout = self._layout
        most = request.num_cacheable_tokens // layout.step * layout.step
        if not most:
            return ("too_short" if request.num_tokens <= layout.step else "computed_whole"), None
        if found.num_tokens == most:
            return "all", None
        if found.num_tokens == found.num_full_tokens and layout.full:
            return self._reason_of_full(request, found.num_matched_tokens), "full"
        kind = max(found.limits, key=lambda limit: limit[1])[0]
        if kind == "window":
            return "window_left", kind
        return ("evicted" if self._was_saved(request, found) else "no_checkpoint"), kind

    def _reason_of_full(self, request: Request, num_matched: int) -> CacheReason:
        """Return why the full groups have no block behind the first num_matched tokens."""
        if any(self._was_evicted(request, group, num_matched) for group in self._layout.full):
            return "evicted"
        if not num_matched:
            if request.cache_salt != request.open_salt and self._is_cached(request, request.open_salt, request.adapter):
                return "other_salt"
            others = [adapter for adapter in (b"", *self._adapters) if adapter != request.adapter]
            if any(self._is_cached(request, request.cache_salt, adapter) for adapter in others):
                return "other_adapter"
        unit = self._layout.unit
        before = request.block_hashes[num_matched // unit - 1] if num_matched else self._root(request)
        following = self._following(before)
        is_known = following is not None and self._pool.find(self._layout.full[0].index, following) is not None
        return "differs" if is_known else "new"

    def _following(self, before: bytes) -> bytes | None:
        return self._newer.get(before) or self._older.get(before)

    def _root(self, request: Request) -> bytes:
        return root_hash(request.cache_salt, request.adapter)

    def _was_evicted(self, request: Request, group: GroupLayout, num_matched: int) -> bool:
        """Return whether the group's block behind the matched tokens was overwritten, not long ago."""
        link = (num_matched // group.tokens + 1) * group.links - 1
        hashes = request.block_hashes
        return (
            link < len(hashes)
            and self._pool.find(group.index, hashes[link]) is None
            and hashes[link] in self._pool.evicted[group.index]
        )

    def _was_saved(self, request: Request, found: Hit) -> bool:
        """Return whether a state between the hit and what the full groups have was overwritten, not long ago."""
        step, unit, hashes = self._layout.step, self._layout.unit, request.block_hashes
        longest = found.num_tokens + sum(lack for _, lack in found.limits)
        places = range(longest, found.num_tokens, -step)
        return any(
            hashes[place // unit - 1] in self._pool.evicted[group.index]
            for group in self._layout.states
            for place in places
        )

    def _is_cached(self, request: Request, salt: str, adapter: bytes) -> bool:
        """Return whether the prompt's first block is cached under this salt and adapter."""
        group, unit = self._layout.full[0], self._layout.unit
        key = root_hash(salt, adapter)
        for start in range(0, group.tokens, unit):
            key = link_hash(key, request.token_ids(start, start + unit))
        return self._pool.find(group.index, key) is not None
