"""Chains of decode layers of few rows, as kernels are served, with each fusion switched on or off.

A chain has weights of its own in every layer, or experts that other layers do not choose, so L2 has none of them. The
kernels are those of models/layers, launched early (pdl); cuBLAS stands where DenseLinear would call it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from benchmarks.kernel_timing import BF16_CUDA
from benchmarks.moe_problem import MoeShape, MoeWeights, make_weights
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise import triton as ops
from kernels.elementwise.triton_write_kv import norm_rope_write_kv
from kernels.linear.eight_bits import Fp8BlockLinear
from kernels.linear.late_norm import GateKind, LateNorm
from kernels.linear.reference import quantize_blocks
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.triton_gemv import allocate_scratch, gated_gemv, gemv
from kernels.linear.triton_rounded import add_rms_norm_rounded
from kernels.linear.triton_row import normed_gemv, row_gemv
from kernels.moe import reference as moe
from kernels.moe.configs import PlanesConfig, PlanesPairsConfig, planes_config
from kernels.moe.planes import PlanesMatrix
from kernels.moe.reference import ExpertSum
from kernels.moe.triton import multiply
from kernels.moe.triton_planes_pairs import planes_pairs_down, planes_pairs_up
from kernels.moe.triton_route import lay_out, route
from kernels.moe.triton_sums import sum_experts, sum_experts_add_rms_norm

_CONTEXT = 512
_BLOCK = 128  # of FP8 scales
_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """A model's layer. experts: in place of the MLP; is_fp8: its attention has FP8 products; has_biases: gpt-oss."""

    name: str
    num_layers: int  # of the chain
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    experts: MoeShape | None = None
    has_head_norms: bool = False
    is_fp8: bool = False
    has_biases: bool = False


@dataclass(frozen=True)
class Fusions:
    """What is fused; all off: as it was before."""

    gates: bool = False  # activation in the product of gates and ups
    norms: bool = False  # of one row: norms in the products behind them, and the router's
    rows: bool = False  # of one row: other products hold their weights in registers, too
    lines: bool = False  # K that is no multiple of 512 by the skinny GEMM, not cuBLAS
    sums: bool = False  # the experts' sum with the next norm
    up: tuple[int, int, int] | None = None  # tile of the experts' first product: outputs, warps, stages
    down: tuple[int, int, int] | None = None


_Matrix = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # 16-bit, or e4m3 and scales
_Layer = dict[str, _Matrix]


class Chain:
    """Weights and state of some decode layers of num_rows requests at a context of 512 tokens."""

    def __init__(self, shape: Shape, experts: list[MoeWeights]) -> None:
        """experts: weights that the layers take in turns; see make_experts."""
        self.shape, self.experts = shape, experts
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.sizes = {"qkv": (width + 2 * kv_width, shape.hidden), "o": (shape.hidden, width)}
        if shape.experts is None:
            self.sizes |= {"up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate)}
        else:
            self.sizes["router"] = (shape.experts.num_experts, shape.hidden)
        self.layers = [{name: self._matrix(name, *size) for name, size in self.sizes.items()}
                       for _ in range(shape.num_layers)]  # fmt: skip
        self.biases = {name: torch.randn(n, **BF16_CUDA) * 0.1 if shape.has_biases else None
                       for name, (n, _) in self.sizes.items()}  # fmt: skip
        self.norm = torch.rand(shape.hidden, **BF16_CUDA) + 0.5
        self.head_norm = torch.ones(shape.head_dim, **BF16_CUDA) if shape.has_head_norms else None
        self.angles = torch.rand(_CONTEXT, shape.head_dim, **BF16_CUDA)
        device = BF16_CUDA["device"]
        self.scratch, self.fp8 = allocate_scratch(device), Fp8BlockLinear()
        self.decode_scratch = DecodeScratch.allocate(
            num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, device=device
        )
        self.rounding = Rounding(_BLOCK) if shape.is_fp8 else None
        self.gate = moe.Gate("clamped", alpha=1.702, limit=7.0) if shape.has_biases else moe.SILU
        self.expert_biases = None
        if shape.has_biases and shape.experts is not None:
            count, inner = shape.experts.num_experts, shape.experts.intermediate_size
            self.expert_biases = moe.ExpertBiases(
                torch.randn(count, 2 * inner, **BF16_CUDA) * 0.1, torch.randn(count, shape.hidden, **BF16_CUDA) * 0.1
            )
        self.set_rows(1)

    def set_rows(self, num_rows: int) -> None:
        """Make the state of so many rows."""
        blocks, shape, device = _CONTEXT // 64, self.shape, BF16_CUDA["device"]
        cache = (num_rows * blocks, 64, shape.num_kv_heads, shape.head_dim)
        self.caches = [(torch.randn(cache, **BF16_CUDA), torch.randn(cache, **BF16_CUDA)) for _ in self.layers]
        self.table = torch.arange(num_rows * blocks, dtype=torch.int32, device=device).view(num_rows, blocks)
        self.seq_lens = torch.full((num_rows,), _CONTEXT, dtype=torch.int32, device=device)
        self.positions = torch.full((num_rows,), _CONTEXT - 1, device=device)
        self.slots = torch.arange(1, num_rows + 1, device=device) * _CONTEXT - 1
        self.x, self.residual = torch.randn(2, num_rows, shape.hidden, **BF16_CUDA).unbind()

    def run(self, fused: Fusions) -> torch.Tensor:
        """Launch all layers and a last norm."""
        x: torch.Tensor | ExpertSum = self.x
        residual = self.residual
        for index, weights in enumerate(self.layers):
            attended, residual = self._attention(x, residual, weights, index, fused)
            x, residual = self._mlp(attended, residual, weights, index, fused)
        normed, _ = self._add_norm(x, residual, None)
        assert isinstance(normed, torch.Tensor)
        return normed

    def _attention(
        self, x: torch.Tensor | ExpertSum, residual: torch.Tensor, weights: _Layer, index: int, fused: Fusions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if fused.norms and isinstance(x, torch.Tensor) and not self.shape.is_fp8:
            qkv, residual, _ = self._normed(x, residual, weights, "qkv")
        else:
            normed, residual = self._add_norm(x, residual, self.rounding)
            qkv = self._product(normed, weights, "qkv", fused)
        caches = self.caches[index]
        q = norm_rope_write_kv(
            qkv, self.head_norm, self.head_norm, _EPS, self.positions, self.angles, *caches, self.slots,
            num_heads=self.shape.num_heads, pdl=True,
        )  # fmt: skip
        out = torch.empty_like(q)
        decode_attention(
            q, *caches, self.table, self.seq_lens, out, self.decode_scratch,
            scale=self.shape.head_dim**-0.5, max_seq_len=4096, pdl=True,
        )  # fmt: skip
        return self._product(out.flatten(1), weights, "o", fused), residual

    def _mlp(
        self, x: torch.Tensor, residual: torch.Tensor, weights: _Layer, index: int, fused: Fusions
    ) -> tuple[torch.Tensor | ExpertSum, torch.Tensor]:
        if self.shape.experts is not None:
            return self._mixture(x, residual, weights, index, fused)
        if fused.norms:
            inner, residual, _ = self._normed(x, residual, weights, "up", gate="silu")
            return self._product(inner, weights, "down", fused), residual
        normed, residual = self._add_norm(x, residual, None)
        assert isinstance(normed, torch.Tensor)
        if fused.gates:
            inner = gated_gemv(normed, _dense(weights["up"]), self.scratch, is_gelu=False, pdl=True)
        else:
            inner = ops.silu_and_mul(self._product(normed, weights, "up", fused), pdl=True)
        return self._product(inner, weights, "down", fused), residual

    def _mixture(
        self, x: torch.Tensor, residual: torch.Tensor, weights: _Layer, index: int, fused: Fusions
    ) -> tuple[torch.Tensor | ExpertSum, torch.Tensor]:
        shape = self.shape.experts
        assert shape is not None
        if fused.norms:
            logits, residual, normed = self._normed(x, residual, weights, "router", keeps_normed=True)
        else:
            rows, residual = self._add_norm(x, residual, None)
            logits, normed = self._product(rows, weights, "router", fused), _dense(rows)
        assert normed is not None
        experts, top_k, num_experts = self.experts[index % len(self.experts)], shape.top_k, shape.num_experts
        gate_up, down, biases = experts.gate_up, experts.down, self.expert_biases
        assert isinstance(gate_up, PlanesMatrix)
        found = planes_config(
            gate_up.kind, num_tokens=normed.shape[0], top_k=top_k, num_experts=num_experts, can_round=True
        )  # fmt: skip
        config = _changed(found, fused)
        routing = route(
            logits, num_experts=num_experts, top_k=top_k, renormalize=True, weights_dtype=normed.dtype,
            chunk_tokens=None if isinstance(config, PlanesPairsConfig) else config.chunk_tokens, pdl=True,
        )  # fmt: skip
        up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
        if isinstance(config, PlanesPairsConfig):
            assert isinstance(gate_up, PlanesMatrix)
            assert isinstance(down, PlanesMatrix)
            inner = planes_pairs_up(normed, gate_up, routing, config.up, gate=self.gate, bias=up_bias, pdl=True)
            return planes_pairs_down(inner, down, routing, config.down, bias=down_bias, pdl=True), residual
        tiles = routing if config.chunk_tokens is None else lay_out(
            routing, num_experts=num_experts, block_m=config.block_m, pdl=True
        )  # fmt: skip
        outputs = multiply(
            normed, gate_up, down, tiles, config, num_pairs=normed.shape[0] * top_k, gate=self.gate,
            up_bias=up_bias, down_bias=down_bias, pdl=True,
        )  # fmt: skip
        late = ExpertSum(outputs, routing.weights, routing.experts, has_absent=False)
        return late if fused.sums else sum_experts(late, pdl=True), residual

    def _add_norm(
        self, x: torch.Tensor | ExpertSum, residual: torch.Tensor, rounding: Rounding | None
    ) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
        if isinstance(x, ExpertSum):
            return sum_experts_add_rms_norm(x, residual, self.norm, _EPS, rounding, pdl=True)
        if rounding is None:
            return ops.add_rms_norm(x, residual, self.norm, _EPS, pdl=True)
        return add_rms_norm_rounded(x, residual, self.norm, _EPS, rounding, pdl=True)

    def _normed(
        self, x: torch.Tensor, residual: torch.Tensor, weights: _Layer, name: str, *, gate: GateKind = "",
        keeps_normed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        total, normed = torch.empty_like(residual), torch.empty_like(residual) if keeps_normed else None
        late = LateNorm(x, residual, self.norm, _EPS, total)
        return (
            normed_gemv(late, _dense(weights[name]), self.biases[name], gate=gate, normed=normed, pdl=True),
            total,
            normed,
        )

    def _product(self, x: torch.Tensor | RoundedRows, weights: _Layer, name: str, fused: Fusions) -> torch.Tensor:
        w, bias = weights[name], self.biases[name]
        if isinstance(w, tuple):
            values, scales = w
            if isinstance(x, RoundedRows):
                return self.fp8.multiply(x, values, scales, bias, rows=_BLOCK, columns=_BLOCK)
            return self.fp8(x, values, scales, bias, rows=_BLOCK, columns=_BLOCK)
        assert isinstance(x, torch.Tensor)
        if fused.rows and w.shape[1] <= 4096 and x.shape[0] == 1:
            return row_gemv(x, w, bias, pdl=True)
        if w.shape[1] % 512 == 0 or fused.lines:
            return gemv(x, w, bias, self.scratch, pdl=True)
        return functional.linear(x, w, bias)

    def _matrix(self, name: str, n: int, k: int) -> _Matrix:
        matrix = torch.randn(n, k, **BF16_CUDA) * k**-0.5
        return quantize_blocks(matrix, _BLOCK, _BLOCK) if self.shape.is_fp8 and name != "router" else matrix


def _dense(matrix: _Matrix | RoundedRows) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor)
    return matrix


def make_experts(shape: Shape, count: int) -> list[MoeWeights]:
    """Make `count` layers' experts, none for a dense shape."""
    return [] if shape.experts is None else [make_weights(shape.experts, **BF16_CUDA) for _ in range(count)]


def _changed(config: object, fused: Fusions) -> PlanesConfig | PlanesPairsConfig:
    """Return the served config with the fusions' tiles."""
    assert isinstance(config, PlanesConfig | PlanesPairsConfig)
    if isinstance(config, PlanesPairsConfig):
        return config
    up, down = config.up, config.down
    if fused.up is not None:
        up = replace(up, block_n=fused.up[0], num_warps=fused.up[1], num_stages=fused.up[2])
    if fused.down is not None:
        down = replace(down, block_n=fused.down[0], num_warps=fused.down[1], num_stages=fused.down[2])
    return replace(config, up=up, down=down)
