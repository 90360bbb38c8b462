"""The rows of a long table that make test runs."""

import itertools

from tests.conftest import covering


def test_each_value_is_in_a_row_and_few_rows_are_kept():
    rows = [list(row) for row in itertools.product("ab", "abcde", "abc")]
    kept = covering(rows)
    assert len(kept) == 5
    assert [set(column) for column in zip(*(rows[place] for place in kept), strict=True)] == [
        set("ab"), set("abcde"), set("abc"),
    ]  # fmt: skip


def test_a_table_of_one_column_is_kept_whole_and_an_empty_one_is_empty():
    assert covering([["a"], ["b"], ["c"], ["d"]]) == {0, 1, 2, 3}
    assert covering([]) == set()
