"""Acts of many clients: they leave, they are too many, they dawdle, they say nothing, and all of that at once.

An act is a coroutine from a Target to the answers that its clients saw.
"""

import asyncio
from collections.abc import Iterable

from tests.chaos.bombs import bombs
from tests.chaos.client import Answer, Conduct, ask, completion, request_bytes, wait_closed
from tests.chaos.target import Target

_OVERLOAD = frozenset({200, 429, 503})
_HEAD_LIMIT_S = 30  # of the server: a request's headers, and a connection's first word


async def leave(target: Target) -> list[Answer]:
    """Leave in mid-stream, after some events or before the first, with FIN and with RST; and before a whole answer."""
    asked = []
    for _ in range(target.num(300)):
        after = target.rng.choice((0, 1, 2, 5, 20))
        # a reset before the answer may overtake the request
        conduct = Conduct(leave_after=after, resets=after > 0 and target.rng.random() < 0.5)
        asked.append((_long(target, is_stream=after > 0 or target.rng.random() < 0.5), conduct))
    return await _spread(target, asked, over_s=8 * target.scale)


async def overload(target: Target) -> list[Answer]:
    """Send ten times what runs and waits; every one is answered, with 200, 429 or 503."""
    requests = [
        completion(f"Number {number}", max_tokens=target.rng.randint(4, 32)) for number in range(target.num(500))
    ]
    answers = await asyncio.gather(*(ask(target.address, request) for request in requests))
    if {answer.status for answer in answers} - _OVERLOAD:
        target.faults.append("a request over the queue's limit got another status than 200, 429 and 503")
    return answers


async def dawdle(target: Target) -> list[Answer]:
    """Send bodies and read answers by the byte, or never send the last one; who ends it gets the whole answer."""
    num, num_slow = target.num(20), round(12 * target.scale) or 2
    readers = [(_long(target, most=300), Conduct(slow_reads=num_slow)) for _ in range(num)]
    writers = [(completion("Slowly", max_tokens=8), Conduct(slow_bytes=num_slow)) for _ in range(num)]
    asked = [*readers, *writers]
    if target.scale >= 1:  # these wait for the server's own limit
        asked += [(completion("Never", max_tokens=8), Conduct(sends_all=False)) for _ in range(num)]
    answers = await _spread(target, asked, over_s=4 * target.scale)  # not more at once than the queue takes
    for answer, (_, conduct) in zip(answers, asked, strict=True):
        expected = 200 if conduct.sends_all else 408
        if answer.status != expected:
            target.faults.append(f"a slow client got {answer.outcome}, not {expected}: {answer.error}")
    return answers


async def say_nothing(target: Target) -> list[Answer]:
    """Open connections and send nothing, half a line or half a head; the server closes each in its time."""
    words = (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    held = [target.rng.choice(words) for _ in range(target.num(300))]
    patience_s = _HEAD_LIMIT_S + 20 if target.scale >= 1 else 1
    closed = await asyncio.gather(*(wait_closed(target.address, word, timeout_s=patience_s) for word in held))
    if target.scale >= 1 and not all(closed):  # in a rehearsal the clients leave first
        target.faults.append(f"{closed.count(False)} of {len(closed)} silent connections were kept")
    return [Answer("left", is_counted=False) for _ in closed]


async def storm(target: Target) -> list[Answer]:
    """All of it at once, in a random order: readers, leavers, bombs, dawdlers, a crowd."""
    asked = [(completion(f"Reader {n}", max_tokens=16), Conduct()) for n in range(target.num(150))]
    asked += [(_long(target), Conduct(leave_after=target.rng.choice((1, 4, 9)))) for _ in range(target.num(80))]
    asked += [(completion("Slow", max_tokens=4), Conduct(slow_bytes=5, pause_s=0.3)) for _ in range(target.num(20))]
    tokens = request_bytes("/tokenize", {"prompt": "one two three " * 200})
    asked += [(tokens, Conduct())] * target.num(40)
    thrown = [bomb for bomb in bombs(target.rng) if bomb.is_counted]
    asked += [(bomb.request, Conduct()) for bomb in target.rng.sample(thrown, min(len(thrown), target.num(40)))]
    target.rng.shuffle(asked)
    return await _spread(target, asked, over_s=10 * target.scale)


def _long(target: Target, *, most: int = 1500, is_stream: bool = True) -> bytes:
    """Return a chat or a completion that goes on for longer than its client stays."""
    text = "A story: " + "once " * target.rng.randint(1, 40)
    if target.rng.random() < 0.5:
        return completion(text, max_tokens=most, stream=is_stream)
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": most,
        "ignore_eos": True,
        "stream": is_stream,
    }
    return request_bytes("/v1/chat/completions", body)


async def _spread(target: Target, asked: Iterable[tuple[bytes, Conduct]], *, over_s: float) -> list[Answer]:
    """Send requests at random times within some seconds; return the answers in order."""

    async def send(request: bytes, conduct: Conduct, delay_s: float) -> Answer:
        await asyncio.sleep(delay_s)
        return await ask(target.address, request, conduct)

    delays = [(request, conduct, target.rng.uniform(0, over_s)) for request, conduct in asked]
    return await asyncio.gather(*(send(*each) for each in delays))
