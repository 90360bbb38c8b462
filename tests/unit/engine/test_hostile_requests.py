"""Requests that no HTTP worker of ours sends: each ends with an error, and the engine serves the others."""

import math
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.request_factory import BOUNDS
from engine.interface.config import EngineConfig
from engine.interface.protocol import (
    AddRequest,
    GrammarSpec,
    QueueCosts,
    RequestFailed,
    SamplingParams,
    StepEvents,
    pack_token_ids,
)
from engine.interface.transport import SocketTransport, encode_frame
from engine.offline import OfflineEngine
from server.api.chat.request import ChatBody
from server.config.model_source import DEMO_FOLDER
from tests.support.fakes import READY

NAN, INF = math.nan, math.inf
HUGE, NEGATIVE = 2**63 - 1, -(2**63)
EVIL_INTEGERS = [NEGATIVE, -(2**31) - 1, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**53, HUGE, 2**64 - 1]
EVIL_FLOATS = [NAN, INF, -INF, -1.0, -0.0, 0.0, 1e-45, 1e-300, 0.5, 1.0, 2.0, 3.0, 1e39, 1e308]
integers, floats = st.sampled_from(EVIL_INTEGERS), st.sampled_from(EVIL_FLOATS)
ids = st.lists(st.sampled_from([NEGATIVE, -1, 0, 5, 7, 2**31, HUGE]), max_size=4)
good_ids = st.lists(st.integers(0, 9), max_size=4)
params = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 2, 3]) | integers},
    optional={
        "min_tokens": integers,
        "temperature": floats,
        "top_k": integers,
        "top_p": floats,
        "min_p": floats,
        "presence_penalty": floats,
        "frequency_penalty": floats,
        "repetition_penalty": floats,
        "seed": integers,
        "logit_bias": st.dictionaries(st.sampled_from([NEGATIVE, -1, 0, 5, HUGE]), floats, max_size=3),
        "stop_token_ids": ids,
        "bad_words": st.lists(ids | good_ids, max_size=3),
        "allowed_token_ids": ids | good_ids,
        "logprobs": integers,
        "prompt_logprobs": integers,
    },
)
prompts = st.builds(
    pack_token_ids, st.just([1, 2, 3]) | st.lists(st.sampled_from([-(2**31), -1, 0, 5, 7, 2**31 - 1]), max_size=4)
)
requests = st.fixed_dictionaries(
    {"prompt": prompts | st.binary(max_size=9), "params": params, "arrival_s": floats},
    optional={
        "priority": integers,
        "lora_index": integers,
        "pooling": st.sampled_from(["last", "mean"]),
        "cache_salt": st.text(max_size=3),
        "grammar": st.builds(GrammarSpec, st.sampled_from(["", "start: /[a-c]+/", "%json {", "\0" * 9])),
    },
)


@pytest.fixture(scope="module")
def offline() -> Iterator[OfflineEngine]:
    engine = OfflineEngine.load(EngineConfig(model=str(DEMO_FOLDER), device="cpu", max_num_seqs=4, max_model_len=64))
    yield engine
    engine.loaded.close()


def ends_of(offline: OfflineEngine, messages: list[AddRequest]) -> dict[str, list[str]]:
    """Serve the messages, as they arrive over a socket; return each request's reasons or error codes."""
    ends: dict[str, list[str]] = {message.request_id: [] for message in messages}
    offline.transport.inbox.extend((0, message) for message in messages)
    for _ in range(2000):
        offline.engine.run_once(0)
        while offline.transport.outbox:
            message = offline.transport.outbox.popleft()
            if isinstance(message, RequestFailed):
                ends[message.request_id].append(message.code)
            elif isinstance(message, StepEvents):
                for end in message.finished:
                    ends[message.request_ids[end.row]].append(end.reason)
        if offline.engine.is_idle and not offline.transport.inbox:
            return ends
    raise AssertionError(f"the engine does not become idle: {ends}")


def add(request_id: str, fields: dict[str, Any]) -> AddRequest:
    fields = {**fields, "params": SamplingParams(**fields["params"])}
    return AddRequest(request_id, **fields)


GOOD = {"prompt": pack_token_ids([1, 2, 3]), "params": {"max_tokens": 3}, "arrival_s": 0.0}


@given(st.lists(requests, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_each_hostile_request_ends_once_and_others_are_served(
    offline: OfflineEngine, hostile: list[dict[str, Any]]
) -> None:
    messages = [add(f"hostile {i}", fields) for i, fields in enumerate(hostile)]
    messages.insert(len(messages) // 2, add("good", GOOD))
    ends = ends_of(offline, messages)
    assert all(len(reasons) == 1 for reasons in ends.values()), ends
    assert ends["good"] == ["length"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"params": {"max_tokens": 0}}, "max_tokens"),
        ({"params": {"max_tokens": 1, "min_tokens": -1}}, "min_tokens"),
        ({"params": {"max_tokens": 1, "temperature": NAN}}, "temperature"),
        ({"params": {"max_tokens": 1, "temperature": -1.0}}, "temperature"),
        ({"params": {"max_tokens": 1, "top_k": 2**64 - 1}}, "top_k"),
        ({"params": {"max_tokens": 1, "seed": 2**63}}, "seed"),
        ({"params": {"max_tokens": 1, "repetition_penalty": 0.0}}, "repetition_penalty"),
        ({"params": {"max_tokens": 1, "logit_bias": {2**40: 1.0}}}, "logit_bias"),
        ({"params": {"max_tokens": 1, "logit_bias": {1: INF}}}, "logit_bias"),
        ({"params": {"max_tokens": 1, "stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"params": {"max_tokens": 1, "bad_words": [[]]}}, "bad_words"),
        ({"params": {"max_tokens": 1, "logprobs": 21}}, "logprobs"),
        ({"params": {"max_tokens": 1, "prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"prompt": pack_token_ids([1, 2**31 - 1])}, "prompt"),
        ({"prompt": pack_token_ids([-1, 1])}, "prompt"),
        ({"prompt": b"\1\0\0\0\2"}, "prompt"),
        ({"lora_index": 1}, "model"),
        ({"priority": 2**63}, "priority"),
        ({"arrival_s": NAN}, None),
    ],
    ids=str,
)
def test_the_refusal_names_the_field(offline: OfflineEngine, fields: dict[str, Any], param: str | None) -> None:
    sent: list[Any] = []
    offline.transport.inbox.append((0, add("hostile", GOOD | fields)))
    offline.engine.run_once(0)
    # what the queue costs is sent at times, whatever else is
    sent += [message for message in offline.transport.outbox if not isinstance(message, QueueCosts)]
    offline.transport.outbox.clear()
    assert [(message.code, message.param) for message in sent] == [("invalid_parameter", param)]


def test_the_engine_takes_all_values_that_the_api_takes() -> None:
    properties = ChatBody.model_json_schema()["properties"]
    for name, bounds in BOUNDS.items():
        if name in ("logprobs", "seed", "top_k"):  # of another type, or converted on the way
            continue
        (number,) = [kind for kind in properties[name]["anyOf"] if "maximum" in kind]
        assert (number["minimum"], number["maximum"]) == bounds, name


def hostile_frames() -> list[bytes]:
    """Frames that no worker sends: cut, changed, nested, of the wrong type."""
    draw = random.Random(0)
    good = encode_frame(add("r", GOOD))
    body = good[4:]
    frames = [len(nested).to_bytes(4, "little") + nested for depth in (100, 100_000) for nested in [b"\x91" * depth]]
    unknown = bytes([body[0] + 1]) + body[1:] + b"\xa1x" + b"\x91" * 100_000 + b"\xc0"
    frames.append(len(unknown).to_bytes(4, "little") + unknown)
    frames.append(b"\xff\xff\xff\xff")
    frames += [b"\x02\x00\x00\x00\xa1\xff", b"\x00\x00\x00\x00"]
    for _ in range(200):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(4, len(changed))] = draw.randrange(256)
        frames.append(bytes(changed))
    return frames


def test_a_hostile_frame_closes_its_own_connection_at_most(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    transport = SocketTransport(path, READY)
    with socket.socket(socket.AF_UNIX) as healthy:
        healthy.connect(path)
        for frame in hostile_frames():
            with socket.socket(socket.AF_UNIX) as worker:
                worker.connect(path)
                worker.sendall(frame)
                list(transport.receive(0))
                list(transport.receive(0))
            healthy.sendall(encode_frame(add("good", GOOD)))
            received: list[Any] = []
            while not any(isinstance(message, AddRequest) and message.request_id == "good" for message in received):
                received += [message for _, message in transport.receive(1.0)]
    transport.close()


def test_the_messages_of_this_file_survive_the_wire() -> None:
    """A value that msgpack cannot carry would test nothing."""
    message = add("r", GOOD | {"params": {"max_tokens": 2**64 - 1, "temperature": NAN, "seed": HUGE}})
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AddRequest)
    assert math.isnan(decoded.params.temperature)
    assert (decoded.params.max_tokens, decoded.params.seed) == (2**64 - 1, HUGE)
