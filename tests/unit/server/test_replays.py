"""Answers that outlive their engine, through the HTTP app with a real model: equal to those of an undisturbed run."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from engine.interface.config import ServerConfig
from engine.interface.metrics import Metrics
from engine.interface.socket_client import SocketEngineClient
from server.api.request_record import OpenRequests
from server.config.model_source import DEMO_FOLDER
from server.http.app import create_app
from server.http.metrics import HttpMetrics
from tests.support.fakes import FakeLauncherChannel
from tests.support.mortal_engine import MortalEngine

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
STORY = [{"role": "user", "content": "Tell me a short story about a fox."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED = {
    "greedy": (CHAT, {"messages": STORY, "temperature": 0, "max_tokens": 24}),
    "seeded": (CHAT, {"messages": STORY, "temperature": 1.2, "seed": 3, "max_tokens": 24, "ignore_eos": True}),
    "three": (CHAT, {"messages": STORY, "temperature": 1.2, "seed": 3, "max_tokens": 16, "n": 3}),
    "schema": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Invent a person."}],
            "seed": 1,
            "max_tokens": 40,
            "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
        },
    ),
    "tools": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "temperature": 0,
            "max_tokens": 60,
            "tools": [{"type": "function", "function": WEATHER}],
            "tool_choice": "required",
        },
    ),
    "reasoning": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "What is a quire?"}],
            "temperature": 0,
            "reasoning_effort": "low",
            "thinking_token_budget": 5,
            "max_tokens": 24,
        },
    ),
    "logprobs": (
        CHAT,
        {"messages": STORY, "seed": 8, "max_tokens": 20, "logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    ),
    "prompt_logprobs": (
        COMPLETIONS,
        {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "logprobs": 2, "echo": True},
    ),
    "penalties": (
        COMPLETIONS,
        {
            "prompt": "la la la la",
            "seed": 5,
            "max_tokens": 24,
            "presence_penalty": 0.9,
            "frequency_penalty": 0.7,
            "repetition_penalty": 1.3,
            "ignore_eos": True,
        },
    ),
    "stop": (CHAT, {"messages": STORY, "temperature": 0, "max_tokens": 60, "stop": [" the"], "min_tokens": 7}),
    "min_tokens": (
        CHAT,
        {"messages": [{"role": "user", "content": "Hi"}], "min_tokens": 30, "max_tokens": 32, "seed": 2},
    ),
    "several": (COMPLETIONS, {"prompt": ["One", "Two"], "seed": 4, "max_tokens": 12}),
    "responses": (RESPONSES, {"input": "Tell me a story.", "temperature": 0, "max_output_tokens": 20}),
    "messages": (MESSAGES, {"messages": STORY, "temperature": 0, "max_tokens": 20}),
}
VOLATILE = ("id", "created", "created_at", "completed_at", "timings", "item_id", "call_id")


@pytest.fixture(scope="module")
def mortal() -> Iterator[MortalEngine]:
    engine = MortalEngine()
    yield engine
    engine.close()


@asynccontextmanager
async def served(path: str, *, max_replays: int = 100) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an app on the engine at a path."""
    metrics = Metrics()
    client = SocketEngineClient(path, max_replays=max_replays, was_killed=lambda: True, metrics=metrics)
    app = create_app(
        ServerConfig(model=str(DEMO_FOLDER), served_model_names=["demo"]),
        client=client,
        launcher=FakeLauncherChannel(),
        metrics=metrics,
        open_requests=OpenRequests(),
        http_metrics=HttpMetrics(metrics, num_requests=lambda: 0),
    )
    async with app.router.lifespan_context(app):
        await client.start()
        await client.wait_ready(timeout_s=60)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=120) as http:
            yield http
        await client.aclose()


async def ask_all(http: httpx.AsyncClient, names: Sequence[str], *, is_stream: bool) -> dict[str, object]:
    async def ask(name: str) -> object:
        path, body = ASKED[name]
        reply = await http.post(path, json={"model": "demo", **body, "stream": is_stream})
        assert reply.status_code == 200, (name, reply.text)
        return told(reply.text) if is_stream else reply.json()

    return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))


def told(text: str) -> dict[str, object]:
    """Return what a stream tells, whatever its parts: the sum of its texts, the last of all else."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    assert '"error":{' not in text
    sums: dict[str, object] = {}

    def fold(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                fold(part, f"{name}.{key}")
        elif isinstance(value, list):
            for part in value:
                index = part.get("index", "") if isinstance(part, dict) else ""
                fold(part, f"{name}[{index}]")
        elif name.rsplit(".", maxsplit=1)[-1] not in ("sequence_number", "type", "object"):
            is_text = isinstance(value, str) and name.endswith(("content", "reasoning", "text", "delta", "arguments"))
            sums[name] = str(sums.get(name, "")) + str(value) if is_text else value

    for event in events:
        if event.startswith('{"type":"message_start"'):  # tells how many tokens there were when it was written
            continue
        fold(without_volatile(json.loads(event)), "")
    return sums


def without_volatile(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_volatile(part) for key, part in value.items() if key not in VOLATILE}
    return [without_volatile(part) for part in value] if isinstance(value, list) else value


def numbers_rounded(value: object) -> object:
    """Round log-probabilities: rows of another batch are summed in another order."""
    if isinstance(value, dict):
        return {key: numbers_rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [numbers_rounded(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value


async def answers(
    mortal: MortalEngine, path: str, steps: Sequence[int], names: Sequence[str], *, is_stream: bool = False
) -> dict[str, object]:
    with mortal.lives(path, steps):
        async with served(path) as http:
            return await ask_all(http, names, is_stream=is_stream)


@pytest.mark.parametrize(
    ("is_stream", "lives"),
    [
        pytest.param(False, ((1, 4, 9), (14, 6)), id="whole"),
        pytest.param(True, ((1, 4, 9),), id="stream"),
        pytest.param(True, ((14, 6),), id="stream with two ends", marks=pytest.mark.full),
    ],
)
def test_every_kind_of_answer_is_that_of_an_undisturbed_run(
    mortal: MortalEngine, tmp_path: Path, is_stream: bool, lives: Sequence[Sequence[int]]
) -> None:
    """Each of the lives has the numbers of steps after which an engine ends."""
    names = [name for name in ASKED if not (is_stream and name == "prompt_logprobs")]
    path = str(tmp_path / "engine.sock")
    undisturbed = asyncio.run(answers(mortal, path, (), names, is_stream=is_stream))
    for steps in lives:
        disturbed = asyncio.run(answers(mortal, path, steps, names, is_stream=is_stream))
        assert mortal.num_ends == len(steps)
        for name in names:
            expected, found = (numbers_rounded(without_volatile(each[name])) for each in (undisturbed, disturbed))
            assert found == expected, name
        if not is_stream:
            assert disturbed["greedy"]["timings"]["replays"] == len(steps)
            assert "replays" not in undisturbed["greedy"]["timings"]


def chat(**fields: object) -> dict[str, object]:
    return {"model": "demo", "messages": STORY, "temperature": 0, **fields}


def test_usage_and_cache_are_those_of_the_first_admission(mortal: MortalEngine, tmp_path: Path) -> None:
    """The first engine had the prompt in its cache and ends before the first token; the next one's cache is empty."""
    path = str(tmp_path / "engine.sock")

    async def run(steps: Sequence[int]) -> httpx.Response:
        with mortal.lives(path, steps, is_caching=True):
            async with served(path) as http:
                await http.post(CHAT, json=chat(max_tokens=2))
                return await http.post(CHAT, json=chat(max_tokens=6))

    undisturbed, disturbed = asyncio.run(run(())), asyncio.run(run((3,)))
    assert mortal.num_ends == 1
    assert undisturbed.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for name in ("usage", "cache", "choices"):
        assert disturbed.json()[name] == undisturbed.json()[name]
    assert disturbed.headers["x-quire-cache"] == undisturbed.headers["x-quire-cache"]


def test_a_request_without_a_seed_goes_on_with_the_one_that_the_worker_drew(
    mortal: MortalEngine, tmp_path: Path
) -> None:
    path, seeds = str(tmp_path / "engine.sock"), []

    async def run() -> dict[str, object]:
        with mortal.lives(path, (4, 5)):
            async with served(path) as http:
                submit = SocketEngineClient.submit

                def see(self, request):
                    seeds.append(request.params.seed)
                    return submit(self, request)

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(SocketEngineClient, "submit", see)
                    body = chat(temperature=1.3, max_tokens=20, ignore_eos=True)
                    first = (await http.post(CHAT, json=body)).json()
                again = (await http.post(CHAT, json={**body, "seed": seeds[0]})).json()
                assert first["timings"]["replays"] == 2
                assert first["choices"] == again["choices"]

    asyncio.run(run())
    assert mortal.num_ends == 2


def test_a_deadline_ends_a_request_that_waits_for_an_engine(
    mortal: MortalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, engine = str(tmp_path / "engine.sock"), ExitStack()
    submit, submitted = SocketEngineClient.submit, []

    def see(self, message):
        submitted.append(message)
        return submit(self, message)

    monkeypatch.setattr(SocketEngineClient, "submit", see)

    async def run() -> None:
        engine.enter_context(mortal.lives(path))
        async with served(path) as http:
            body = chat(max_tokens=400, ignore_eos=True, timeout=1.5)
            asked = [asyncio.create_task(http.post(CHAT, json={**body, "stream": stream})) for stream in (False, True)]
            while len(submitted) < 2:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.close)  # and none follows
            whole, stream = await asyncio.gather(*asked)
            assert (whole.status_code, whole.json()["error"]["code"]) == (408, "deadline_exceeded")
            assert '"code":"deadline_exceeded"' in stream.text
            # the engine may have ended before it accepted the request; then no headers were sent
            assert stream.status_code == 408 or stream.text.endswith("data: [DONE]\n\n")
            refused = await http.post(CHAT, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")

    asyncio.run(run())
