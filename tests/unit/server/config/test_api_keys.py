"""API keys: where they come from, what is wrong usage, and that none is ever shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface.errors import StartupError
from server.config.api_keys import KeyRing, cache_salt_of, merge_roles, read_file_roles, read_key_hashes

KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=80)


def read(keys: list[str], file: str | None = None, **environment: str) -> list[str]:
    return read_key_hashes(keys, file=file, environment=environment)


# rule: Security: Keys from flags, a file, the environment; hashed; compared in constant time
def test_keys_come_from_flags_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the lab\nfrom-file-1\n\n  from-file-2  \n")
    environment = {"QUIRE_API_KEY": " env-1,env-2 ", "HOME": "/"}
    hashes = read_key_hashes(["flag", "flag"], file=str(file), environment=environment)
    ring = KeyRing(hashes)
    assert len(hashes) == 5
    for key in ("flag", "from-file-1", "from-file-2", "env-1", "env-2"):
        assert ring.find(key) in hashes
    for key in ("", "# of the lab", "env-1,env-2", "flag ", "FLAG"):
        assert ring.find(key) is None
    assert environment == {"HOME": "/"}  # nothing for a child to inherit
    assert not any("flag" in value or "env" in value for value in hashes)


# rule: Security: A key of the file may have roles: inference, metrics, admin, priority
def test_keys_of_a_file_may_have_roles(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("all\nscraper metrics\n  urgent\tinference,priority \nscraper admin\nall metrics\n# x y\n")
    given = read(["all", "flag", "urgent"])
    roles = merge_roles(given, read_file_roles(str(file)))
    ring = KeyRing(list(roles), roles=roles)
    found = {key: set(ring.roles_of(ring.find(key) or "")) for key in ("all", "scraper", "urgent", "flag")}
    every = {"inference", "metrics", "admin"}
    assert found == {"all": every, "scraper": {"metrics", "admin"}, "urgent": every | {"priority"}, "flag": every}


@pytest.mark.parametrize("line", ["key boss", "two words", "key inference metrics-only", "key inference;metrics"])
def test_more_than_a_key_and_its_roles_is_wrong_usage_and_not_quoted(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"fine\n\n{line}\n")
    with pytest.raises(StartupError, match="line 3 has more than a key, and not only roles") as caught:
        read([], str(file))
    assert not any(word in caught.value.message for word in ("boss", "two words", "metrics-only", ";"))


def test_without_any_source_there_are_no_keys() -> None:
    assert read([]) == []
    assert read([], QUIRE_API_KEY="") == []


@pytest.mark.parametrize(
    ("keys", "environment", "words"),
    [
        ([""], "", "--api-key has an empty key"),
        (["a b"], "", "--api-key has a key with a space"),
        (["schlüssel"], "", "printable ASCII"),
        (["x" * 513], "", "513 characters, the limit is 512"),
        ([], "a,,b", "QUIRE_API_KEY has an empty key"),
        ([], ",", "QUIRE_API_KEY has an empty key"),
    ],
)
def test_a_key_that_no_header_can_carry_is_wrong_usage(keys: list[str], environment: str, words: str) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        read(keys, QUIRE_API_KEY=environment)
    assert caught.value.exit_code == 2
    assert not any(key in caught.value.message for key in keys if key)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read: No such file"), (b"\n# x\n", "has no key"), (b"\xff", "not UTF-8")]
)
def test_a_key_file_without_keys_is_wrong_usage(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match=words) as caught:
        read([], str(file))
    assert caught.value.exit_code == 2


# rule: Security: Keys from flags, a file, the environment; hashed; compared in constant time
@given(st.lists(KEYS, min_size=1, max_size=5), KEYS)
def test_a_ring_knows_its_keys_and_no_others(keys: list[str], other: str) -> None:
    ring = KeyRing(read(keys))
    assert all(ring.find(key) for key in keys)
    assert (ring.find(other) is not None) == (other in keys)


# rule: Security: Two keys share no cached prefix
def test_salts_of_different_keys_never_meet() -> None:
    one, two = read(["one", "two"])
    salts = {cache_salt_of(key, salt) for key in (one, two) for salt in ("", "a", "b")}
    assert len(salts) == 6
    assert cache_salt_of(one, "a") == cache_salt_of(one, "a")
    assert not any(one in salt or two in salt for salt in salts)
    assert cache_salt_of("", "a") == "a"


# rule: Security: Keys from flags, a file, the environment; hashed; compared in constant time
@pytest.mark.parametrize("presented", ["key-0", "key-1", "key-2", "key-", "other", "", "k" * 5000])
def test_every_key_is_compared_whole_whichever_is_presented(monkeypatch: pytest.MonkeyPatch, presented: str) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def record(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return known == given

    hashes = read(["key-0", "key-1", "key-2"])
    ring = KeyRing(hashes)
    monkeypatch.setattr(
        "server.config.api_keys.hmac.compare_digest", record
    )  # which takes no longer for a longer match
    ring.find(presented)
    assert [known for known, _ in compared] == [value.encode() for value in hashes]
    assert {len(given) for _, given in compared} == {64}
