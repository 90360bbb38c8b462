"""Names, weights and limits of the key file: every field, its bounds, and errors that name line, field and value."""

from pathlib import Path

import pytest

from engine.interface.errors import StartupError
from engine.interface.tenant import Tenant
from server.config.api_keys import KeyRing, merge_roles, read_file_keys
from server.config.key_limits import FIELDS, MAX_NAMES


def read(folder: Path, text: str) -> dict[str, Tenant]:
    """Return the tenant of each key of a file, by the key."""
    file = folder / "keys"
    file.write_text(text)
    keys = read_file_keys(str(file))
    ring = KeyRing(list(keys.roles), roles=keys.roles, tenants=keys.tenants)
    names = [line.split()[0] for line in text.splitlines() if line.strip()]
    return {name: ring.tenant_of(ring.find(name) or "") for name in names}


# rule: Security: A key of the file may have a name, a weight and limits
def test_every_field_is_read_and_plain_keys_have_none(tmp_path: Path) -> None:
    tenants = read(
        tmp_path,
        "plain\n"
        "roles metrics,admin\n"
        "k1 name=team.a weight=2.5 requests_per_minute=60 tokens_per_minute=100000 tokens_at_once=4096 kv_share=0.5"
        " priority_ceiling=-3 grammar_seconds=1.5\n"
        "k2 inference,priority name=b\n",
    )
    assert tenants["plain"] == tenants["roles"] == Tenant()
    assert tenants["k1"] == Tenant(
        name="team.a",
        weight=2.5,
        requests_per_minute=60,
        tokens_per_minute=100_000,
        tokens_at_once=4096,
        kv_share=0.5,
        priority_ceiling=-3,
        grammar_seconds=1.5,
    )
    assert tenants["k2"] == Tenant(name="b")


def test_fields_and_roles_may_stand_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k name=a metrics weight=2 admin\n")
    keys = read_file_keys(str(file))
    assert list(keys.roles.values()) == [["metrics", "admin"]]
    assert merge_roles([], keys.roles) == keys.roles


@pytest.mark.parametrize("field", FIELDS.values(), ids=list(FIELDS))
def test_bounds_hold_at_their_edges(tmp_path: Path, field) -> None:
    for value in (field.low, field.high):
        (tenant,) = read(tmp_path, f"k name=a {field.name}={value}\n").values()
        assert getattr(tenant, field.name) == value
    step = 1 if field.is_whole else 1e-4
    wrong = [f"{field.low - step}", f"{field.high + 1}", "", "x", "nan", "inf", "1e999", "-"]
    for text in [*wrong, *["1.5"] * field.is_whole]:
        with pytest.raises(StartupError) as caught:
            read(tmp_path, f"k name=a\nl name=b {field.name}={text}\n")
        message = caught.value.message
        assert f"line 2: {field.name} is {text!r}; it must be a" in message
        assert f"from {field.low:.15g} to {field.high:.15g}" in message


@pytest.mark.parametrize("name", ["", "-a", "a/b", "ä", "x" * 65, "unnamed", "others"])
def test_a_wrong_name_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=r"line 1: name is .*; it must have 1 to 64 letters"):
        read(tmp_path, f"k name={name}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k weight=2", "line 1 has weight and no name: limits are those of a name"),
        ("k name=a name=b", "line 1 has name twice"),
        ("k name=a waight=secret", "line 1 has a field that is none of name, weight, requests_per_minute"),
        ("k name=a\nk name=b", "line 2 has other fields than an earlier line has for the same key"),
        ("k name=a weight=2\nl name=a weight=3", "keys with the name a have different weights or limits"),
        ("\n".join(f"k{i} name=n{i}" for i in range(MAX_NAMES + 1)), "has 1001 names, the limit is 1000"),
    ],
)
def test_contradictions_are_wrong_usage_and_no_key_is_quoted(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        read(tmp_path, text)
    assert "secret" not in caught.value.message


def test_a_key_and_its_successor_have_one_name(tmp_path: Path) -> None:
    tenants = read(tmp_path, "old name=a weight=2\nnew name=a weight=2\nold metrics\n")
    assert tenants["old"] == tenants["new"] == Tenant(name="a", weight=2)
