"""FlashAttention: the AttentionBackend over the package flash-attn, imported only when the backend is selected.

On a Hopper GPU it uses FlashAttention-3 (module flash_attn_interface) if installed, otherwise FlashAttention-2
(flash_attn). Both read the pool through the block table; FA2 needs blocks whose size is a multiple of 256 tokens.
Neither knows sinks: with them, its output is weighed by the logarithm of each softmax's denominator, which it returns.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from kernels.attention.base import AttentionMetadata, AttentionSpec
from kernels.elementwise.reference import UNSCALED, KVScales

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)
_HOPPER = 9
_MIN_FA2_VERSION = (2, 6)  # the first with a softcap
_WHOLE_ROW = (-1, -1)
# FA2 launches programs for every row as if it were the longest: from this many idle queries on, that takes longer
# than cutting rows into tiles (benchmarks/notes.md)
_MANY_QUERIES = 100_000
_TILE = 128
_Softmax = dict[str, Any]  # keyword arguments of every call of the library: scale, causal, window, softcap


@dataclass(frozen=True)
class _Library:
    """One imported generation of the library."""

    generation: int
    block_size_multiple: int
    module: ModuleType
    attend: Callable[
        [ModuleType, torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, _Softmax, torch.Tensor | None],
        torch.Tensor,
    ]


class FlashAttention:
    """FA3 computes all rows in one call; FA2 uses one call for rows of one query token and one for the others."""

    name = "flash-attn"
    groups_rows = False
    is_graph_safe = True

    def __init__(self) -> None:
        library = _find_library(torch.cuda.get_device_capability())
        if isinstance(library, str):
            raise ImportError(library)
        self._library = library
        self.block_size_multiple = library.block_size_multiple
        logger.info("attention_backend=%s generation=%d", self.name, library.generation)

    @classmethod
    def refuse(cls, spec: AttentionSpec) -> str | None:
        """Refuse specs that neither generation supports, and a failed import of the library."""
        if spec.device.type != "cuda":
            return f"it needs a CUDA device, not {spec.device.type}"
        if spec.dtype not in _DTYPES:
            return f"dtype {spec.dtype} is not one of bfloat16, float16"
        if spec.has_other_pool:
            return f"its pool must hold {spec.dtype}, not {spec.kv_dtype}"
        if spec.head_dim > _MAX_HEAD_DIM or spec.head_dim % 8 != 0:
            return f"head_dim {spec.head_dim} is not a multiple of 8 of at most {_MAX_HEAD_DIM}"
        if spec.values_dim != spec.head_dim:
            return f"values of {spec.values_dim} numbers a head are not of the size of keys, {spec.head_dim}"
        if spec.has_chunks:
            return "it has no chunked attention"
        if spec.frees_windows:
            return "blocks behind a window may hold NaN of other rows, which it multiplies by 0"
        if spec.num_heads % spec.num_kv_heads != 0:
            return f"num_heads {spec.num_heads} is not a multiple of num_kv_heads {spec.num_kv_heads}"
        library = _find_library(torch.cuda.get_device_capability(spec.device))
        if isinstance(library, str):
            return library
        if spec.block_size is not None and spec.block_size % library.block_size_multiple != 0:
            return (
                f"block_size {spec.block_size} is not a multiple of {library.block_size_multiple}, "
                f"which FlashAttention-{library.generation} needs"
            )
        return None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Do nothing: see AttentionBackend.prepare."""

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        chunk: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Attend each row over its own tokens; see AttentionBackend.forward. A padding row (seq_len 0) yields zeros."""
        assert kv_scales is UNSCALED, "refuse() takes no pool of another dtype"
        assert chunk is None, "refuse() takes no model with chunked attention"
        window = _WHOLE_ROW if sliding_window is None else (sliding_window - 1, 0)
        softmax = {"softmax_scale": scale, "causal": True, "window_size": window, "softcap": softcap}
        return self._library.attend(self._library.module, q, k_cache, v_cache, metadata, softmax, sinks)


def _find_library(capability: tuple[int, int]) -> _Library | str:
    """Import the newest generation that runs on this GPU, or return the reason for having none."""
    if capability < _MIN_CAPABILITY:
        return "it needs compute capability 8.0 or higher, this GPU has {}.{}".format(*capability)
    if capability[0] == _HOPPER:
        module = _import("flash_attn_interface")
        if isinstance(module, ModuleType):
            return _Library(3, 16, module, _attend_fa3)
        logger.info("attention_backend=flash-attn generation=3 refused reason=%r", module)
    module = _import("flash_attn")
    if isinstance(module, str):
        return module
    version = str(module.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_FA2_VERSION:
        return "flash-attn {} is older than {}.{}".format(version, *_MIN_FA2_VERSION)
    return _Library(2, 256, module, _attend_fa2)


def _import(name: str) -> ModuleType | str:
    """Import a module, or return the reason for the failure in one sentence."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return f"the module {name} is not installed"
        return f"importing {name} failed: {error}"
    except Exception as error:  # a module compiled for another torch or CUDA may raise anything
        return f"importing {name} failed: {type(error).__name__}: {' '.join(str(error).split())}"


def _attend_fa3(
    module: ModuleType,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    softmax: _Softmax,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend all rows of any length. Shapes as AttentionBackend.forward."""
    found = module.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=metadata.seq_lens,
        page_table=metadata.block_table,
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=metadata.max_query_len,
        return_softmax_lse=sinks is not None,
        **softmax,
    )
    return found if sinks is None else _add_sinks(found[0], found[1], sinks)


def _attend_fa2(
    module: ModuleType,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    softmax: _Softmax,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend decode rows, split along their keys, then the rest by tiles. Shapes as AttentionBackend.forward."""
    num_rows = metadata.seq_lens.shape[0]
    num_decodes = num_rows if metadata.max_query_len == 1 else metadata.num_decodes or 0
    if num_decodes == num_rows:
        return _decode_fa2(module, q, k_cache, v_cache, metadata, softmax, sinks)
    if metadata.num_decodes is None and num_rows * metadata.max_query_len > _MANY_QUERIES:
        metadata = _cut_rows(metadata, q.shape[0])
    # The first tokens of q belong to no row of this call, so it does not write them
    found = module.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=metadata.query_start_loc[num_decodes:],
        cu_seqlens_k=functional.pad(metadata.seq_lens[num_decodes:].cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_seq_len,
        block_table=metadata.block_table[num_decodes:],
        return_attn_probs=sinks is not None,  # and lse; probabilities only with a dropout
        **softmax,
    )
    out: torch.Tensor = found if sinks is None else _add_sinks(found[0], found[1], sinks)
    if num_decodes > 0:
        out[:num_decodes] = _decode_fa2(module, q[:num_decodes], k_cache, v_cache, metadata, softmax, sinks)
    return out


def _decode_fa2(
    module: ModuleType,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    softmax: _Softmax,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend the first N rows, of one query token each. q: [N, num_heads, head_dim]; returns the same shape."""
    found = module.flash_attn_with_kvcache(
        q.unsqueeze(1),
        k_cache,
        v_cache,
        cache_seqlens=metadata.seq_lens[: q.shape[0]],
        block_table=metadata.block_table[: q.shape[0]],
        return_softmax_lse=sinks is not None,
        **softmax,
    )
    if sinks is None:
        out: torch.Tensor = found.squeeze(1)
        return out
    return _add_sinks(found[0].squeeze(1), found[1].squeeze(2).T, sinks)


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Add exp(sink) to each softmax's denominator, in place. out: [T, H, D]; lse: [H, T] fp32, of the denominators.

    Each output is a sum over exp(lse), and shall be one over exp(lse) + exp(sink). A query without keys has zeros and
    an lse of plus or minus infinity, so it stays at zero.
    """
    return out.mul_(torch.sigmoid(lse.T - sinks)[..., None])


def _cut_rows(metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
    """Cut the queries into rows of at most _TILE: each tile's keys end at its last query. Never syncs.

    The number of tiles is the most that num_tokens could need; tiles past the last used one hold no query.
    """
    starts, num_rows = metadata.query_start_loc, metadata.seq_lens.shape[0]
    counts = (starts.diff() + _TILE - 1) // _TILE
    ends = counts.cumsum(0)
    tiles = torch.arange(num_tokens // _TILE + num_rows, device=starts.device)
    rows = torch.searchsorted(ends, tiles, right=True).clamp(max=num_rows - 1)
    row_ends = starts[rows + 1]
    firsts = torch.minimum(starts[rows] + (tiles - ends[rows] + counts[rows]) * _TILE, row_ends)
    tile_starts = torch.cat((firsts, starts[-1:])).to(torch.int32)
    return replace(
        metadata,
        query_start_loc=tile_starts,
        seq_lens=(metadata.seq_lens[rows] - row_ends + tile_starts[1:]).clamp(min=0).to(torch.int32),
        block_table=metadata.block_table[rows],
        max_query_len=_TILE,
        num_decodes=0,
        max_prefills=None,
    )
