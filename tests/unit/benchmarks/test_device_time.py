"""Device time by kernel: waits inside other kernels count for none, shares add up, each kernel has a group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.device_time import (
    ATTENTION,
    COPIES,
    GROUPS,
    INPUTS,
    OTHERS,
    PRODUCTS,
    STATES,
    SUMS,
    Interval,
    Share,
    breakdown,
    group_of,
)


def test_a_kernel_that_waits_inside_the_one_before_it_counts_from_that_ones_end() -> None:
    """Of a chain with early launches the shares are the times between ends, and own_us is what profilers show."""
    chain = [Interval("_gemv_kernel", 0, 10), Interval("_decode_kernel", 2, 13), Interval("_rms_norm_kernel", 11, 14)]
    found = breakdown(reversed(chain), group_of)
    assert {name: share.us for name, share in found.kernels.items()} == {
        "_gemv_kernel": 10,
        "_decode_kernel": 3,
        "_rms_norm_kernel": 1,
    }
    assert found.kernels["_decode_kernel"] == Share(1, 3, 11)
    assert found.busy_us == 14
    assert found.short_gaps_us == found.long_gaps_us == 0


def test_a_kernel_inside_another_one_counts_for_nothing_and_hides_no_later_gap() -> None:
    found = breakdown([Interval("a", 0, 10), Interval("b", 1, 5), Interval("c", 12, 13)], group_of)
    assert found.kernels["b"] == Share(1, 0, 4)
    assert (found.busy_us, found.short_gaps_us, found.num_short_gaps) == (11, 2, 1)


def test_gaps_are_short_between_kernels_and_long_where_the_device_waits_for_the_host() -> None:
    found = breakdown(
        [Interval("a", 5, 6), Interval("a", 7, 8), Interval("a", 18, 19), Interval("a", 50, 51)], group_of
    )
    assert (found.num_short_gaps, found.short_gaps_us) == (2, 11)
    assert (found.num_long_gaps, found.long_gaps_us) == (1, 31)
    assert found.kernels["a"].num_calls == 4


def test_no_kernel_took_no_time() -> None:
    assert breakdown([], group_of).busy_us == 0


def test_groups_add_up_and_are_in_order() -> None:
    runs = [Interval("Memset (Device)", 0, 1), Interval("_gemv_kernel", 1, 3), Interval("_row_kernel", 3, 7)]
    groups = breakdown(runs, group_of).groups
    assert list(groups) == [PRODUCTS, COPIES]
    assert groups[PRODUCTS] == Share(2, 6, 6)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", PRODUCTS),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>", PRODUCTS),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16>", INPUTS),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", INPUTS),
        ("Memcpy DtoH (Device -> Pinned)", COPIES),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", SUMS),
        ("void flash::flash_fwd_splitkv_kernel<T>", ATTENTION),
        ("void at::native::vectorized_elementwise_kernel<8, sigmoid>", OTHERS),
        ("aten::linear", PRODUCTS),
    ],
)
def test_kernels_of_libraries_have_groups(name: str, group: str) -> None:
    assert group_of(name) == group


def test_each_own_kernel_has_a_group() -> None:
    launched = {
        name
        for path in Path("kernels").rglob("*.py")
        for name in re.findall(r"^def (_\w*kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert len(launched) > 50
    assert [name for name in sorted(launched) if group_of(name) in (OTHERS, COPIES)] == []
    assert {group_of(name) for name in launched} <= set(GROUPS)


def test_short_rows_are_states_or_latent_attention_by_the_model() -> None:
    assert group_of("_short_rows_kernel") == STATES
    assert group_of("_short_rows_kernel", has_states=False) == ATTENTION
