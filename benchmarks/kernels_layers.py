"""Times all kernels of one decode step, with every layer's own weights, in one CUDA graph.

Shows a step's device time without any host work: the sum of the kernels, and the part that programmatic dependent
launch (pdl) hides between them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarks.kernel_timing import BF16_CUDA, time_graph
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise import triton as ops
from kernels.elementwise.triton_write_kv import norm_rope_write_kv
from kernels.linear.triton_gemv import allocate_scratch, gemv

_CONTEXT = 512
_HEAD_DIM = 128
_NUM_KV_HEADS = 8


@dataclass(frozen=True)
class Shape:
    """A model's shape; both have 8 KV heads of 128."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    intermediate: int
    vocab: int
    has_qk_norm: bool


SHAPES = (
    Shape("0.6B", 28, 1024, 16, 3072, 151936, True),
    Shape("8B", 32, 4096, 32, 14336, 128256, False),
)


class Step:
    """Weights and state of one decode step of num_rows requests at a context of 512 tokens."""

    def __init__(self, shape: Shape, num_rows: int, *, uses_gemv: bool, pdl: bool) -> None:
        self.shape, self.uses_gemv, self.pdl = shape, uses_gemv, pdl
        width, hidden = shape.num_heads * _HEAD_DIM, shape.hidden
        sizes = ((width + 2 * _NUM_KV_HEADS * _HEAD_DIM, hidden), (hidden, width),
                 (2 * shape.intermediate, hidden), (hidden, shape.intermediate))  # fmt: skip
        self.layers = [[torch.randn(n, k, **BF16_CUDA) * k**-0.5 for n, k in sizes] for _ in range(shape.num_layers)]
        self.lm_head = torch.randn(shape.vocab, hidden, **BF16_CUDA) * hidden**-0.5
        blocks = _CONTEXT // 64
        cache_shape = (num_rows * blocks, 64, _NUM_KV_HEADS, _HEAD_DIM)
        self.caches = [
            (torch.randn(cache_shape, **BF16_CUDA), torch.randn(cache_shape, **BF16_CUDA)) for _ in self.layers
        ]
        self.table = torch.arange(num_rows * blocks, dtype=torch.int32, device="cuda").view(num_rows, blocks)
        self.seq_lens = torch.full((num_rows,), _CONTEXT, dtype=torch.int32, device="cuda")
        self.positions = torch.full((num_rows,), _CONTEXT - 1, device="cuda")
        self.slots = torch.arange(1, num_rows + 1, device="cuda") * _CONTEXT - 1
        self.angles = torch.rand(_CONTEXT, _HEAD_DIM, **BF16_CUDA)
        self.norm, self.head_norm = torch.ones(hidden, **BF16_CUDA), torch.ones(_HEAD_DIM, **BF16_CUDA)
        self.hidden_states = torch.randn(num_rows, hidden, **BF16_CUDA)
        self.gemv_scratch = allocate_scratch(torch.device("cuda"))
        self.scratch = DecodeScratch.allocate(
            num_heads=shape.num_heads, num_kv_heads=_NUM_KV_HEADS, head_dim=_HEAD_DIM, device=torch.device("cuda")
        )

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Compute one projection, by the skinny GEMM or cuBLAS."""
        return gemv(x, w, None, self.gemv_scratch, pdl=self.pdl) if self.uses_gemv else functional.linear(x, w)

    def __call__(self) -> torch.Tensor:
        """From hidden states to logits."""
        x, residual, pdl = self.hidden_states, self.hidden_states, self.pdl
        head_norm = self.head_norm if self.shape.has_qk_norm else None
        for (qkv_w, o_w, gate_up_w, down_w), caches in zip(self.layers, self.caches, strict=True):
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-6, pdl=pdl)
            q = norm_rope_write_kv(
                self.linear(x, qkv_w), head_norm, head_norm, 1e-6, self.positions, self.angles, *caches, self.slots,
                num_heads=self.shape.num_heads, pdl=pdl,
            )  # fmt: skip
            out = torch.empty_like(q)
            decode_attention(
                q, *caches, self.table, self.seq_lens, out, self.scratch,
                scale=_HEAD_DIM**-0.5, max_seq_len=4096, pdl=pdl,
            )  # fmt: skip
            x, residual = ops.add_rms_norm(self.linear(out.flatten(1), o_w), residual, self.norm, 1e-6, pdl=pdl)
            x = self.linear(ops.silu_and_mul(self.linear(x, gate_up_w), pdl=pdl), down_w)
        return self.linear(ops.add_rms_norm(x, residual, self.norm, 1e-6, pdl=pdl)[0], self.lm_head)


def bench_layers() -> list[dict[str, object]]:
    """Measure µs of a step's kernels: skinny GEMM with pdl, without, cuBLAS without; compare their logits."""
    results: list[dict[str, object]] = []
    for shape, num_rows in [(shape, rows) for shape in SHAPES for rows in (1, 8, 32)]:
        step = Step(shape, num_rows, uses_gemv=True, pdl=True)
        step.uses_gemv, step.pdl = False, False
        expected = step().double()
        for uses_gemv, pdl in ((True, True), (True, False), (False, True), (False, False)):
            step.uses_gemv, step.pdl = uses_gemv, pdl
            error = float((step().double() - expected).norm() / expected.norm())
            assert error < 3e-2, (shape.name, num_rows, uses_gemv, pdl, error)
            us = time_graph([functools.partial(step)])
            results.append({"kind": "layers", "case": f"{shape.name} B{num_rows} {'gemv' if uses_gemv else 'cublas'}"
                            + (" pdl" if pdl else ""), "us": us, "error": error})  # fmt: skip
        del step, expected
        torch.cuda.empty_cache()
    return results
