"""--disaggregate and its details: what they make of an engine's configuration, and what is refused by a sentence."""

import argparse

import pytest
import trustme

from engine.interface.config import PeerConfig, PrefillHost
from engine.interface.errors import StartupError
from server.cli import serve_parser
from server.config.disaggregation import engine_counts, min_prefill_tokens, peer_of
from server.config.host_links import host_links_of, prefill_hosts


def parsed(*flags):
    return serve_parser({}).parse_args(list(flags))


def test_without_the_flag_there_is_one_engine():
    assert peer_of(parsed()) is None
    assert min_prefill_tokens(parsed()) == 256


def test_the_first_decode_engines_part_names_the_numbers_of_both():
    arguments = parsed("--disaggregate", "2P3d", "--disaggregate-from", "1024")
    expected = PeerConfig(role="decode", index=0, num_prefill=2, num_decode=3, transport="shared-memory")
    assert peer_of(arguments) == expected
    assert expected.num_engines == 5
    assert expected.name == "decode-0"
    assert min_prefill_tokens(arguments) == 1024


def test_each_engine_may_be_split():
    arguments = parsed("--disaggregate", "1p1d", "--tensor-parallel-size", "2")
    assert peer_of(arguments) == peer_of(parsed("--disaggregate", "1p1d"))


@pytest.mark.parametrize(
    "form", ["", "1", "0p", "17d", "1d2", "p", "p1d", "0p1d", "1p0d", "17p1d", "1p1d1", "-1p1d", "1d1p", "1.5p1d"]
)
def test_other_forms_are_refused(form):
    with pytest.raises(argparse.ArgumentTypeError, match="prefill engines and decode engines, 1 to 16 of each"):
        engine_counts(form)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--disaggregate-from", "9"], "--disaggregate-from 9 needs --disaggregate"),
        (["--kv-transport", "nixl"], "--kv-transport nixl needs --disaggregate"),
        (["--disaggregate", "1p1d", "--standby"], "--standby asks for"),
        (["--disaggregate", "1p1d", "--no-prefix-caching"], "--no-prefix-caching disables: use one of the two"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(flags, says):
    with pytest.raises(StartupError, match=says):
        peer_of(parsed(*flags))


def test_prefill_hosts_have_addresses_and_numbers_of_engines():
    assert prefill_hosts("10.0.0.2:8100, 2p@prefill.example:9,[fd00::2]:1") == [
        PrefillHost("10.0.0.2", 8100),
        PrefillHost("prefill.example", 9, 2),
        PrefillHost("fd00::2", 1),
    ]
    assert [host.address for host in prefill_hosts("16p@[::1]:65535")] == ["[::1]:65535"]


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("", "is not HOST:PORT"),
        ("host", "is not HOST:PORT with a port from 1 to 65,535"),
        ("host:0", "with a port from 1 to 65,535"),
        ("host:65536", "with a port from 1 to 65,535"),
        ("::1:80", "is not HOST:PORT"),
        ("0p@host:1", "N from 1 to 16 engines"),
        ("17p@host:1", "N from 1 to 16 engines"),
        ("2@host:1", "N from 1 to 16 engines"),
        ("user:x@host:1", "N from 1 to 16 engines"),
        ("a:1,a:1", "a:1 is there twice: 2p@a:1 has two engines"),
        ("a:1,", "is not HOST:PORT"),
        (",".join(f"a:{port}" for port in range(1, 18)), "there are 17 hosts; the limit is 16"),
    ],
)
def test_other_forms_of_hosts_are_refused(form, says):
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        prefill_hosts(form)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    (folder / "key.pem").chmod(0o600)
    (folder / "text.pem").write_text("no certificate")
    (folder / "text.pem").chmod(0o600)
    return folder


def with_files(folder, *flags, **changes):
    named = {"cert": "cert.pem", "key": "key.pem", "ca": "ca.pem"} | changes
    given = [word for name, file in named.items() if file for word in (f"--disaggregate-{name}", str(folder / file))]
    return parsed(*flags, *given)


SHARED = ("--kv-transport", "shared-memory")


def test_a_host_of_prefill_engines_alone_begins_with_one(files):
    arguments = with_files(files, "--disaggregate", "2p", "--disaggregate-listen", "127.0.0.1:8100", *SHARED)
    expected = PeerConfig(
        role="prefill", index=0, num_prefill=2, num_decode=0, is_on_several_hosts=True, transport="shared-memory"
    )
    assert peer_of(arguments) == expected
    links = host_links_of(arguments)
    assert links.listen == PrefillHost("127.0.0.1", 8100)
    assert [links.cert, links.key, links.ca] == [str(files / f"{name}.pem") for name in ("cert", "key", "ca")]


def test_a_host_that_decodes_has_numbers_of_its_own(files):
    flags = ("--disaggregate", "2d", "--prefill-hosts", "localhost:1,2p@localhost:2", *SHARED)
    first, second = (peer_of(with_files(files, *flags)) for _ in range(2))
    assert first.prefill_hosts == [PrefillHost("localhost", 1), PrefillHost("localhost", 2, 2)]
    assert (first.role, first.num_prefill, first.num_decode) == ("decode", 0, 2)
    assert 0 < first.first_decode != second.first_decode > 0
    assert first.first_decode % 256 == 0


def test_blocks_go_to_other_hosts_by_nixl(files, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    flags = ("--disaggregate", "1d", "--prefill-hosts", "10.0.0.2:1")
    assert peer_of(with_files(files, *flags)).transport == "nixl"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"go to other hosts by NIXL .*pip install nixl"):
        peer_of(with_files(files, *flags))


HOST = ["--disaggregate", "1d", "--prefill-hosts", "a:1"]


@pytest.mark.parametrize(
    ("flags", "changes", "says"),
    [
        (["--disaggregate-listen", "a:1"], {}, "--disaggregate-listen a:1 needs --disaggregate, for example 1p"),
        (["--prefill-hosts", "2p@a:1"], {}, "--prefill-hosts 2p@a:1 needs --disaggregate, for example 1d"),
        (["--disaggregate", "1p1d"], {}, "is for other hosts, and there is no --disaggregate-listen"),
        ([], {}, "is for other hosts, and there is no --disaggregate-listen or --prefill-hosts"),
        (["--disaggregate", "1p"], {}, "--disaggregate 1p computes prompts for other hosts alone"),
        (["--disaggregate", "1d"], {}, "--disaggregate 1d computes no prompts: --prefill-hosts HOST:PORT names"),
        (["--disaggregate", "1d", "--disaggregate-listen", "a:1"], {}, "computes no prompts"),
        (
            [*HOST, "--disaggregate-listen", "b:1"],
            {},
            "listen b:1 lends prefill engines, and .* 1d has none",
        ),
        (
            ["--disaggregate", "1p", "--disaggregate-listen", "a:1", "--prefill-hosts", "b:1"],
            {},
            "--prefill-hosts b:1 needs an engine that decodes, and --disaggregate 1p has none",
        ),
        (
            ["--disaggregate", "1p", "--disaggregate-listen", "a:1", "--disaggregate-from", "9"],
            {},
            "--disaggregate-from 9 is for hosts that decode",
        ),
        (
            ["--disaggregate", "1p1d", "--disaggregate-listen", "a:1", "--prefill-hosts", "a:1"],
            {},
            "--prefill-hosts a:1 is this server itself",
        ),
        (HOST, {"ca": None}, "needs --disaggregate-ca FILE as well"),
        (HOST, {"cert": None}, "needs --disaggregate-cert FILE as well"),
        (HOST, {"key": "none.pem"}, "none.pem cannot be read: No such"),
        (HOST, {"key": "text.pem"}, "--disaggregate-cert and .* cannot be used"),
        (HOST, {"ca": "text.pem"}, "--disaggregate-ca .* cannot be used"),
        (
            ["--disaggregate", "1d", "--prefill-hosts", "localhost:1,10.0.0.2:1", *SHARED],
            {},
            "--kv-transport shared-memory does not reach 10.0.0.2:1: memory is shared within one host",
        ),
        (
            ["--disaggregate", "1p", "--disaggregate-listen", "0.0.0.0:1", *SHARED],
            {},
            "--kv-transport shared-memory does not reach 0.0.0.0:1",
        ),
    ],
)
def test_flags_of_other_hosts_that_do_not_go_together_are_refused(flags, changes, says, files):
    with pytest.raises(StartupError, match=says):
        peer_of(with_files(files, *flags, **changes))


def test_a_key_that_all_users_can_read_is_refused(files, tmp_path):
    key = tmp_path / "open.pem"
    key.write_bytes((files / "key.pem").read_bytes())
    key.chmod(0o644)
    flags = ("--disaggregate", "1d", "--prefill-hosts", "localhost:1", *SHARED)
    with pytest.raises(StartupError, match=r"open\.pem has mode 0644, so that all users can use it: chmod 600"):
        peer_of(with_files(files, *flags, key=str(key)))
    key.chmod(0o440)  # as a secret of a Kubernetes pod has it
    assert peer_of(with_files(files, *flags, key=str(key))) is not None


def test_nixl_that_is_missing_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install nixl"):
        peer_of(parsed("--disaggregate", "1p1d", "--kv-transport", "nixl"))
