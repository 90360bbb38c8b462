"""Baseline implementations of attention in plain PyTorch, and Quire's backends with the same call signature.

Each function prepares what is not timed, and returns a call: layer → [tokens, num_heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.attention_problem import Problem
from kernels.attention.base import AttentionBackend

Call = Callable[[int], torch.Tensor]


def quadratic(problem: Problem) -> Call:
    """One prompt with its O(N²) scores materialised: softmax(mask(q kᵀ)) v, over contiguous keys."""
    heads, layers = problem.heads, _contiguous(problem)
    q = problem.q.transpose(0, 1)

    def call(layer: int) -> torch.Tensor:
        keys, values = (t.repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=0) for t in layers[layer])
        scores = (q @ keys.transpose(1, 2)).mul_(heads.scale)
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(1)
        return (scores.masked_fill_(future, float("-inf")).softmax(-1) @ values).transpose(0, 1)

    return call


def sdpa(problem: Problem) -> Call:
    """One prompt in torch's scaled_dot_product_attention, over contiguous keys; torch chooses the kernel."""
    layers = _contiguous(problem)
    q = problem.q.transpose(0, 1)[None]

    def call(layer: int) -> torch.Tensor:
        keys, values = (t[None] for t in layers[layer])
        out = functional.scaled_dot_product_attention(
            q, keys, values, is_causal=True, scale=problem.heads.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return call


def page_loop(problem: Problem) -> Call:
    """Decoding rows with a Python loop over their pages, and a running softmax (arXiv:1805.02867, algorithm 3)."""
    heads = problem.heads
    block_size = problem.caches[0][0].shape[1]
    tables = problem.block_table[:, : -(-problem.seq_len // block_size)].tolist()
    queries = problem.q.unflatten(1, (heads.num_kv_heads, -1))

    def attend(q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], table: list[int]) -> torch.Tensor:
        highest = torch.full((*q.shape[:2], 1), float("-inf"), device=q.device)
        total, acc = torch.zeros_like(highest), torch.zeros(q.shape, device=q.device)
        for i, block in enumerate(table):
            num_tokens = min(block_size, problem.seq_len - i * block_size)
            keys, values = (pages[block, :num_tokens].transpose(0, 1) for pages in cache)
            scores = (q @ keys.transpose(1, 2)).float() * heads.scale
            before, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, rescale = (scores - highest).exp(), (before - highest).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            acc = acc * rescale + (weights.to(values.dtype) @ values)
        return (acc / total).flatten(0, 1)

    def call(layer: int) -> torch.Tensor:
        rows = [attend(q, problem.caches[layer], table) for q, table in zip(queries, tables, strict=True)]
        return torch.stack(rows).to(problem.q.dtype)

    return call


def through_backend(backend: AttentionBackend) -> Callable[[Problem], Call]:
    """A backend as the engine calls it, over the paged cache."""

    def prepare(problem: Problem) -> Call:
        metadata = problem.metadata()

        def call(layer: int) -> torch.Tensor:
            return backend.forward(problem.q, *problem.caches[layer], metadata, scale=problem.heads.scale)

        return call

    return prepare


def _contiguous(problem: Problem) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's keys and values of the only row, [num_kv_heads, seq_len, head_dim]."""
    assert problem.num_rows == 1
    gathered = (problem.gather(layer, 0) for layer in range(len(problem.caches)))
    return [(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()) for k, v in gathered]
