"""Engines over the toy model with layers of several kinds, and a conversation whose blocks leave their pool."""

from typing import Any

from engine.interface.config import CacheGroup, HostTierConfig
from tests.support.engine_harness import Harness
from tests.support.layered_model import LayeredExecutor, LayeredModel

FULL = (CacheGroup("full", 4),)
GROUPS = {
    "full": FULL,
    "window": (CacheGroup("full", 4), CacheGroup("window", 4, 2, window=8)),
    "state": (CacheGroup("full", 4), CacheGroup("state", 8, 3)),
}
NUM_PAGES = {"full": 17, "window": 33, "state": 29}  # too few for evict_first()'s prompts
PROMPT = list(range(20))
OTHERS = [[30 + number] * 28 for number in range(4)]


def layered_harness(groups: tuple[CacheGroup, ...] = FULL, **settings: Any) -> Harness:
    """Return an engine over the model with these groups. settings: of Harness."""
    harness = Harness(groups=groups, executor=LayeredExecutor, **settings)
    harness.expected_tokens = LayeredModel(groups).expected_tokens
    return harness


def host_harness(
    *,
    groups: tuple[CacheGroup, ...] = FULL,
    num_pages: int = 17,
    num_slots: int = 60,
    max_copies: int = 2,
    **settings: Any,
) -> Harness:
    """Return one with host memory behind its pool. settings: of HostTierConfig and of Harness."""
    of_tier = {name: settings.pop(name) for name in HostTierConfig.__struct_fields__ if name in settings}
    host_tier = HostTierConfig(num_slots=num_slots, max_copies=max_copies, **of_tier)
    return layered_harness(groups, num_pages=num_pages, host_tier=host_tier, **settings)


def evict_first(harness: Harness) -> None:
    """Answer PROMPT as "first", and then OTHERS one by one, which evict its blocks."""
    harness.add("first", PROMPT, 4)
    harness.drain()
    for number, prompt in enumerate(OTHERS):
        harness.add(f"other{number}", prompt, 4)
        harness.drain()


def next_turn(harness: Harness) -> list[int]:
    """Return the prompt that follows "first" and its answer."""
    return [*PROMPT, *harness.seen["first"].token_ids, 7, 8, 9]
