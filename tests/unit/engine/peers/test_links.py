"""Connections between prefill and decode engines: greetings, refusals by a sentence, losses and returns."""

import pytest

from engine.peers.links import DecodeLinks, PrefillLinks, describe_difference
from engine.peers.messages import HandedOver, PeerHello, Taken, Welcome

FACTS = {"dtype": "torch.bfloat16", "kv_dtype": "torch.bfloat16", "block_size": "16", "weights": "ab" * 60}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "peer.sock")


def connect(path, clock, *, facts=FACTS, index=0):
    return DecodeLinks([path], PeerHello(index, facts), clock=clock)


def test_a_decode_engine_is_welcomed_and_messages_go_both_ways(path, clock):
    sockets = []
    prefill = PrefillLinks(path, FACTS, lambda: b"memory", on_socket=sockets.append, off_socket=sockets.remove)
    decode = connect(path, clock, index=2)
    assert decode.poll() == []
    assert prefill.poll() == []
    assert prefill.peers == [2]
    assert len(sockets) == 2  # the listener and the connection
    prefill.send(2, HandedOver("a"))
    assert decode.poll() == [(0, Welcome(b"memory")), (0, HandedOver("a"))]
    decode.send(0, Taken([1, 2]))
    assert prefill.poll() == [(2, Taken([1, 2]))]
    decode.close()
    assert prefill.poll() == [(2, None)]
    assert prefill.peers == []
    prefill.close()
    assert sockets == []


def test_a_lost_prefill_engine_is_tried_again(path, clock):
    prefill = PrefillLinks(path, FACTS, lambda: b"first")
    decode = connect(path, clock)
    decode.poll()
    prefill.poll()
    decode.poll()
    prefill.close()
    assert decode.poll() == [(0, None)]
    assert decode.poll() == []  # nobody listens
    following = PrefillLinks(path, FACTS, lambda: b"next")
    assert decode.poll() == []
    clock.now += 1
    decode.poll()
    following.poll()
    assert decode.poll() == [(0, Welcome(b"next"))]


def test_the_next_process_of_a_decode_engine_takes_its_place(path, clock):
    prefill = PrefillLinks(path, FACTS, lambda: b"")
    first, following = connect(path, clock), connect(path, clock)
    first.poll()
    prefill.poll()
    following.poll()
    assert prefill.poll() == [(0, None)]
    assert prefill.peers == [0]
    prefill.send(0, HandedOver("a"))
    assert (0, HandedOver("a")) in following.poll()


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"kv_dtype": "torch.float8_e4m3fn"}, "kv_dtype is torch.float8_e4m3fn here and torch.bfloat16 there"),
        ({"block_size": "32"}, "block_size is 32 here and 16 there"),
        ({"weights": "cd" * 60}, "weights is cdcd"),
        ({"dtype": "torch.float32", "block_size": "1"}, "block_size is 1 here"),
    ],
)
def test_unequal_engines_are_refused_by_a_sentence(path, clock, facts, says):
    prefill = PrefillLinks(path, FACTS, lambda: b"")
    decode = connect(path, clock, facts=FACTS | facts)
    decode.poll()
    assert prefill.poll() == []
    assert prefill.peers == []
    assert decode.poll() == []
    assert says in decode.refusals[0]
    assert decode.refusals[0].startswith("Blocks of the prefill engine cannot be used: ")
    assert decode.poll() == [(0, None)]


def test_a_refused_engine_asks_again_later(path, clock):
    prefill = PrefillLinks(path, FACTS, lambda: b"")
    decode = connect(path, clock, facts=FACTS | {"dtype": "other"})
    for _ in range(3):
        decode.poll()
        prefill.poll()
    prefill.close()
    following = PrefillLinks(path, FACTS | {"dtype": "other"}, lambda: b"")
    clock.now += 5
    decode.poll()
    following.poll()
    assert following.peers == []
    clock.now += 6
    decode.poll()
    following.poll()
    assert decode.poll() == [(0, Welcome(b""))]
    assert decode.refusals == {}


def test_unequal_numbers_of_ranks_are_named_by_their_flag_alone():
    two, four = ({"page_layout": layout, "tensor_parallel_size": n} for layout, n in (("a", "2"), ("b", "4")))
    assert describe_difference(two, four, peer="the prefill engine") == (
        "Blocks of the prefill engine cannot be used: --tensor-parallel-size is 2 here and 4 there. Each rank takes its"
        " part of a block from the same rank there, so that both need the same number."
    )


def test_many_differences_are_counted():
    assert describe_difference({}, {}, peer="x") == ""
    told = describe_difference(dict.fromkeys("abcde", "1"), dict.fromkeys("abcde", "2"), peer="x")
    assert told.endswith("c is 1 here and 2 there and 2 more.")
    assert "a is 1 here and unknown there" in describe_difference({"a": "1"}, {}, peer="x")
