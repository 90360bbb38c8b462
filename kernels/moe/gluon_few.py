"""Products of few tokens with experts as PlanesMatrix on Hopper, in Gluon: all loads of a program in flight at once.

Matrix-vector products by the other units take five instructions a weight, as long as the bytes of 4 bits take; tensor
cores fed through shared memory wait for one product after the other. Here codes go from memory to the registers of
mma.sync's first operand, 16 bytes a load, and become 16-bit floats there. An instruction multiplies 16 outputs by 8
columns: the rows of x of one tile, once for each part of the inputs that a warp of its own reads. The parts are then
summed in their order, so that results are equal in every run.

few_product: a tile of rows of one expert and some outputs a program. few_sum: one token and some outputs, over all of
its experts, whose weights are read before the wait for the first product.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.gluon_common import grid_dependency
from kernels.moe.few_configs import FewTile
from kernels.moe.gluon_few_codes import code_layout, row_layout
from kernels.moe.gluon_few_route import LateRouting, rank_experts, take_all, take_expert
from kernels.moe.gluon_few_sums import load_ahead, own_columns, place_rows, sources, sum_groups
from kernels.moe.gluon_planes import activate, round_to
from kernels.moe.planes import GROUP, PLANE, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_planes import kind_of
from kernels.moe.triton_route import Routing, RowTiles

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)

FEW_KINDS = ("mxfp4", "nvfp4", "int4", "fp8")
_GROUP = gl.constexpr(GROUP)


def takes(x: torch.Tensor, gate_up: PlanesMatrix, down: PlanesMatrix, gate: Gate) -> bool:
    """Return True if the kernels support these experts, given a device of compute capability 9.0."""
    return (
        (x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and gate_up.kind == down.kind == "int4"))
        and x.stride(0) % 8 == 0
        and gate.kind in ("silu", "clamped")
        and all(w.kind in FEW_KINDS and w.shape[2] % PLANE == 0 and w.shape[1] % 16 == 0 for w in (gate_up, down))
    )


def few_product(
    x: torch.Tensor,
    w: PlanesMatrix,
    routed: RowTiles | Routing | LateRouting,
    tile: FewTile,
    *,
    block_m: int,
    num_pairs: int,
    gate: Gate | None,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal kernels.moe.triton_planes.planes_gemm: [num_pairs, N]. block_m: of the tiles; 1 with another routing."""
    n = w.shape[1] // (1 if gate is None else 2)
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    late, num_tiles = None, num_pairs
    if isinstance(routed, RowTiles):
        experts, pairs, rows, num_tiles = routed.experts, routed.pairs, routed.rows, routed.experts.shape[0]
    elif isinstance(routed, Routing):
        experts = pairs = rows = routed.experts
    else:
        late = routed
        experts = pairs = rows = late.logits
    is_direct = not isinstance(routed, RowTiles)
    assert block_m == 1 or not is_direct
    _check(x, w, n, tile, tile.splits * block_m)
    _product_kernel[(n // tile.outputs, num_tiles)](
        x, w.words, w.scales, w.constants, bias, out, pairs, experts, rows, n, x.stride(0), w.scales.stride(0),
        0 if late is None else late.logits.stride(0),
        K=w.shape[2], KIND=kind_of(w), ROWS=w.rows, COLUMNS=w.columns, PAIRS_PER_ROW=num_pairs // x.shape[0],
        IS_DIRECT=is_direct, HAS_BIAS=bias is not None, GATE="" if gate is None else gate.kind,
        ALPHA=0.0 if gate is None else gate.alpha, LIMIT=0.0 if gate is None else gate.limit,
        EXPERTS=0 if late is None else late.num_experts, PADDED=0 if late is None else late.padded,
        MEMBERS=block_m, OUTPUTS=tile.outputs, SPLITS=tile.splits, AHEAD=_ahead(w, tile), PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl, maxnreg=tile.max_registers,
    )  # fmt: skip
    return out


def few_sum(
    inner: torch.Tensor,
    down: PlanesMatrix,
    routing: Routing | LateRouting,
    tile: FewTile,
    *,
    bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal kernels.moe.triton_planes_pairs.planes_pairs_down: [T, H]; the experts are summed in their order."""
    late = routing if isinstance(routing, LateRouting) else None
    if isinstance(routing, LateRouting):
        top_k, dtype, experts, weights = routing.top_k, routing.weights_dtype, routing.logits, None
    else:
        top_k, dtype = routing.experts.shape[1], routing.weights.dtype
        experts, weights = routing.experts, routing.weights
    num_tokens, n = experts.shape[0], down.shape[1]
    assert dtype in (inner.dtype, torch.float32)
    out = torch.empty(num_tokens, n, dtype=inner.dtype, device=inner.device)
    places = triton.next_power_of_2(top_k)
    _check(inner, down, n, tile, places * tile.splits)
    _sum_kernel[(n // tile.outputs, num_tokens)](
        inner, down.words, down.scales, down.constants, bias, experts, weights, shared, shared_gate,
        out, n, down.scales.stride(0), 0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0), 0 if late is None else late.logits.stride(0),
        *((0.0, 0.0, 1.0) if late is None else (late.floor, late.added, late.factor)),
        EXPERTS=0 if late is None else late.num_experts, PADDED=0 if late is None else late.padded,
        RENORMALIZE=late is not None and late.renormalize, ROUNDS_WEIGHTS=dtype != torch.float32,
        K=down.shape[2], KIND=kind_of(down), ROWS=down.rows, COLUMNS=down.columns, HAS_BIAS=bias is not None,
        HAS_SHARED=shared is not None, TOP_K=top_k, PLACES=places, OUTPUTS=tile.outputs, SPLITS=tile.splits,
        AHEAD=_ahead(down, tile), PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl, maxnreg=tile.max_registers,
    )  # fmt: skip
    return out


def _ahead(w: PlanesMatrix, tile: FewTile) -> int:
    """Return the groups of each split whose loads are in flight, at most all of them."""
    return min(tile.ahead, triton.cdiv(w.shape[2], GROUP * tile.splits))


def _check(x: torch.Tensor, w: PlanesMatrix, n: int, tile: FewTile, num_columns: int) -> None:
    assert num_columns in (8, 16), num_columns
    assert n % tile.outputs == 0
    assert x.stride(1) == 1
    assert x.stride(0) % 8 == 0
    assert w.words.is_contiguous()
    assert w.scales.is_contiguous()


@gluon.jit
def _product_kernel(
    x_ptr, words_ptr, scales_ptr, factors_ptr, bias_ptr, out_ptr, pairs_ptr, experts_ptr, tile_rows_ptr, n,
    stride_x, stride_scales, stride_logits,
    EXPERTS: gl.constexpr, PADDED: gl.constexpr,
    K: gl.constexpr, KIND: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PAIRS_PER_ROW: gl.constexpr,
    IS_DIRECT: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    MEMBERS: gl.constexpr, OUTPUTS: gl.constexpr, SPLITS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """OUTPUTS values of one tile of rows. IS_DIRECT: tile i is the pair i alone. EXPERTS: experts_ptr is of logits."""
    tile = gl.program_id(1)
    first = gl.program_id(0) * OUTPUTS
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    HALVES: gl.constexpr = 1 if GATE == "" else 2
    SETTINGS: gl.constexpr = (K, KIND, COLUMNS, SPLITS, AHEAD, HALVES)
    TILES: gl.constexpr = SPLITS * OUTPUTS // 16
    N: gl.constexpr = SPLITS * MEMBERS
    CODES: gl.constexpr = code_layout(16 * TILES, gl.num_warps())
    LINES: gl.constexpr = row_layout(N, gl.num_warps())
    split, features = place_rows(TILES, SPLITS, gl.SliceLayout(1, CODES))
    columns = gl.arange(0, N, gl.SliceLayout(0, LINES))
    members = columns % MEMBERS
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    if EXPERTS > 0:
        ranks, _ = rank_experts(experts_ptr + tile // PAIRS_PER_ROW * stride_logits, EXPERTS, PADDED)
        expert, _, ranks = take_expert(ranks, PADDED)
        for _ in range(tile % PAIRS_PER_ROW):
            expert, _, ranks = take_expert(ranks, PADDED)
        expert = expert.to(gl.int64)
    else:
        expert = gl.load(experts_ptr + tile).to(gl.int64)
    if IS_DIRECT:  # noqa: SIM108 - Gluon decides it while it compiles
        num_rows = gl.where(expert < 0, 0, 1)  # none: an expert of another rank
    else:
        num_rows = gl.load(tile_rows_ptr + tile)
    if num_rows > 0:
        experts = gl.zeros([16 * TILES], gl.int64, gl.SliceLayout(1, CODES)) + expert
        word_ptrs, scale_ptrs, outputs, words_of_up, scales_of_up = sources(
            words_ptr, scales_ptr, experts, first + features, n, stride_scales, SETTINGS, ROWS
        )  # fmt: skip
        source = (word_ptrs, scale_ptrs, split, outputs, words_of_up, scales_of_up)
        # What the end needs is loaded in front, since it would wait for memory once more
        OUT: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [gl.num_warps(), 1], [0, 1])
        own = expert * outputs + first
        constants = _load_constants(factors_ptr, bias_ptr, own, OUTPUTS, KIND, HAS_BIAS, OUT)
        constants_of_ups = constants
        if HALVES == 2:
            constants_of_ups = _load_constants(factors_ptr, bias_ptr, own + n, OUTPUTS, KIND, HAS_BIAS, OUT)
        out_members = gl.arange(0, MEMBERS, gl.SliceLayout(0, OUT))
        is_out = out_members < num_rows
        out_pairs = _pairs_of(pairs_ptr, tile, out_members, is_out, MEMBERS, IS_DIRECT)
        held = load_ahead(source, SETTINGS)
        is_row = members < num_rows
        pairs = _pairs_of(pairs_ptr, tile, members, is_row, MEMBERS, IS_DIRECT)
        lines = x_ptr + gl.expand_dims(pairs // PAIRS_PER_ROW * stride_x, 0)
        lines += gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, LINES)), 1)
        sums, ups = sum_groups(held, source, (lines, columns // MEMBERS * _GROUP, is_row), SETTINGS)
        values = _finish(sums, constants, OUTPUTS, SPLITS, KIND, HAS_BIAS, OUT)
        if HALVES == 2:
            ups = _finish(ups, constants_of_ups, OUTPUTS, SPLITS, KIND, HAS_BIAS, OUT)
            values = activate(values, ups, GATE, ALPHA, LIMIT, DTYPE)
        out_features = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, OUT))
        targets = out_ptr + gl.expand_dims(out_pairs * n, 0) + gl.expand_dims(out_features, 1)
        gl.store(targets, values.to(DTYPE), mask=gl.expand_dims(is_out, 0).broadcast_to([OUTPUTS, MEMBERS]))


@jit
def _pairs_of(pairs_ptr, tile, members, is_row, MEMBERS: gl.constexpr, IS_DIRECT: gl.constexpr):
    """Return the pairs of some rows of a tile, int64."""
    if IS_DIRECT:
        return gl.zeros_like(members).to(gl.int64) + tile
    else:
        return gl.load(pairs_ptr + tile * MEMBERS + members, mask=is_row, other=0).to(gl.int64)


@jit
def _load_constants(
    factors_ptr, bias_ptr, first, OUTPUTS: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Return the factors and biases of outputs from `first` on among all experts', [OUTPUTS]; places without them."""
    places = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, OUT))
    factors, biases = places, places
    if KIND == "nvfp4":
        factors = gl.load(factors_ptr + places)
    if HAS_BIAS:
        biases = gl.load(bias_ptr + places)
    return factors, biases


@jit
def _finish(
    sums, constants, OUTPUTS: gl.constexpr, SPLITS: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Sum over the splits, times factors, plus biases: [OUTPUTS, MEMBERS] fp32. constants: from _load_constants."""
    MEMBERS: gl.constexpr = sums.shape[1] // SPLITS
    values = gl.sum(own_columns(sums, SPLITS), 1).reshape([OUTPUTS, MEMBERS])
    values = gl.convert_layout(values, OUT)
    if KIND == "nvfp4":
        values *= gl.expand_dims(constants[0], 1)
    if HAS_BIAS:
        values += gl.expand_dims(constants[1].to(gl.float32), 1)
    return values


@gluon.jit
def _sum_kernel(
    x_ptr, words_ptr, scales_ptr, factors_ptr, bias_ptr, experts_ptr, weights_ptr, shared_ptr, shared_gate_ptr,
    out_ptr, n, stride_scales, stride_shared, stride_gate, stride_logits, floor, added, factor,
    EXPERTS: gl.constexpr, PADDED: gl.constexpr, RENORMALIZE: gl.constexpr, ROUNDS_WEIGHTS: gl.constexpr,
    K: gl.constexpr, KIND: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SHARED: gl.constexpr, TOP_K: gl.constexpr, PLACES: gl.constexpr, OUTPUTS: gl.constexpr, SPLITS: gl.constexpr,
    AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one token. A combination is one of its experts and a part of that one's inputs.

    The first product has waited for the routing, or the logits, before it let this kernel start. So they may be read
    before the wait for that product itself.
    """
    token = gl.program_id(1)
    first = gl.program_id(0) * OUTPUTS
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    SETTINGS: gl.constexpr = (K, KIND, COLUMNS, SPLITS, AHEAD, 1)
    N: gl.constexpr = PLACES * SPLITS
    TILES: gl.constexpr = N * OUTPUTS // 16
    CODES: gl.constexpr = code_layout(16 * TILES, gl.num_warps())
    LINES: gl.constexpr = row_layout(N, gl.num_warps())
    combination, features = place_rows(TILES, N, gl.SliceLayout(1, CODES))
    OUT: gl.constexpr = gl.BlockedLayout([PLACES, 1], [1, 32], [1, gl.num_warps()], [0, 1])
    places = gl.arange(0, PLACES, gl.SliceLayout(1, OUT))
    if EXPERTS > 0:
        ranks, no_numbers = rank_experts(experts_ptr + token * stride_logits, EXPERTS, PADDED)
        experts, place_experts, bits = take_all(ranks, combination // SPLITS, places, TOP_K, PADDED)
    else:
        row_pairs = token * TOP_K + gl.minimum(combination // SPLITS, TOP_K - 1)
        experts = gl.maximum(gl.load(experts_ptr + row_pairs, cache_modifier=".cg"), 0)
        place_experts = gl.load(experts_ptr + token * TOP_K + gl.minimum(places, TOP_K - 1), cache_modifier=".cg")
        bits, no_numbers = places, 0  # of no use
    experts = experts.to(gl.int64)
    word_ptrs, scale_ptrs, outputs, words_of_up, scales_of_up = sources(
        words_ptr, scales_ptr, experts, first + features, n, stride_scales, SETTINGS, ROWS
    )  # fmt: skip
    source = (word_ptrs, scale_ptrs, combination % SPLITS, outputs, words_of_up, scales_of_up)
    columns = gl.arange(0, N, gl.SliceLayout(0, LINES))
    pairs = token * TOP_K + gl.minimum(columns // SPLITS, TOP_K - 1)
    is_row = columns // SPLITS < TOP_K
    features = first + gl.arange(0, OUTPUTS, gl.SliceLayout(0, OUT))
    at = gl.expand_dims(gl.maximum(place_experts, 0).to(gl.int64) * n, 1) + gl.expand_dims(features, 0)
    weights = bits
    if EXPERTS == 0:  # what is between the products of an absent expert is no number, perhaps
        is_row = is_row & (gl.load(experts_ptr + pairs, cache_modifier=".cg") >= 0)
        weights = gl.load(weights_ptr + token * TOP_K + gl.minimum(places, TOP_K - 1), cache_modifier=".cg")
    factors, biases = weights, weights  # of no use without them
    if KIND == "nvfp4":
        factors = gl.load(factors_ptr + at)
    if HAS_BIAS:
        biases = gl.load(bias_ptr + at)
    held = load_ahead(source, SETTINGS)
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    lines = x_ptr + gl.expand_dims(pairs.to(gl.int64) * K, 0)
    lines += gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, LINES)), 1)
    sums, _ = sum_groups(held, source, (lines, columns % SPLITS * _GROUP, is_row), SETTINGS)
    own = own_columns(sums, N).reshape([OUTPUTS // 16, PLACES, SPLITS, 16])
    values = gl.sum(own, 2).permute([1, 0, 2]).reshape([PLACES, OUTPUTS])
    values = gl.convert_layout(values, OUT)
    if KIND == "nvfp4":
        values *= factors
    if HAS_BIAS:
        values += biases.to(gl.float32)
    if EXPERTS > 0:
        weights = gl.where(places < TOP_K, weights.to(gl.float32, bitcast=True), 0.0)
        if RENORMALIZE:
            weights = weights / (gl.maximum(gl.sum(weights, 0), floor) + added)
        weights = gl.where(no_numbers > 0, float("nan"), weights * factor)
    else:
        weights = weights.to(gl.float32)
    if ROUNDS_WEIGHTS:
        weights = round_to(weights, DTYPE)
    weighed = round_to(values, DTYPE) * gl.expand_dims(weights, 1)
    if ROUNDS_WEIGHTS:
        weighed = round_to(weighed, DTYPE)
    is_here = gl.expand_dims((places < TOP_K) & (place_experts >= 0), 1)
    mixed = gl.sum(gl.where(is_here, weighed, 0.0), 0).to(DTYPE)
    if HAS_SHARED:
        gate = gl.load(shared_gate_ptr + token * stride_gate).to(gl.float32)
        shared = gl.load(shared_ptr + token * stride_shared + features).to(gl.float32)
        scale = round_to(1.0 / (1.0 + gl.exp(-gate)), DTYPE)
        mixed = (mixed.to(gl.float32) + round_to(scale * shared, DTYPE)).to(DTYPE)
    gl.store(out_ptr + token.to(gl.int64) * n + features, mixed)
