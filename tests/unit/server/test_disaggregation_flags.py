"""--disaggregate and its details: what they make of an engine's configuration, and what is refused by a sentence."""

import argparse

import pytest

from engine.interface.config import PeerConfig
from engine.interface.errors import StartupError
from server.cli import serve_parser
from server.config.disaggregation import engine_counts, min_prefill_tokens, peer_of


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
        (["--disaggregate", "1p1d", "--tensor-parallel-size", "2"], "--tensor-parallel-size is 2: use one of the two"),
        (["--disaggregate", "1p1d", "--standby"], "--standby asks for"),
        (["--disaggregate", "1p1d", "--no-prefix-caching"], "--no-prefix-caching disables: use one of the two"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(flags, says):
    with pytest.raises(StartupError, match=says):
        peer_of(parsed(*flags))


def test_nixl_that_is_missing_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install 'quire\[disaggregate\]'"):
        peer_of(parsed("--disaggregate", "1p1d", "--kv-transport", "nixl"))
