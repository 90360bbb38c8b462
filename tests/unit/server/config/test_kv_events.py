"""--kv-events-config: vLLM's JSON, whose unknown fields are refused by name."""

import argparse
import importlib.util

import pytest

from engine.interface.config import KvEventsConfig
from server.cli import serve_parser
from server.config.kv_flags import check_kv_events
from server.config.value_types import UsageError, kv_events


def test_the_fields_of_vllm_are_read():
    text = """{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:6000", "hwm": 9,
        "replay_endpoint": "tcp://*:6001", "buffer_steps": 7, "max_queue_size": 8, "topic": "kv@10.0.0.1@llama"}"""
    assert kv_events(text) == KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://*:6000",
        hwm=9,
        replay_endpoint="tcp://*:6001",
        buffer_steps=7,
        max_queue_size=8,
        topic="kv@10.0.0.1@llama",
    )


def test_the_defaults_are_those_of_vllm():
    assert kv_events('{"enable_kv_cache_events": true}') == KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://*:5557",
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
        topic="",
    )


@pytest.mark.parametrize("text", ["{}", '{"enable_kv_cache_events": true, "publisher": "null"}', '{"hwm": 5}'])
def test_nothing_is_published_unless_it_is_enabled(text):
    assert kv_events(text) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"endpoint_url": "x"}', "unknown field 'endpoint_url'; its fields are enable_kv_cache_events, publisher,"),
        ('{"hwm": 0}', r"Expected 'int' >= 1 - at '\$.hwm'"),
        ('{"enable_kv_cache_events": "yes"}', r"Expected 'bool', got 'str' - at '\$.enable_kv_cache_events'"),
        ('{"publisher": "nats"}', r"Invalid enum value 'nats' - at '\$.publisher'"),
        ('{"endpoint": ""}', r"Expected 'str' of length >= 1 - at '\$.endpoint'"),
        ("tcp://*:5557", "JSON is malformed"),
        ("[]", "Expected 'object', got 'array'"),
    ],
)
def test_what_is_wrong_is_refused_by_name(text, sentence):
    with pytest.raises(argparse.ArgumentTypeError, match=sentence):
        kv_events(text)


def test_what_cannot_be_published_is_refused_before_the_start(monkeypatch):
    arguments = ["--kv-events-config", '{"enable_kv_cache_events": true}']
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pyzmq is not installed: pip install pyzmq"):
        check_kv_events(serve_parser({}).parse_args(arguments))
    with pytest.raises(UsageError, match=r"--no-prefix-caching disables that: use one of the two"):
        check_kv_events(serve_parser({}).parse_args([*arguments, "--no-prefix-caching"]))
    with pytest.raises(UsageError, match=r"--disaggregate 1p2d has several: use one of the two"):
        check_kv_events(serve_parser({}).parse_args([*arguments, "--disaggregate", "1p2d"]))
