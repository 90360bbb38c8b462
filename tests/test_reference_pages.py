"""The generated pages of docs/reference are what their sources say."""

import pytest

from tests.reference_pages import PAGES, rules_of


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_generated_page_is_not_stale(path):
    assert PAGES[path]() == path.read_text(encoding="utf-8"), "run make reference-pages"


def test_rules_belong_to_the_test_below_them():
    text = (
        "# rule: Fields: one\n#     that goes on\n# rule: Limits: two\n@mark\ndef test_a():\n    # no rule\n\n\n"
        "# rule: Fields: three\nasync def test_b():\n"
    )
    assert list(rules_of(text)) == [
        ("Fields: one that goes on", "test_a"),
        ("Limits: two", "test_a"),
        ("Fields: three", "test_b"),
    ]


def test_a_rule_without_a_test_is_a_fault():
    with pytest.raises(ValueError, match="no test below"):
        list(rules_of("# rule: Fields: one\ndef helper():\n"))
