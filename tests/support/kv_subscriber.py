"""What a router knows of a prefix cache: the blocks by tier, rebuilt from events alone, recorded or from the wire."""

import msgspec

from engine.core.kv_events import Medium, Stored

MEDIA = {"GPU": Medium.DEVICE, "CPU": Medium.HOST, "STORAGE": Medium.DISK}


class HeldBlocks:
    """The blocks of each tier, by the hashes of events. Every stored block must be new, every removed one known."""

    def __init__(self) -> None:
        self.held = {medium: set() for medium in Medium}
        self.tokens = {}  # by hash: all tokens of the prompt up to the block's end
        self.num_cleared = 0

    def apply(self, events):
        """Take recorded events."""
        for event in events:
            if isinstance(event, Stored):
                self._store(event.medium, event.hashes, event.parent, list(event.token_ids))
            else:
                self._remove(event.medium, event.hashes)

    def receive(self, payload):
        """Take a batch as it is sent."""
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            tag, values = named(event)
            if tag == "BlockStored":
                assert not values["token_ids"] or len(values["token_ids"]) == values["block_size"] * len(
                    values["block_hashes"]
                )
                self._store(
                    MEDIA[values["medium"]], values["block_hashes"], values["parent_block_hash"], values["token_ids"]
                )
            elif tag == "BlockRemoved":
                self._remove(MEDIA[values["medium"]], values["block_hashes"])
            else:
                assert tag == "AllBlocksCleared"
                self.held = {medium: set() for medium in Medium}
                self.num_cleared += 1

    def _store(self, medium, hashes, parent, token_ids):
        assert not self.held[medium].intersection(hashes), "it was there already"
        assert len(set(hashes)) == len(hashes)
        self.held[medium].update(hashes)
        size = len(token_ids) // len(hashes)
        if not size:
            return
        before = [] if parent is None else self.tokens.get(parent)
        for place, hash_ in enumerate(hashes):
            if before is not None:
                before = self.tokens[hash_] = before + token_ids[place * size : (place + 1) * size]

    def _remove(self, medium, hashes):
        assert self.held[medium].issuperset(hashes), "it was not there"
        self.held[medium].difference_update(hashes)


STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
)  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx", "locality")


def named(event):
    """Return an event's tag, and its fields by name, whichever form it has."""
    if isinstance(event, dict):
        return event["type"], {name: value for name, value in event.items() if name != "type"}
    tag, *values = event
    names = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}[tag]
    return tag, dict(zip(names, values + [None] * (len(names) - len(values)), strict=True))


def truth(kv, events, disk=None):
    """Return what the tiers have, by the hashes of events. disk: what this process knows to be there."""
    held = {medium: set() for medium in Medium}
    for group, published in enumerate(kv.pool._published):
        held[Medium.DEVICE] |= {events.hash_of((group, key)) for key in published}
    if kv.tiers.host is not None:
        held[Medium.HOST] = {events.hash_of(name) for name in kv.tiers.host.index.names()}
    if disk is not None:
        held[Medium.DISK] = {events.hash_of(name) for name in disk}
    return held
