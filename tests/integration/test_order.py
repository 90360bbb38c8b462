"""Who is served when, on a real daemon with one row: priority, a queue bounded by tokens, salts, deadlines."""

import threading
import time

import httpx
import openai
import pytest

from tests.support.daemon import Daemon, wait_for

MODEL = "quire-demo"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory):
    """A daemon that runs one request at once, and queues 100 tokens."""
    flags = ["--device", "cpu", "--max-num-seqs", "1", "--max-queued-tokens", "100", "--max-model-len", "2048"]
    with Daemon(*flags, folder=tmp_path_factory.mktemp("narrow")) as daemon:
        yield daemon.wait_ready()


def complete(daemon: Daemon, **fields: object) -> httpx.Response:
    body = {"prompt": [40] * 20, "max_tokens": 2, "ignore_eos": True, **fields}
    return httpx.post(f"{daemon.base_url}/v1/completions", json=body, timeout=60)


class Busy:
    """Holds the daemon's one row with a long stream."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def __enter__(self) -> None:
        self._client = openai.OpenAI(base_url=f"{self._daemon.base_url}/v1", api_key="none", max_retries=0)
        self._stream = self._client.completions.create(
            model=MODEL, prompt="A", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(self._stream))

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._client.close()


def waiting(daemon: Daemon) -> float:
    return daemon.metrics()["quire_num_requests_waiting"]


# rule: Fields: `priority` and `cache_salt` act
def test_priority_orders_who_is_served_first(narrow: Daemon) -> None:
    ends: list[int] = []

    def ask(priority: int) -> None:
        assert complete(narrow, priority=priority).status_code == 200
        ends.append(priority)

    threads = []
    with Busy(narrow):
        for count, priority in enumerate((5, 0, -5), 1):
            threads.append(threading.Thread(target=ask, args=(priority,)))
            threads[-1].start()
            wait_for(lambda count=count: waiting(narrow) == count, timeout_s=60, what="the queue")
    for thread in threads:
        thread.join(60)
    assert ends == [-5, 0, 5]


# rule: Limits: The queue is bounded by requests and tokens, and refuses at once
def test_a_queue_full_of_tokens_refuses_at_once_and_serves_what_it_took(narrow: Daemon) -> None:
    replies: list[int] = []
    threads = [
        threading.Thread(target=lambda: replies.append(complete(narrow, prompt=[41] * 50).status_code))
        for _ in range(2)
    ]
    with Busy(narrow):
        for thread in threads:
            thread.start()
        wait_for(lambda: waiting(narrow) == 2, timeout_s=60, what="the queue")
        refused = complete(narrow, prompt=[41])
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
    for thread in threads:
        thread.join(60)
    assert replies == [200, 200]
    wait_for(lambda: complete(narrow).status_code == 200, timeout_s=60, what="room in the queue")
    assert narrow.metrics()["quire_requests_rejected_total{reason=overloaded}"] >= 1


# rule: Fields: `priority` and `cache_salt` act
def test_only_requests_of_the_same_salt_share_a_prefix(narrow: Daemon) -> None:
    prompt = list(range(50, 90))

    def cached(**fields: object) -> int:
        usage = complete(narrow, prompt=prompt, **fields).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 0, 0]
    assert cached(cache_salt="a") == cached(cache_salt="b") == cached() == 32
    assert cached(prompt_logprobs=0) == 0


# rule: Limits: A request has a deadline, also in the queue
def test_a_deadline_in_the_queue_is_a_408_and_frees_the_place(narrow: Daemon) -> None:
    with Busy(narrow):
        start_s = time.monotonic()
        # so little work that its wait is predicted to be shorter, also where a token takes a third of a second
        refused = complete(narrow, prompt=[40], max_tokens=1, timeout=1.0)
        assert refused.status_code == 408
        assert time.monotonic() - start_s >= 1.0
        wait_for(lambda: waiting(narrow) == 0, timeout_s=60, what="an empty queue")
