"""LatentProblem: random inputs of latent attention at published shapes, its least work, and its float64 check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.kernel_timing import TensorOptions
from kernels.attention.base import AttentionMetadata
from kernels.attention.latent import LatentHeads, LatentSizes

_Map = Callable[[torch.Tensor], torch.Tensor]
_BLOCK_SIZE = 16
_NUM_CHECKED = 16  # queries at each end of a row
_TABLE_PADDING = 16  # entries: what kernels read at once


@dataclass(frozen=True)
class Shape:
    """The latent attention of one model."""

    name: str
    sizes: LatentSizes

    @property
    def width(self) -> int:
        """Return the numbers of a cached token."""
        return self.sizes.rank + self.sizes.rope_dim

    @property
    def scale(self) -> float:
        """Return the factor on the logits, without that of yarn."""
        return float((self.sizes.nope_dim + self.sizes.rope_dim) ** -0.5)


def _shape(name: str, num_heads: int, nope_dim: int, v_head_dim: int, *, rank: int = 512, rope_dim: int = 64) -> Shape:
    sizes = LatentSizes(
        num_heads=num_heads, rank=rank, rope_dim=rope_dim, nope_dim=nope_dim, v_head_dim=v_head_dim
    )  # fmt: skip
    return Shape(name, sizes)


SHAPES = (
    _shape("v2-lite", 16, 128, 128),
    _shape("v3", 128, 128, 128),
    _shape("glm-4.7-flash", 20, 192, 256),
)
SMOKE = (_shape("smoke", 4, 24, 16, rank=32, rope_dim=16),)


@dataclass(frozen=True)
class LatentProblem:
    """Rows of `tokens` queries at the end of `keys` tokens. `caches` has enough layers not to stay in L2."""

    shape: Shape
    rows: int
    tokens: int
    keys: int
    # [rows * tokens, num_heads, nope_dim] and [..., rope_dim]
    q_nope: torch.Tensor
    q_rope: torch.Tensor
    heads: LatentHeads
    # each [num_blocks, block_size, 1, rank + rope_dim]
    caches: list[torch.Tensor]
    metadata: AttentionMetadata  # without lengths on the host, as in a graph

    def fresh_metadata(self, *, has_lens: bool) -> AttentionMetadata:
        """Return metadata with nothing computed yet. has_lens: the host knows the rows' lengths."""
        lens = [(self.tokens, self.keys)] * self.rows if has_lens else None
        return replace(self.metadata, row_lens=lens, decode_pieces=None, latent_parts=None)

    def absorbed_queries(self) -> torch.Tensor:
        """Return what attends to the latents: [rows * tokens, num_heads, rank + rope_dim]."""
        absorbed = torch.bmm(self.q_nope.transpose(0, 1), self.heads.to_keys).transpose(0, 1)
        return torch.cat((absorbed, self.q_rope), dim=-1)

    def error_of_latents(self, queries: torch.Tensor, out: torch.Tensor) -> float:
        """Return the worst row's relative error of attention over the last layer's latents, [T, heads, rank]."""
        return self._worst(out, lambda tokens: queries[tokens].double(), lambda weighed: weighed)

    def error(self, out: torch.Tensor) -> float:
        """Return the worst row's relative error of whole latent attention over the last layer's latents, [T, H, v]."""
        to_keys, to_values = self.heads.to_keys.double(), self.heads.to_values.double()

        def absorb(tokens: torch.Tensor) -> torch.Tensor:
            absorbed = torch.einsum("qhd,hdr->qhr", self.q_nope[tokens].double(), to_keys)
            return torch.cat((absorbed, self.q_rope[tokens].double()), dim=-1)

        return self._worst(out, absorb, lambda weighed: torch.einsum("qhr,hrv->qhv", weighed, to_values))

    def _worst(self, out: torch.Tensor, queries_of: _Map, project: _Map) -> float:
        """Check the first, middle and last row, queries at both ends; inf if out is not finite.

        queries_of: from tokens [n] to what attends to latents, [n, H, rank + rope_dim]; project: from [n, H, rank].
        """
        if not bool(out.isfinite().all()):
            return float("inf")
        errors = []
        for row in sorted({0, self.rows // 2, self.rows - 1}):
            ends = {*range(min(_NUM_CHECKED, self.tokens)), *range(max(self.tokens - _NUM_CHECKED, 0), self.tokens)}
            checked = torch.tensor(sorted(ends), device=out.device)
            tokens = row * self.tokens + checked
            blocks = self.metadata.block_table[row, : -(-self.keys // _BLOCK_SIZE)].long()
            latents = self.caches[-1][blocks].flatten(0, 2)[: self.keys].double()
            logits = torch.einsum("qhd,kd->qhk", queries_of(tokens), latents) * self.shape.scale
            positions = self.keys - self.tokens + checked
            is_hidden = torch.arange(self.keys, device=out.device) > positions[:, None]
            weights = logits.masked_fill_(is_hidden[:, None], float("-inf")).softmax(-1)
            expected = project(torch.einsum("qhk,kr->qhr", weights, latents[:, : self.shape.sizes.rank]))
            errors.append(float((out[tokens].double() - expected).norm() / expected.norm()))
        return max(errors)


def make_problem(
    shape: Shape, *, rows: int, tokens: int, keys: int, num_layers: int, like: TensorOptions
) -> LatentProblem:
    """Draw the inputs. Raises torch.OutOfMemoryError."""
    sizes, device = shape.sizes, like["device"]
    num_blocks = -(-keys // _BLOCK_SIZE)
    table = torch.zeros(rows, -(-num_blocks // _TABLE_PADDING) * _TABLE_PADDING, dtype=torch.int32, device=device)
    order = torch.randperm(rows * num_blocks, dtype=torch.int32, device=device)
    table[:, :num_blocks] = order.view(rows, num_blocks)
    heads = LatentHeads(
        torch.randn(sizes.num_heads, sizes.nope_dim, sizes.rank, **like) * sizes.rank**-0.5,
        (torch.randn(sizes.num_heads, sizes.v_head_dim, sizes.rank, **like) * sizes.rank**-0.5).transpose(1, 2),
    )
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=device),
        seq_lens=torch.full((rows,), keys, dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=torch.zeros(rows * tokens, dtype=torch.int64, device=device),
        max_query_len=tokens,
        max_seq_len=keys,
        num_decodes=rows if tokens == 1 else None,
    )
    pool = (rows * num_blocks, _BLOCK_SIZE, 1, shape.width)
    return LatentProblem(
        shape=shape,
        rows=rows,
        tokens=tokens,
        keys=keys,
        q_nope=torch.randn(rows * tokens, sizes.num_heads, sizes.nope_dim, **like),
        q_rope=torch.randn(rows * tokens, sizes.num_heads, sizes.rope_dim, **like),
        heads=heads,
        caches=[torch.randn(pool, **like) for _ in range(num_layers)],
        metadata=metadata,
    )


def work_of_latents(shape: Shape, rows: int, tokens: int, keys: int, itemsize: int) -> tuple[float, float]:
    """Return the least bytes and operations of attention over latents: each read once, queries and outputs once."""
    sizes = shape.sizes
    pairs = rows * (tokens * (keys - tokens) + tokens * (tokens + 1) / 2)
    moved = rows * keys * shape.width + rows * tokens * sizes.num_heads * (shape.width + sizes.rank)
    return float(moved * itemsize), 2.0 * pairs * sizes.num_heads * (shape.width + sizes.rank)


def work_of_whole(shape: Shape, rows: int, tokens: int, keys: int, itemsize: int) -> tuple[float, float]:
    """Return the least bytes and operations of latent attention of prompts, in the form that takes fewer operations."""
    sizes = shape.sizes
    moved, absorbed = work_of_latents(shape, rows, tokens, keys, itemsize)
    absorbed += 2.0 * rows * tokens * sizes.num_heads * sizes.rank * (sizes.nope_dim + sizes.v_head_dim)
    return moved, min(absorbed, absorbed - rows * sizes.spared_flops(tokens, keys))
