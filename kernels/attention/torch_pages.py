"""Which keys a query of torch's attention sees, and the pages of the pool that hold them, gathered.

A Rule is made for each call of TorchAttention.forward; a Gathered lives as long as its backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.elementwise.reference import FP8, INT8, from_fp8, from_int8


@dataclass(frozen=True)
class Rule:
    """Arguments of one call that decide which keys a query sees, and its softmax over them."""

    scale: float
    sliding_window: int | None
    chunk: int | None
    softcap: float
    sinks: torch.Tensor | None

    @property
    def reach(self) -> int | None:
        """Return the most keys that one query sees, or None."""
        return self.chunk if self.sliding_window is None else self.sliding_window

    @property
    def is_plain(self) -> bool:
        """True if SDPA computes the softmax: no cap, no sinks."""
        return self.softcap == 0.0 and self.sinks is None

    def oldest(self, position: int) -> int:
        """Return the first key that a query at `position` sees."""
        if self.sliding_window is not None:
            return max(0, position - self.sliding_window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    def oldest_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Equal oldest, for each of the positions."""
        if self.sliding_window is not None:
            return (positions - self.sliding_window + 1).clamp(min=0)
        return torch.zeros_like(positions) if self.chunk is None else positions // self.chunk * self.chunk


def seen_blocks(
    tables: torch.Tensor, seq_lens: torch.Tensor, rule: Rule, *, block_size: int, bound: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the columns of decode rows' tables that they see, [N, m], the first token of each, [N], and tokens of m.

    tables: [N, max_blocks]; bound: of the lengths. Never waits for the device.
    """
    firsts = torch.zeros_like(seq_lens)
    if rule.reach is None or rule.reach + 2 * block_size > bound:
        return tables, firsts, bound
    num_blocks = -(-rule.reach // block_size) + 1
    firsts = rule.oldest_of((seq_lens - 1).clamp(min=0)) // block_size
    columns = firsts[:, None] + torch.arange(num_blocks, device=firsts.device)
    tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1).long())  # a clamped one is past the row's end
    return tables, firsts * block_size, num_blocks * block_size


class Gathered:
    """Buffer for gathered pages. Kept between calls on CPU, where fresh pages of memory cost more than the copy.

    On other devices the caching allocator reuses memory. Under CUDA graphs a growing buffer would leave earlier graphs
    with a dangling pointer.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def gather(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        num_tokens: int,
        dtype: torch.dtype,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Gather the first num_tokens tokens of each row's blocks as dtype, as a view [N, Hkv, num_tokens, D].

        cache: [num_blocks, block_size, Hkv, D]; block_table: [N, max_blocks]; scales: those of KVScales that are no
        constants of the layer. Valid until the next call.
        """
        num_rows = block_table.shape[0]
        _, block_size, num_kv_heads, head_dim = cache.shape
        num_blocks = min(-(-num_tokens // block_size), block_table.shape[1])
        block_ids = block_table[:, :num_blocks].flatten()
        is_fp8, is_int8 = cache.dtype == FP8, cache.dtype == INT8
        cache = cache.view(torch.uint8) if is_fp8 else cache  # some torch builds cannot gather fp8 on every device
        if cache.device.type == "cpu":
            pages = self._reserve(cache, block_ids.shape[0])
            torch.index_select(cache, 0, block_ids, out=pages)
        else:
            pages = cache.index_select(0, block_ids)
        if is_fp8:
            pages = from_fp8(pages.view(FP8), dtype)
            if scales is not None:
                pages = (pages * scales[:, None]).to(dtype)
        elif is_int8:
            assert scales is not None
            pages = from_int8(pages, scales.index_select(0, block_ids), dtype)
        tokens = pages.view(num_rows, num_blocks * block_size, num_kv_heads, head_dim)
        return tokens[:, :num_tokens].transpose(1, 2)

    def _reserve(self, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return [num_blocks, block_size, Hkv, D] of the buffer, growing it if necessary."""
        num_elements = num_blocks * cache[0].numel()
        if self._buffer.dtype != cache.dtype or self._buffer.numel() < num_elements:
            # An ordinary tensor, so that it may be written inside and outside inference mode
            with torch.inference_mode(False):
                self._buffer = torch.empty(num_elements, dtype=cache.dtype)
        return self._buffer[:num_elements].view(num_blocks, *cache.shape[1:])
