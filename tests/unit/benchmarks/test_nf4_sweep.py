"""What a sweep of the products with codes times, and the table that its results become."""

from __future__ import annotations

from benchmarks.nf4_candidates import SHAPES, Candidate, as_result, candidates, choose, launch, launches
from kernels.codes_configs import CodesCut

FIRST, SECOND = CodesCut("permute", 64, 4, 4, 2, 264), CodesCut("shared", 128, 4, 6, 2, 528)


def _result(shape, rows, cut, **measured):
    n, k = SHAPES[shape]
    facts = {"shape": shape, "n": n, "k": k, "rows": rows}
    return facts | as_result(Candidate(32, is_paired=True, cut=cut)) | measured


def test_the_table_takes_what_is_best_in_the_mean():
    results = [
        _result("qkv", 1, FIRST, us=10.0), _result("qkv", 1, SECOND, us=11.0),
        _result("o", 8, FIRST, us=10.0), _result("o", 8, SECOND, us=5.0),
        _result("gate_up", 64, FIRST, us=30.0),
    ]  # fmt: skip
    assert choose(results).split("\n") == [
        "PLANE = 32",
        "    (8, False): CodesCut('shared', 128, 4, 6, 2, 528, 8),  # 5.0% from each shape's best, in the mean",
        "    (64, True): CodesCut('permute', 64, 4, 4, 2, 264, 8),  # 0.0% from each shape's best, in the mean",
    ]


def test_a_cut_that_failed_anywhere_is_not_taken():
    results = [
        _result("qkv", 1, FIRST, us=10.0), _result("qkv", 1, SECOND, us=5.0),
        _result("o", 1, FIRST, us=10.0), _result("o", 1, SECOND, failed="does not fit"),
    ]  # fmt: skip
    assert "'permute'" in choose(results)
    assert choose([results[3]]) == ""


def test_every_timed_launch_is_compiled_ahead():
    compiled = set(launches())
    assert 0 < len(compiled) <= 600
    for num_rows in (1, 16, 64):
        for n, k in SHAPES.values():
            for candidate in candidates(max(8, num_rows)):
                assert launch(candidate, num_rows=num_rows, n=n, k=k) in compiled
