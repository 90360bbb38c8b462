"""Cancelling across HTTP workers, on real processes: whichever worker is asked, the request ends and its blocks go."""

import threading

import httpx
import openai
import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, wait_for

pytestmark = needs_proc
FLAGS = ("--http-workers", "2", "--max-model-len", "2048")
ABORTED = "quire_requests_finished_total{finished_reason=abort}"


# rule: Endpoints: A running request can be cancelled
def test_any_worker_ends_a_stream_of_any_other(daemon_with) -> None:
    daemon: Daemon = daemon_with(*FLAGS)
    num_aborted = daemon.metrics()[ABORTED]
    client = openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", max_retries=0, timeout=60)
    for _ in range(3):
        stream = client.completions.create(
            model="quire-demo", prompt="A quire", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream))
        replies = []
        for _ in range(8):  # connections of their own, so that both workers are asked
            replies.append(httpx.delete(f"{daemon.base_url}/v1/requests/{first.id}", timeout=60).status_code)
        assert replies[0] == 200
        seen = []
        with pytest.raises(openai.APIError) as caught:
            seen.extend(stream)
        assert not any(chunk.choices[0].finish_reason for chunk in seen)
        assert caught.value.code == "request_aborted"
    wait_for(lambda: daemon.metrics()["quire_kv_cache_blocks_used"] == 0, timeout_s=60, what="free blocks")
    assert daemon.metrics()[ABORTED] - num_aborted == 3


def test_a_whole_answer_is_cancelled_by_its_x_request_id_and_not_sent_again(daemon_with) -> None:
    daemon: Daemon = daemon_with(*FLAGS)
    client = openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", max_retries=3, timeout=60)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            client.chat.completions.create(
                model="quire-demo",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=1900,
                extra_body={"ignore_eos": True},
                extra_headers={"x-request-id": "job-7"},
            )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    url = f"{daemon.base_url}/v1/requests/job-7"
    wait_for(lambda: httpx.delete(url, timeout=60).status_code == 200, timeout_s=60, what="the cancel")
    thread.join(60)
    assert isinstance(errors[0], openai.ConflictError)
    wait_for(lambda: " 409 " in daemon.log, timeout_s=60, what="the line of the cancelled request")
    assert daemon.log.count("POST /v1/chat/completions") == 1  # none sent again
