"""All kinds of requests at once: streams with shared prefixes, clients that leave, wrong, late and refused requests."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx

MODEL = "quire-demo"
# a pool of 2,208 tokens, which a dozen readers fill; a queue that a burst overflows; guesses, for their panel
FLAGS = (
    *("--device", "cpu", "--kv-cache-memory", "13MiB", "--max-model-len", "2048"),
    *("--max-num-seqs", "12", "--max-queued-requests", "12", "--speculative", "ngram"),
)
_LIBRARY = "You are the librarian of a small town, patient and precise. " * 6
_QUESTIONS = ("Which books are about bees?", "Tell me a story.", "Where is the map of the harbour?", "Who was Aldus?")
_BURST = 40


def read(url: str, number: int, turn: int) -> None:
    """Chat and read the stream to its end; two in three begin alike."""
    system = _LIBRARY if number % 3 else f"You are reader {number}. " * 4
    user = f"{_QUESTIONS[turn % len(_QUESTIONS)]} " * (1 + 5 * turn % 17)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 30 + 40 * (turn % 7), "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60) as answer:
        for _ in answer.iter_lines():
            pass


def leave(url: str, number: int, turn: int) -> None:
    """Read a few lines of a stream, then go."""
    body = {"model": MODEL, "prompt": f"Count to {number + turn}: 1 2 3 4", "max_tokens": 900, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines, None)
    time.sleep(1.5)


def err(url: str, number: int, turn: int) -> None:
    """Ask for nothing, for too much, and for too short a time."""
    body = {"model": MODEL, "prompt": f"Number {number} {turn}", "max_tokens": 20, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json={**body, "n": 0}, timeout=60)
    if turn % 8 == 0:
        httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 1500, "timeout": 0.3}, timeout=60)
    time.sleep(0.7)


def burst(url: str) -> list[int]:
    """Send more at once than run and wait; return the statuses."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True}
    with ThreadPoolExecutor(_BURST) as pool:
        sent = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(_BURST)]
        return [one.result().status_code for one in sent]


@contextlib.contextmanager
def running(url: str, *, num_readers: int, num_leavers: int = 1, num_erring: int = 1) -> Iterator[None]:
    """Keep so many clients of each kind busy."""
    is_over = threading.Event()

    def repeat(act: Callable[[str, int, int], None], number: int) -> None:
        turn = number
        while not is_over.is_set():
            turn += 1
            with contextlib.suppress(httpx.HTTPError):
                act(url, number, turn)

    kinds = [read] * num_readers + [leave] * num_leavers + [err] * num_erring
    threads = [threading.Thread(target=repeat, args=(act, number)) for number, act in enumerate(kinds)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
