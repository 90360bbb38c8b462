"""A tiny model folder (byte-level BPE, ChatML) and an app on fakes."""

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.interface.config import ServerConfig
from engine.interface.metrics import Metrics
from server.api.request_record import OpenRequests
from server.http.app import create_app
from server.http.h11_protocol import HttpProtocol
from server.http.metrics import HttpMetrics
from server.http.routes.pages import docs_routes, kv_page_routes, root_routes
from server.http.tracing import Tracer
from server.text.chat_template import ChatTemplate
from tests.support.certificates import certificates_read_once
from tests.support.fakes import FakeEngineClient, FakeLauncherChannel
from tests.support.shared_grammars import CheckProcesses, SharedGrammarChecker
from tests.support.templates import CHATML

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world! How are you today? I am fine, thank you.",
    "Schöne Grüße aus Köln, naïve café. 日本語のテキスト 😀👍🏽",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokenizer


def train_sentencepiece_like() -> Tokenizer:
    """Llama 2's form: ▁ for spaces, bytes as <0xNN>, one leading space stripped."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(SENTENCES[:2] * 4, trainer)
    tokenizer.add_tokens([AddedToken(f"<0x{byte:02X}>", special=False, normalized=False) for byte in range(256)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_fallback_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode with bytes for every character outside the vocabulary, as byte_fallback would."""
    ids = []
    for char in "▁" + text.replace(" ", "▁"):
        token_id = tokenizer.token_to_id(char)
        ids += [token_id] if token_id is not None else [tokenizer.token_to_id(f"<0x{b:02X}>") for b in char.encode()]
    return ids


def write_model_folder(folder: Path, *, chat_template: str | None = CHATML, tokenizer: Tokenizer | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or train_byte_level()).save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _what_apps_have_in_common_is_made_once() -> Iterator[None]:
    """Share chat templates, pages and certificates, which do not change, and the processes that compile grammars.

    To make them is most of the time that it takes to make an app and to ask it for a grammar.
    """
    made: dict[tuple, ChatTemplate] = {}

    def make_once(source, *, variables, special_tokens, added_tokens):
        key = (source, *variables.items(), *special_tokens, None, *added_tokens)
        if key not in made:
            made[key] = ChatTemplate(
                source, variables=variables, special_tokens=special_tokens, added_tokens=added_tokens
            )
        return made[key]

    with pytest.MonkeyPatch.context() as patch, certificates_read_once():
        patch.setattr("server.text.tokenizer.ChatTemplate", make_once)
        for make in (root_routes, kv_page_routes, docs_routes):
            patch.setattr(f"server.http.app.{make.__name__}", functools.cache(make))
        processes = CheckProcesses()
        patch.setattr("server.api.app_state.GrammarChecker", functools.partial(SharedGrammarChecker, processes))
        yield
        processes.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


class Harness:
    """An app on a FakeEngineClient, and what its tests ask for again and again."""

    def __init__(
        self,
        folder: Path,
        client: FakeEngineClient,
        launcher: FakeLauncherChannel,
        *,
        tracer: Tracer | None = None,
        **config: object,
    ) -> None:
        self.folder = folder
        self.client = client
        self.launcher = launcher
        self.metrics = Metrics()
        server_config = ServerConfig(model=str(folder), served_model_names=["tiny", "alias/tiny"], **config)
        self.app = create_app(
            server_config,
            client=client,
            launcher=launcher,
            metrics=self.metrics,
            open_requests=OpenRequests(),
            http_metrics=HttpMetrics(self.metrics, num_requests=lambda: 0),
            tracer=tracer,
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://quire")

    def post(self, path: str, body: object = None, **kwargs: object) -> httpx.Response:
        """Send one request in an event loop of its own."""

        async def send() -> httpx.Response:
            async with self.http() as http:
                if body is not None:
                    kwargs["json"] = body
                return await http.post(path, **kwargs)

        return asyncio.run(send())

    def get(self, path: str, method: str = "GET") -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.http() as http:
                return await http.request(method, path)

        return asyncio.run(send())

    def request(self, method: str, path: str, **kwargs: object) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.http() as http:
                return await http.request(method, path, **kwargs)

        return asyncio.run(send())

    def chat(self, **fields: object) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": USER_HI, **fields})

    def complete(self, **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "Hello", **fields})


class TooLateAfterOneToken:
    """A FakeEngineClient's `hold`: one token comes at once, and then none; an hour passes between them.

    The hour is one of the clock alone that a generation compares with its deadline: no request waits for it, and
    however slow the machine is, the first token is in time and the second is not.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._has_passed = False
        monkeypatch.setattr("server.generation.deadline.time", self)

    def monotonic(self) -> float:
        return time.monotonic() + 3600 * self._has_passed

    async def wait(self) -> None:
        if self._has_passed:
            await asyncio.sleep(60)  # a test without its deadline fails, and does not hang
        self._has_passed = True


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER_HI = [{"role": "user", "content": "hi"}]


def stream_chunks(text: str) -> list[dict]:
    """Parse an event stream; it must end with [DONE]."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def chat_text(chunks: list[dict], index: int = 0) -> str:
    """Join one choice's content over a chat stream."""
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def check_error(reply: httpx.Response, status: int, code: str) -> dict:
    """Check the form of an error answer; return its error object."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.content) < 4096
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == code
    assert error["message"]
    retries = status == 429 or status >= 500
    assert reply.headers.get("x-should-retry") == (None if retries else "false")
    return error


@pytest.fixture(scope="session")
def harness(model_folder: Path):
    """Make a Harness; `text` is what the engine answers with."""

    def make(
        text: str = "Hello, world!", *, folder: Path = model_folder, launcher: FakeLauncherChannel | None = None,
        engine: dict | None = None, **config: object,
    ) -> Harness:  # fmt: skip
        script = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        client = FakeEngineClient(**{"script": script, **(engine or {})})
        return Harness(folder, client, launcher or FakeLauncherChannel(), **config)

    return make


class _QuickServer(uvicorn.Server):
    """Sees within 10 ms that it should exit; uvicorn looks ten times a second, and hundreds of tests would wait."""

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):
            tick += 1
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def serving(app: object, *, prefix: str = "") -> Iterator[str]:
    """Serve an app with uvicorn in a thread; yield its base URL. prefix: the --root-path of the app."""
    listener = socket.create_server(("127.0.0.1", 0))
    protocol = functools.partial(HttpProtocol, prefix=prefix)
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, access_log=False)
    server = _QuickServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
