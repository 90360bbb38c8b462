"""LayerCache: what one layer of a model keeps of each token of a request. Constant for the life of the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.elementwise.reference import INT8, INT8_SCALE


@dataclass(frozen=True)
class LayerCache:
    """The keys and values of one layer."""

    num_kv_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int  # of values
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: the whole context
    chunk: int | None = None  # instead of a window: of the tokens before it, a token p sees those of chunk p // chunk
    shares: int | None = None  # the layer whose keys and values it reads, having none of its own
    values_are_keys: bool = False  # values are the projected keys, before norm and rotation
    values_in_keys: bool = False  # values are the first v_head_dim numbers of the keys as they are kept, and only these

    @property
    def reach(self) -> int | None:
        """The most tokens that a token sees, itself included; None: the whole context."""
        return self.chunk if self.window is None else self.window

    @property
    def kind(self) -> Literal["full", "window"]:
        """How long tokens are kept: all of a request, or the last ones."""
        return "full" if self.reach is None else "window"

    @property
    def num_tensors(self) -> int:
        """The tensors of the pool: keys and values, or keys that hold the values."""
        return 1 if self.values_in_keys else 2

    @property
    def rotated_dim(self) -> int:
        """The numbers of a head that positions may rotate."""
        return self.head_dim - self.v_head_dim if self.values_in_keys else self.head_dim

    @property
    def values_per_token(self) -> int:
        """The numbers that one token adds, keys and values together."""
        if self.shares is not None:
            return 0
        return self.num_kv_heads * (self.head_dim + (0 if self.values_in_keys else self.v_head_dim))

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token adds, keys and values together, with the scales of an INT8 pool.

        dtype: of the pool.
        """
        if dtype != INT8 or self.shares is not None:
            return self.values_per_token * dtype.itemsize
        return self.values_per_token + self.num_kv_heads * self.num_tensors * INT8_SCALE.itemsize

    def share_of_rank(self, tp_size: int) -> LayerCache:
        """Return what one of tp_size ranks keeps: its heads, or one replicated head if ranks outnumber heads."""
        return dataclasses.replace(self, num_kv_heads=max(self.num_kv_heads // tp_size, 1))


def keep_layers(caches: Sequence[LayerCache | None], kept: Iterable[int]) -> tuple[LayerCache | None, ...]:
    """Return the caches of some layers, which include the owner of each shared cache, with its new index."""
    place = {layer: index for index, layer in enumerate(kept)}
    return tuple(
        cache
        if (cache := caches[layer]) is None or cache.shares is None
        else dataclasses.replace(cache, shares=place[cache.shares])
        for layer in place
    )
