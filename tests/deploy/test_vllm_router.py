"""The recipe of docs/how-to/several-gpus.md: vllm-router in front of two Quire servers, all of them real processes.

Needs the PyPI package vllm-router, beside this Python or as the program that VLLM_ROUTER names.
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.deploy.conftest import need
from tests.support.daemon import Daemon, wait_for

MODEL = "quire-demo"
MESSAGES = [{"role": "user", "content": "What is a quire?"}]
KEY = "router-test-key"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def running_router(daemons: list[Daemon], policy: str, folder: Path) -> Iterator[str]:
    """The router as docs/how-to/several-gpus.md starts it, but watching more often; yields its URL."""
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--policy", policy]
    arguments += ["--worker-urls", *(daemon.base_url for daemon in daemons), "--worker-startup-check-interval", "1"]
    arguments += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"]
    arguments += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
    program = os.environ.get("VLLM_ROUTER") or need("vllm-router")
    with (folder / "router.log").open("ab") as log:
        process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=2).status_code == 200
        return False

    try:
        wait_for(answers, timeout_s=60, what="the router is ready")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Two demo servers, with a key."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("servers")
        flags = ("--device", "cpu", "--http-workers", "1")
        both = [stack.enter_context(Daemon(*flags, folder=folder, env={"QUIRE_API_KEY": KEY})) for _ in range(2)]
        yield [daemon.wait_ready() for daemon in both]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


def finished(daemon: Daemon, reason: str = "") -> int:
    """How many requests a server has ended, of one reason or all."""
    page = httpx.get(f"{daemon.base_url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=10).text
    lines = [line for line in page.splitlines() if line.startswith("quire_requests_finished_total{")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if f'finished_reason="{reason}' in line))


def chat(client: openai.OpenAI, **more: object) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, **more)
    return answer.choices[0].message.content or ""


def test_chat_and_streams_are_answered_by_both_servers_alike(daemons: list[Daemon], tmp_path: Path) -> None:
    before = [finished(daemon) for daemon in daemons]
    with running_router(daemons, "round_robin", tmp_path) as url, client_of(url) as client:
        answers = {chat(client) for _ in range(4)}
        for _ in range(2):
            chunks = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, stream=True
            )
            answers.add("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert len(answers) == 1
    assert answers.pop().startswith("A quire is")
    assert [finished(daemon) - count for daemon, count in zip(daemons, before, strict=True)] == [3, 3]


def test_errors_and_keys_come_through_the_router(daemons: list[Daemon], tmp_path: Path) -> None:
    with running_router(daemons, "round_robin", tmp_path) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=99)
        with pytest.raises(openai.AuthenticationError):
            chat(client.with_options(api_key="wrong"))


def test_a_client_that_leaves_frees_its_place_behind_the_router(daemons: list[Daemon], tmp_path: Path) -> None:
    before = sum(finished(daemon, "abort") for daemon in daemons)
    with running_router(daemons, "round_robin", tmp_path) as url, client_of(url) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        wait_for(
            lambda: sum(finished(daemon, "abort") for daemon in daemons) == before + 1,
            timeout_s=20,
            what="the engine aborts the request",
        )


@pytest.mark.parametrize("policy", ["consistent_hash", "cache_aware"])
def test_a_conversation_stays_where_its_prefix_is_cached(daemons: list[Daemon], tmp_path: Path, policy: str) -> None:
    """cache_aware goes by the text of the prompt; consistent_hash by the header X-Session-ID."""
    before = [finished(daemon) for daemon in daemons]
    system = f"You answer in few words. {policy} " * 20
    with running_router(daemons, policy, tmp_path) as url, client_of(url) as client:
        messages = [{"role": "system", "content": system}]
        cached = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"Question {turn}: what is a quire?"})
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, extra_headers={"x-session-id": f"session-{policy}"}
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    served = [finished(daemon) - count for daemon, count in zip(daemons, before, strict=True)]
    assert sorted(served) == [0, 4]
    assert all(num_tokens > 0 for num_tokens in cached[1:])


def test_while_one_server_drains_nothing_is_lost(daemons: list[Daemon], tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--http-workers", "1")
    with Daemon(*flags, folder=tmp_path, env={"QUIRE_API_KEY": KEY}) as leaving:
        leaving.wait_ready()
        with running_router([daemons[0], leaving], "round_robin", tmp_path) as url, client_of(url) as client:
            with ThreadPoolExecutor(4) as pool:
                answers = [pool.submit(chat, client) for _ in range(8)]
                leaving.process.send_signal(signal.SIGTERM)
                answers += [pool.submit(chat, client) for _ in range(8)]
                texts = {answer.result(60) for answer in answers}
            assert len(texts) == 1
            assert leaving.process.wait(30) == 0
            before = finished(daemons[0])
            assert {chat(client) for _ in range(4)} == texts
            assert finished(daemons[0]) == before + 4


def test_after_one_server_was_killed_the_other_answers(daemons: list[Daemon], tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--http-workers", "1")
    with Daemon(*flags, folder=tmp_path, env={"QUIRE_API_KEY": KEY}) as lost:
        lost.wait_ready()
        with running_router([daemons[0], lost], "round_robin", tmp_path) as url, client_of(url) as client:
            stream = client.chat.completions.create(  # the first goes to one server, the second to the other
                model=MODEL, messages=MESSAGES, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            other = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            for started in (stream, other):
                next(iter(started))
            lost.process.kill()
            assert {chat(client) for _ in range(4)} == {chat(client)}
            with pytest.raises((openai.APIError, httpx.TransportError)):  # one of them was cut off, and shows it
                assert [list(started) for started in (stream, other)]
