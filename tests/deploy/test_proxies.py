"""Two replicas behind nginx and behind haproxy, configured as deploy/ publishes them."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest

from tests.deploy.proxies import PROXIES, running
from tests.support.daemon import Daemon, wait_for

BODY = {
    "model": "quire-demo",
    "messages": [{"role": "user", "content": "Go on"}],
    "max_tokens": 3000,
    "ignore_eos": True,
    "stream": True,
}
ABORTED = "quire_requests_finished_total{finished_reason=abort}"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Return two ready servers."""
    folder = tmp_path_factory.mktemp("replicas")
    with Daemon("--device", "cpu", folder=folder) as one, Daemon("--device", "cpu", folder=folder) as other:
        yield [one.wait_ready(), other.wait_ready()]


@pytest.fixture(params=PROXIES)
def url(request: pytest.FixtureRequest, replicas: list[Daemon], tmp_path: Path) -> Iterator[str]:
    """Return the URL of one proxy before the two."""
    with running(request.param, tmp_path, replicas) as proxy_url:
        yield proxy_url


def total(replicas: Sequence[Daemon], name: str) -> float:
    return sum(replica.metrics()[name] for replica in replicas)


def test_a_stream_is_passed_on_while_it_is_made_and_a_client_that_leaves_ends_it(
    url: str, replicas: list[Daemon]
) -> None:
    aborted = total(replicas, ABORTED)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY, timeout=60) as response:
        lines = response.iter_lines()
        assert response.headers["content-type"].startswith("text/event-stream")
        for _ in range(20):
            next(lines)
        assert total(replicas, "quire_num_requests_running") == 1  # nothing has collected it
    wait_for(lambda: total(replicas, ABORTED) == aborted + 1, timeout_s=10, what="the request is aborted")
    assert total(replicas, "quire_num_requests_running") == 0


def test_a_client_that_leaves_before_an_answer_that_is_not_streamed_ends_it(url: str, replicas: list[Daemon]) -> None:
    aborted = total(replicas, ABORTED)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=BODY | {"stream": False}, timeout=1.0)
    wait_for(lambda: total(replicas, ABORTED) == aborted + 1, timeout_s=10, what="the request is aborted")


def test_open_streams_are_shared_evenly(url: str, replicas: list[Daemon]) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        streams = [client.chat.completions.create(**BODY_OF_SDK) for _ in range(4)]
        for stream in streams:
            next(iter(stream))
        assert [replica.metrics()["quire_num_requests_running"] for replica in replicas] == [2, 2]
        for stream in streams:
            stream.close()


BODY_OF_SDK = {key: value for key, value in BODY.items() if key != "ignore_eos"} | {"extra_body": {"ignore_eos": True}}


def test_bodies_up_to_the_servers_own_limit_pass_and_larger_ones_do_not(url: str) -> None:
    def send(num_bytes: int) -> httpx.Response:
        message = {"role": "user", "content": "x" * num_bytes}
        return httpx.post(f"{url}/v1/chat/completions", json=BODY | {"messages": [message]}, timeout=60)

    assert send(7 * 2**20).json()["error"]["code"] == "context_length_exceeded"
    assert send(8 * 2**20 + 1).status_code == 413


def test_metrics_are_each_replicas_own(url: str) -> None:
    assert httpx.get(f"{url}/metrics").status_code == 404
    assert httpx.get(f"{url}/ready").status_code == 200


@pytest.mark.parametrize("name", PROXIES)
def test_while_one_replica_is_stopped_every_request_is_answered(
    name: str, start: Callable[..., Daemon], tmp_path: Path
) -> None:
    one, other = start("--drain-timeout", "3"), start()
    outcomes: list[int] = []
    is_over = threading.Event()

    def ask_on() -> None:
        with httpx.Client(timeout=60) as client:
            while not is_over.is_set():
                body = BODY | {"max_tokens": 4, "stream": False}
                outcomes.append(client.post(f"{url}/v1/chat/completions", json=body).status_code)

    with running(name, tmp_path, [one.wait_ready(), other.wait_ready()]) as url:
        threads = [threading.Thread(target=ask_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(outcomes) > 10, timeout_s=30, what="answers")
        with httpx.stream("POST", f"{one.base_url}/v1/chat/completions", json=BODY, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            one.process.send_signal(signal.SIGTERM)
            assert "server_shutting_down" in "".join(lines)  # it has drained for as long as this went on
        assert one.process.wait(30) == 0
        num_before = len(outcomes)
        wait_for(lambda: len(outcomes) > num_before + 10, timeout_s=30, what="answers of the other")
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert set(outcomes) == {200}
