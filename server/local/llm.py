"""LLM: a model inside this Python process: texts, chats and embeddings without a server. `from quire import LLM`.

A request is checked and encoded as one of the HTTP API is, by the same code, so that its fields, their limits and the
answers are the same. Life: LLM(…), which loads the model → generate, chat, embed → close, or the end of the process.
One thread has the event loop and the engine; every method may be called from any other thread, notebooks included.
Imports server.api and server.local.engine; torch when a model is loaded.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import msgspec
import numpy as np
from pydantic import BaseModel
from starlette.requests import Request

from engine.interface.config import EngineConfig, ServerConfig
from engine.interface.control import Ledger, Stage, State
from engine.interface.errors import InvalidParameter, ServiceError
from engine.interface.metrics import Metrics
from engine.interface.protocol import TokenLogprobs
from engine.interface.tenant import Tenant
from server.api.app_state import AppState, make_app_state
from server.api.chat.request import prepare_chat
from server.api.collected import collect_choices
from server.api.completions.request import prepare_completion
from server.api.embeddings.request import prepare_embeddings
from server.api.embeddings.schema import EmbeddingBody
from server.api.large_bodies import LargeBodies, give_place
from server.api.objects import ToolCall
from server.api.reply_options import PreparedReply
from server.api.request_record import RECORD_SCOPE_KEY, RequestRecord, make_request_id
from server.api.schemas import ChatBody, CompletionBody
from server.api.strict_json import parse_body
from server.generation.events import Event, TextDelta
from server.local.engine import LocalEngine
from server.local.settings import read_settings

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Message = Mapping[str, Any]
_HTTP_ALONE = ("stream", "stream_options", "n", "best_of", "echo", "return_token_ids", "encoding_format")
_AT_ONCE = 2  # times the requests that run at once: the next ones are ready when some end


class Answer(msgspec.Struct, kw_only=True):
    """What came of one prompt. error: why a prompt of several has no whole answer; one alone raises it."""

    text: str = ""
    reasoning: str = ""  # of a model that thinks aloud, without its tags
    tool_calls: list[ToolCall] = []
    finish_reason: str = ""  # stop | length | tool_calls; "": it failed
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked for
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of them, read from the prefix cache
    error: ServiceError | None = None

    def __str__(self) -> str:
        return self.text


class LLM:
    """A loaded model, as a context manager too. model: a folder, a hub id, or None for the built-in demo."""

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """Load. Blocks for seconds to minutes. Raises StartupError.

        settings: the flags of `quire serve` on model, memory and speculation, such as max_model_len=8192,
        device="cpu", dtype="bfloat16", quantization="int4".
        """
        engine_config, server_config = read_settings(None if model is None else str(model), settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        self._thread.start()
        self._is_closed = False
        try:
            self._state, self._engine, self._pump, self._parts = self._run(_load(engine_config, server_config))
        except BaseException:
            self._end_thread()
            raise
        self._bodies = LargeBodies(self._state.work)
        atexit.register(self.close)  # while the engine's thread can still end in order

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(self, prompts: str | Sequence[int], *, stream: Literal[False] = False, **fields: Any) -> Answer: ...
    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], *, stream: Literal[False] = False, **fields: Any
    ) -> list[Answer]: ...
    @overload
    def generate(self, prompts: str | Sequence[int], *, stream: Literal[True], **fields: Any) -> Iterator[str]: ...
    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Answer | list[Answer] | Iterator[str]:
        """Continue texts, or prompts as token ids: one Answer for one prompt, a list for a list, in its order.

        fields: those of POST /v1/completions, such as max_tokens (16 unless given), temperature, top_p, stop, seed,
        logprobs. stream: an iterator over the pieces of one prompt's answer. Raises ServiceErrors.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            body = _body(CompletionBody, {"prompt": _listed(prompts), **fields})
            return self._stream(body) if stream else self._answers([body])[0]
        _check_stream(is_list=True, stream=stream)
        return self._answers([_body(CompletionBody, {"prompt": _listed(prompt), **fields}) for prompt in prompts])

    @overload
    def chat(self, messages: str | Sequence[Message], *, stream: Literal[False] = False, **fields: Any) -> Answer: ...
    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], *, stream: Literal[False] = False, **fields: Any
    ) -> list[Answer]: ...
    @overload
    def chat(self, messages: str | Sequence[Message], *, stream: Literal[True], **fields: Any) -> Iterator[str]: ...
    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[Sequence[Message]],
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Answer | list[Answer] | Iterator[str]:
        """Answer a chat: messages as in OpenAI's API, one question as a text, or a list of chats.

        fields: those of POST /v1/chat/completions, such as max_tokens (the model's max_new_tokens, else the rest of the
        context), temperature, tools, response_format. stream: as in generate(), without the reasoning. Raises
        ServiceErrors.
        """
        chats = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if chats and not isinstance(chats[0], Mapping):
            _check_stream(is_list=True, stream=stream)
            return self._answers([_body(ChatBody, {"messages": list(chat), **fields}) for chat in chats])
        body = _body(ChatBody, {"messages": chats, **fields})
        return self._stream(body) if stream else self._answers([body])[0]

    def embed(self, texts: str | Sequence[str], **fields: Any) -> np.ndarray:
        """Return embeddings of length 1: [hidden_size] of one text, [num_texts, hidden_size] of a list; float32.

        The model is an embedding model, or was loaded with pooling="last" or "mean". fields: those of
        POST /v1/embeddings, such as dimensions. Raises ServiceErrors.
        """
        is_one = isinstance(texts, str)
        body = _body(EmbeddingBody, {"input": texts if is_one else list(texts), **fields})
        vectors = np.stack(self._run(self._embed(body)))
        return vectors[0] if is_one else vectors

    def close(self) -> None:
        """Release the model's memory; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._run(self._close())
        self._end_thread()

    def _answers(self, bodies: list[CompletionBody] | list[ChatBody]) -> list[Answer]:
        answers = self._run(self._answer_all(bodies))
        if len(answers) == 1 and (error := answers[0].error) is not None:
            raise error
        return answers

    def _stream(self, body: CompletionBody | ChatBody) -> Iterator[str]:
        """Yield the pieces of an answer's text; leaving early ends its request."""
        pieces = self._pieces(self._run(self._prepare(body)))
        try:
            while (piece := self._run(anext(pieces, None))) is not None:
                yield piece
        finally:
            self._run(pieces.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work on the engine's thread; what interrupts the wait cancels it."""
        if self._loop.is_closed():
            work.close()
            raise InvalidParameter("This LLM is closed.")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _prepare(self, body: CompletionBody | ChatBody) -> PreparedReply:
        await self._state.check_room()
        if isinstance(body, ChatBody):
            return await prepare_chat(self._state, body, self._request())
        return await prepare_completion(self._state, body, self._request())

    async def _answer_all(self, bodies: Sequence[CompletionBody | ChatBody]) -> list[Answer]:
        """Check all, then run all; a fault of the caller's is raised before anything runs."""
        prepared = [await self._prepare(body) for body in bodies]
        places = asyncio.Semaphore(_AT_ONCE * self._state.limits().max_num_seqs)

        async def run(reply: PreparedReply) -> Answer:
            async with places:
                return await _collect(reply)

        return await asyncio.gather(*map(run, prepared))

    async def _pieces(self, reply: PreparedReply) -> AsyncGenerator[str, None]:
        batches = reply.generation.batches()
        try:
            async for events in batches:
                text = "".join(event.text for event in events if isinstance(event, TextDelta) and event.kind == "text")
                if text:
                    yield text
        finally:
            await batches.aclose()

    async def _embed(self, body: EmbeddingBody) -> list[np.ndarray]:
        prepared = await prepare_embeddings(self._state, body, self._request())
        await prepared.run.embed_all()
        return prepared.run.vectors()

    async def _close(self) -> None:
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._parts.aclose()
        self._engine.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _request(self) -> Request:
        """Return what stands for an HTTP request: no client that may leave, no body that takes others' room."""
        scope: dict[str, Any] = {"type": "http", "headers": []}
        scope[RECORD_SCOPE_KEY] = RequestRecord(make_request_id(), time.monotonic())
        give_place(scope, self._bodies)
        return Request(scope, receive=_never)


class _NoLauncher:
    """The LauncherChannel of a process without one."""

    state = State(Stage("ready"), is_draining=False)
    key_hashes: list[str] = []  # noqa: RUF012 - a constant of the protocol
    key_roles: dict[str, list[str]] = {}  # noqa: RUF012
    key_tenants: dict[str, Tenant] = {}  # noqa: RUF012

    async def scrape(self, *, is_open_metrics: bool = False) -> bytes:
        """Return no metrics."""
        return b""

    async def usage(self) -> Ledger:
        """Return that no key was used."""
        return Ledger(0, 0.0, [])

    async def cancel(self, request_id: str, *, key_hash: str) -> bool:
        """Return that no other process has the request."""
        return False


async def _load(
    engine_config: EngineConfig, server_config: ServerConfig
) -> tuple[AppState, LocalEngine, "asyncio.Task[None]", AsyncExitStack]:
    engine = LocalEngine.load(engine_config)
    state = make_app_state(server_config, client=engine, launcher=_NoLauncher(), metrics=Metrics(), created=0)
    parts = AsyncExitStack()
    await parts.enter_async_context(state.grammars)
    return state, engine, asyncio.create_task(engine.run(), name="engine"), parts


async def _never() -> Any:
    await asyncio.Event().wait()


async def _collect(reply: PreparedReply) -> Answer:
    """Run one prompt to its end. A fault of it alone is in the answer, with what had come before."""
    events: list[Event] = []
    error: ServiceError | None = None
    batches = reply.generation.batches()
    try:
        async for batch in batches:
            events += batch
    except ServiceError as fault:
        error = fault
    finally:
        await batches.aclose()
    stats = reply.generation.stats()
    answer = Answer(num_prompt_tokens=stats.num_prompt_tokens, num_cached_tokens=stats.num_cached_tokens, error=error)
    for choice in collect_choices(events):
        answer.text, answer.reasoning, answer.tool_calls = choice.text, choice.reasoning, choice.calls
        answer.finish_reason, answer.token_ids, answer.logprobs = (
            choice.finish_reason,
            choice.token_ids,
            choice.logprobs,
        )
    return answer


def _body(schema: type[Body], fields: dict[str, Any]) -> Body:
    """Check a body's fields. Raises InvalidParameter that names the first at fault."""
    for name in _HTTP_ALONE:
        if fields.get(name) is not None:
            raise InvalidParameter(f"{name} is a field of HTTP requests alone.", param=name)
    return parse_body(schema, fields)


def _listed(prompt: object) -> object:
    """Return a prompt of token ids as the list that the schema knows; what else was given, for the schema to judge."""
    return list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else prompt


def _check_stream(*, is_list: bool, stream: bool) -> None:
    if is_list and stream:
        raise InvalidParameter("stream is for one prompt, and a list was given.", param="stream")
