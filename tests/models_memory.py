"""The table of memory in docs/reference/models.md: what a published model of each family keeps of a token."""

from collections.abc import Iterable

import torch

from models.config.model_config import ModelConfig
from tests.support.published_shapes import published_shapes

NOTHING = "–"
UNPUBLISHED = "none is known to the tests"
_KV_DTYPE = torch.bfloat16


def memory_rows(architectures: Iterable[str]) -> list[str]:
    """Return a table row per architecture."""
    shapes = published_shapes()
    rows = []
    for architecture in architectures:
        shape = shapes.get(architecture)
        cells = [UNPUBLISHED, *[NOTHING] * 3] if shape is None else [shape.name, *memory_cells(shape.config)]
        rows.append(f"| `{architecture}` | {' | '.join(cells)} |")
    return rows


def memory_cells(config: ModelConfig) -> list[str]:
    """Return the bytes of a token in layers that keep all, of one in those that keep a window, and of a state."""
    sizes: dict[tuple[bool, int | None], int] = {}
    for cache in config.kv_caches:
        key = cache.chunk is not None, cache.reach
        sizes[key] = sizes.get(key, 0) + cache.values_per_token * _KV_DTYPE.itemsize
    full = sizes.pop((False, None), 0)
    windows = [
        f"{size:,} within {'chunks of ' * is_chunk}{reach:,} tokens" for (is_chunk, reach), size in sizes.items()
    ]
    assert full + sum(sizes.values()) == config.kv_bytes_per_token(1, _KV_DTYPE)
    state = f"{config.state_bytes:,}" if config.state_bytes else NOTHING
    return [f"{full:,}" if full else NOTHING, ", ".join(windows) or NOTHING, state]
