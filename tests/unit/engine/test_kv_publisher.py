"""Events of the prefix cache over ZeroMQ, as real subscribers receive them: form, numbers, replay, and who is slow."""

import sys
import time
from array import array

import msgspec
import pytest

from engine.core.kv_events import Medium, Removed, Stored
from engine.interface.config import CacheGroup, KvEventsConfig
from engine.interface.errors import StartupError
from engine.kv_publisher import EventEncoder, KvPublisher
from tests.support.cache_traces import Trace
from tests.support.kv_subscriber import HeldBlocks, named, truth
from tests.unit.engine.core.test_disk_tier import settle, with_disk

zmq = pytest.importorskip("zmq")

GROUPS = (CacheGroup("full", 4), CacheGroup("window", 8, window=16), CacheGroup("state", 8))
WAIT_MS = 60_000


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def make(context, tmp_path):
    """Return a function that makes a publisher and a subscriber of it, which has the first batch."""
    made = []

    def make(*, event_format="array", is_subscribed=True, sub_hwm=0, **fields):
        endpoint = f"ipc://{tmp_path}/{len(made)}"
        config = KvEventsConfig(endpoint=endpoint, topic="kv@pod@model", event_format=event_format, **fields)
        publisher = KvPublisher(config)
        made.append(publisher)
        sub = context.socket(zmq.SUB)
        sub.set_hwm(sub_hwm)
        if is_subscribed:
            subscribe(sub, endpoint, "kv@")
        publisher.start(EventEncoder(GROUPS, ["french", "maths"], is_map=event_format == "map"))
        return publisher, sub

    yield make
    for publisher in made:
        publisher.close()


def subscribe(sub, endpoint, topic):
    """Connect a subscriber to a publisher that is there; wait until it would hear of a message."""
    monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    sub.subscribe(topic)
    sub.connect(endpoint)
    assert monitor.poll(WAIT_MS), "no connection"
    sub.disable_monitor()
    time.sleep(0.1)  # the subscription follows the handshake


def receive(sub):
    assert sub.poll(WAIT_MS), "nothing came"
    topic, number, payload = sub.recv_multipart()
    assert topic == b"kv@pod@model"
    return int.from_bytes(number, "big"), payload


def stored(number):
    return Stored(Medium.DEVICE, 0, [number], None, _ids(4), 0)


def _ids(count):
    return array("i", range(count))


def replay_of(context, endpoint, first):
    """Ask for the batches from a number on; return their numbers and the batches."""
    asker = context.socket(zmq.DEALER)
    asker.set_hwm(0)
    asker.connect(endpoint)
    asker.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        assert asker.poll(WAIT_MS), "the replay does not end"
        delimiter, number, payload = asker.recv_multipart()
        assert delimiter == b""
        if not payload:
            assert number == b"\xff" * 8
            return batches
        batches.append((int.from_bytes(number, "big"), payload))


def test_a_batch_has_the_form_of_vllm_positional(make):
    publisher, sub = make()
    before = time.time()
    assert msgspec.msgpack.decode(receive(sub)[1])[1:] == [[["AllBlocksCleared"]], 0]
    publisher.publish(
        [
            Stored(Medium.DEVICE, 0, [2**64 - 1, 5], 7, _ids(8), 2),
            Stored(Medium.DISK, 1, [6], None, _ids(0), 0),
            Removed(Medium.HOST, 0, [9]),
            Removed(Medium.DISK, 2, [8]),
        ]
    )
    number, payload = receive(sub)
    assert number == 1
    time_s, events, rank = msgspec.msgpack.decode(payload)
    assert before <= time_s <= time.time()
    assert rank == 0
    assert events == [
        ["BlockStored", [2**64 - 1, 5], 7, list(range(8)), 4, 2, "GPU", "maths", None, 0, "full_attention"],
        ["BlockStored", [6], None, [], 8, None, "STORAGE", None, None, 1, "sliding_window", 16, "LOCAL"],
        ["BlockRemoved", [9], "CPU", 0],
        ["BlockRemoved", [8], "STORAGE", 2, "LOCAL"],
    ]


def test_a_batch_has_the_form_of_vllm_by_names(make):
    publisher, sub = make(event_format="map")
    assert msgspec.msgpack.decode(receive(sub)[1])[1] == [{"type": "AllBlocksCleared"}]
    publisher.publish([Stored(Medium.DEVICE, 0, [5], None, _ids(4), 0), Removed(Medium.HOST, 0, [9])])
    first, second = msgspec.msgpack.decode(receive(sub)[1])[1]
    assert first == {
        "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [0, 1, 2, 3],
        "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None, "locality": None,
    }  # fmt: skip
    assert named(second) == (
        "BlockRemoved",
        {"block_hashes": [9], "medium": "CPU", "group_idx": 0, "locality": None},
    )


def test_a_router_rebuilds_what_every_tier_holds_from_the_wire(make):
    """Random traces of an engine with all tiers, and a subscriber that knows nothing but what it receives."""
    publisher, sub = make()
    known = HeldBlocks()
    harness, disk = with_disk("full", num_slots=60)
    events = harness.engine.report_kv_events(publisher.publish)
    for number in range(12):
        harness.add(f"a{number}", [number % 5] * 9 + list(range(number)), 3)
        harness.turn(5)
        if disk.blocks:
            disk.evict(next(iter(disk.blocks)))
    harness.drain()
    settle(harness, disk)
    harness.turn()
    for expected in range(publisher.num_published):
        number, payload = receive(sub)
        assert number == expected
        known.receive(payload)
    assert known.num_cleared == 1
    assert known.held == truth(harness.scheduler.kv, events, events.held(Medium.DISK))
    assert all(known.held.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_router_knows_what_a_pool_of_any_groups_holds_from_the_wire(context, tmp_path, seed):
    trace, known, made = Trace.draw(seed, is_tiered=seed % 2 == 0), HeldBlocks(), []
    publisher = KvPublisher(KvEventsConfig(endpoint=f"ipc://{tmp_path}/events"))
    sub = context.socket(zmq.SUB)
    sub.set_hwm(0)
    subscribe(sub, f"ipc://{tmp_path}/events", "")
    publisher.start(EventEncoder(trace.groups, ["one", "two"], is_map=False))
    harness = trace.replay(
        depth=2, change=lambda harness: made.append(harness.engine.report_kv_events(publisher.publish))
    )
    for _ in range(publisher.num_published):
        assert sub.poll(WAIT_MS)
        known.receive(sub.recv_multipart()[2])
    assert known.held == truth(harness.scheduler.kv, made[0])
    publisher.close()


def test_a_subscriber_that_missed_batches_gets_them_again(make, context, tmp_path):
    publisher, sub = make(replay_endpoint=f"ipc://{tmp_path}/replay", buffer_steps=5)
    for number in range(10):
        publisher.publish([stored(number)])
    sent = [receive(sub) for _ in range(11)]
    assert [number for number, _ in sent] == list(range(11))
    assert replay_of(context, f"ipc://{tmp_path}/replay", 8) == sent[8:]
    assert replay_of(context, f"ipc://{tmp_path}/replay", 0) == sent[-5:], "of the last buffer_steps"
    assert replay_of(context, f"ipc://{tmp_path}/replay", 11) == []


def test_a_long_replay_is_whole(make, context, tmp_path):
    publisher, _ = make(replay_endpoint=f"ipc://{tmp_path}/replay", is_subscribed=False)
    for number in range(5000):
        publisher.publish([stored(number)])
    assert [number for number, _ in replay_of(context, f"ipc://{tmp_path}/replay", 1)][-1] <= 5000
    deadline_s = time.monotonic() + 60
    while len(replay_of(context, f"ipc://{tmp_path}/replay", 0)) < 5001:
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"short"], [b"", b"1" * 8, b"more"]])
def test_a_request_that_is_none_is_ignored(make, context, tmp_path, frames):
    publisher, sub = make(replay_endpoint=f"ipc://{tmp_path}/replay")
    asker = context.socket(zmq.DEALER)
    asker.connect(f"ipc://{tmp_path}/replay")
    asker.send_multipart(frames)
    publisher.publish([stored(1)])
    assert [receive(sub)[0] for _ in range(2)] == [0, 1]
    assert [number for number, _ in replay_of(context, f"ipc://{tmp_path}/replay", 1)] == [1]


def test_what_finds_the_queue_full_is_lost_and_its_number_is_missing(make, monkeypatch):
    publisher, sub = make(max_queue_size=2)
    assert receive(sub)[0] == 0
    lock = publisher._changed
    monkeypatch.setattr(publisher, "_next", lambda: None)  # the thread takes nothing
    for number in range(4):
        publisher.publish([stored(number)])
    assert (publisher.num_published, publisher.num_lost) == (3, 2)
    monkeypatch.undo()
    with lock:
        publisher._wake()
    assert [receive(sub)[0] for _ in range(2)] == [1, 2]
    publisher.publish([stored(9)])
    assert receive(sub)[0] == 5


def test_a_subscriber_that_takes_nothing_in_stops_nobody(make, context):
    publisher, slow = make(hwm=10, sub_hwm=1)
    for number in range(3000):
        publisher.publish([stored(number)])
    deadline_s = time.monotonic() + 60
    while publisher._queue:
        assert time.monotonic() < deadline_s, "the thread waits for the subscriber"
        time.sleep(0.01)
    assert publisher.num_lost == 0
    assert receive(slow)[0] == 0


def test_an_endpoint_that_is_taken_or_wrong_is_refused():
    with pytest.raises(StartupError, match=r"--kv-events-config: endpoint 'tcp://nowhere.:x' cannot be used: Invalid"):
        KvPublisher(KvEventsConfig(endpoint="tcp://nowhere*:x"))
    bound = KvPublisher(KvEventsConfig(endpoint="tcp://*:*", replay_endpoint=None))
    taken = bound._pub.getsockopt_string(zmq.LAST_ENDPOINT).replace("0.0.0.0", "*")
    with pytest.raises(StartupError, match=r"endpoint 'tcp://\*:\d+' cannot be used: Address already in use"):
        KvPublisher(KvEventsConfig(endpoint=taken))
    with pytest.raises(StartupError, match=r"replay_endpoint .* cannot be used"):
        KvPublisher(KvEventsConfig(endpoint="tcp://*:*", replay_endpoint=taken))
    bound.close()


def test_without_pyzmq_the_sentence_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(StartupError, match=r"pyzmq is not installed: pip install pyzmq"):
        KvPublisher(KvEventsConfig())
