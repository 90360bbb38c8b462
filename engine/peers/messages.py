"""Messages between a prefill engine and a decode engine, over a unix socket. Imports msgspec only; never torch.

The frames are those of engine/interface/transport.py. The bytes of blocks do not pass here: a decode engine reads them
out of the prefill engine's host memory by a KvTransport (engine/peers/kv_transport.py).
    decode → prefill   PeerHello once; Taken for every Offer
    prefill → decode   Welcome or Refused once; Offer …, then HandedOver, for each request; Forget
"""

import msgspec


class PeerHello(msgspec.Struct, tag=True):
    """The first message: the decode engine's number, and the facts on which the bytes of its blocks depend."""

    index: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, tag=True):
    """The facts are equal. memory: KvTransport.memory of the prefill engine, for connect()."""

    memory: bytes


class Refused(msgspec.Struct, tag=True):
    """The facts differ: one sentence. The connection ends."""

    message: str


class OfferedBlock(msgspec.Struct, array_like=True, frozen=True):
    """A published block in the prefill engine's host memory: its group and key, and its slots there."""

    group: int
    key: bytes
    slots: list[int]


class Offer(msgspec.Struct, tag=True):
    """Blocks of a request's prompt. Their slots stay as they are until Taken comes, or the connection ends."""

    number: int
    request_id: str
    blocks: list[OfferedBlock]


class HandedOver(msgspec.Struct, tag=True):
    """The request has no further offers."""

    request_id: str


class Forget(msgspec.Struct, tag=True):
    """These blocks, (group, key), must not be found again: their values are not finite, perhaps."""

    names: list[tuple[int, bytes]]


class Taken(msgspec.Struct, tag=True):
    """The decode engine has copied these offers, or does not want them: their slots may be used again."""

    numbers: list[int]


ToPrefill = PeerHello | Taken
ToDecode = Welcome | Refused | Offer | HandedOver | Forget
