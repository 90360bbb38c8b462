"""Device time by kernel and by group of kernels, from when each kernel ran. Plain Python; never torch.

    breakdown(intervals, group_of) → Breakdown, in µs of all steps together

With programmatic dependent launch a kernel starts inside the one before it and waits there. So each moment belongs to
the kernel that began first of those that run: the kernels' shares add up to the time in which the device is busy, and
the waits count for none. `own_us` is a kernel's time with them, as profilers show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ATTENTION, PRODUCTS, LAYERS, STATES = "attention", "GEMMs", "whole layers", "states"
ROUTING, ROW_OPERATIONS, SAMPLING = "routing and sums of experts", "norms and row operations", "sampling"
INPUTS, SUMS, COPIES, OTHERS = "inputs", "sums over GPUs", "copies", "others"
GROUPS = (ATTENTION, PRODUCTS, LAYERS, STATES, ROUTING, ROW_OPERATIONS, SAMPLING, INPUTS, SUMS, COPIES, OTHERS)
SHORT_GAP_US = 10.0  # a longer time without a kernel is a wait for the host

_TWO_KINDS = "_short_rows_kernel"  # of kernels/delta_rule and of kernels/attention/triton_latent.py
_KERNELS = {
    ATTENTION: "decode decode8 prefill shared cut_rows group_rows long_rows merge",
    PRODUCTS: (
        "gemv row row8 tiled few_rows stream stream_int8 dequantize dequantize_int8 float4_gemm int_gemm lut4_gemm"
        " planes_gemm expand shrink group grouped pairs_up pairs_down planes planes_pairs_up planes_pairs_down fp8_up"
        " fp8_down product"
    ),
    LAYERS: "layers",
    STATES: (
        "short_rows causal_conv step scan scalars systems dimensions gates gated_rms_norm gated_norm dt pass_states"
        " segments"
    ),
    ROUTING: "route route_few lay_out sum_counts combine combine_norm sum",
    ROW_OPERATIONS: (
        "rms_norm layer_norm norm_rope_write_kv gate_and_mul gate_and_mul_row activate latent add_rms_norm"
        " quantize_rows quantize_rows_int8 quantize_groups quantize_by quantize_planes"
    ),
    SAMPLING: "sample allow penalize chunk cut",
    INPUTS: "gather gather_mixed gather_drafts",
    SUMS: "one_shot",
}
_GROUP_OF = {f"_{name}_kernel": group for group, names in _KERNELS.items() for name in names.split()}
_GROUP_OF["_kernel"] = PRODUCTS  # in Gluon: of dense layers and of experts
_PATTERNS = (  # of libraries' kernels, and of torch's operators on a CPU
    (SUMS, r"nccl"),
    (COPIES, r"^Mem(cpy|set)"),
    (ATTENTION, r"flash|fmha|attention"),
    (PRODUCTS, r"gemm|nvjet|cutlass|cublas|^aten::(linear|matmul|addmm|mm|bmm)$"),
    (INPUTS, r"[iI]ndex|gather_kernel|^aten::embedding$"),
)


class Interval(NamedTuple):
    """One run of a kernel, on one clock."""

    name: str
    start_us: float
    end_us: float


@dataclass
class Share:
    """The runs of one kernel, or of a group's. us: those moments that belong to it; own_us: with all its waits."""

    num_calls: int = 0
    us: float = 0.0
    own_us: float = 0.0

    def add(self, other: Share) -> None:
        """Add another share to this one."""
        self.num_calls += other.num_calls
        self.us += other.us
        self.own_us += other.own_us


@dataclass
class Breakdown:
    """Where the device's time went. Gaps are times without a kernel, between the first one and the last."""

    kernels: dict[str, Share] = field(default_factory=dict)  # most of the time first
    groups: dict[str, Share] = field(default_factory=dict)  # in the order of GROUPS
    busy_us: float = 0.0
    short_gaps_us: float = 0.0
    num_short_gaps: int = 0
    long_gaps_us: float = 0.0
    num_long_gaps: int = 0


def group_of(name: str, *, has_states: bool = True) -> str:
    """Return a kernel's group. has_states: whether the model has layers with states; two kernels share one name."""
    if name == _TWO_KINDS and not has_states:
        return ATTENTION
    if name in _GROUP_OF:
        return _GROUP_OF[name]
    return next((group for group, pattern in _PATTERNS if re.search(pattern, name)), OTHERS)


def breakdown(intervals: Iterable[Interval], group_of: Callable[[str], str]) -> Breakdown:
    """Return how the time of these runs is shared, in any order of them."""
    found = Breakdown()
    covered_us: float | None = None  # until when a kernel ran, of those that began earlier
    for name, start_us, end_us in sorted(intervals, key=lambda interval: interval[1:]):
        if covered_us is not None and start_us > covered_us:
            _add_gap(found, start_us - covered_us)
        begins_us = start_us if covered_us is None else max(start_us, covered_us)
        own = Share(1, max(end_us - begins_us, 0.0), end_us - start_us)
        found.kernels.setdefault(name, Share()).add(own)
        found.busy_us += own.us
        covered_us = end_us if covered_us is None else max(covered_us, end_us)
    found.kernels = dict(sorted(found.kernels.items(), key=lambda item: -item[1].us))
    shares: dict[str, Share] = {}
    for name, share in found.kernels.items():
        shares.setdefault(group_of(name), Share()).add(share)
    found.groups = {group: shares[group] for group in GROUPS if group in shares}
    return found


def _add_gap(found: Breakdown, gap_us: float) -> None:
    if gap_us <= SHORT_GAP_US:
        found.short_gaps_us += gap_us
        found.num_short_gaps += 1
    else:
        found.long_gaps_us += gap_us
        found.num_long_gaps += 1
