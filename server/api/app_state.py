"""AppState: the state shared by the routes of one HTTP worker, and the first checks of a request. Never torch."""

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.interface.client import QUEUE_IS_FULL, EngineClient
from engine.interface.config import ServerConfig
from engine.interface.control import LauncherChannel
from engine.interface.errors import (
    InvalidParameter,
    Overloaded,
    RateLimited,
    RequestError,
    ServiceError,
    UnsupportedFeature,
)
from engine.interface.metrics import Metrics
from engine.interface.protocol import EngineReady
from server.api.generation_spec import RequestContext
from server.api.heavy_work import HeavyWork
from server.api.limits import LIMITS
from server.api.request_record import RequestRecord
from server.errors import DeadlineExceeded, Draining, HttpError, ModelNotFound, NotReady, TooManyBodies
from server.structured_output.compile_check import GrammarChecker
from server.text.embedding_model import EmbeddingModel, load_embedding_model
from server.text.generation_defaults import GenerationDefaults, load_generation_defaults
from server.text.tokenizer import Tokenizer, load_tokenizer

_UNSAFE_IN_HEADER = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_MAX_IGNORED_SHOWN = 32
_GREETING_S = 2.0  # for the greeting of an engine that serves: HTTP workers hear of it one after another
_GREETING_POLL_S = 0.01


class Prioritized(Protocol):
    """A body of any API with a priority."""

    priority: int | None


@dataclass(frozen=True)
class AppState:
    """One HTTP worker's configuration, its connections to engine and launcher, and the model's text side."""

    config: ServerConfig
    client: EngineClient
    launcher: LauncherChannel
    metrics: Metrics
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    created: int  # Unix time of the start, seconds
    grammars: GrammarChecker
    embedding: EmbeddingModel | None = None  # None: the model makes no embeddings
    work: HeavyWork = field(default_factory=HeavyWork)

    def limits(self) -> EngineReady:
        """Return the engine's limits. Raises Draining or NotReady while no new request is accepted.

        If another engine takes its place soon, they are those of the last one: the request waits for the next.
        """
        state, ready = self.launcher.state, self.client.ready
        if state.is_draining:
            raise Draining("The server is shutting down; send the request to another one.")
        if self.lets_wait:
            ready = ready or self.client.last_ready
            if ready is not None:
                return ready
        if state.stage.name != "ready" or ready is None:
            stage = state.stage
            progress = f" ({stage.done} of {stage.total} {stage.unit})" if stage.total else ""
            name = "restarting" if stage.name == "ready" else stage.name
            raise NotReady(f"The model is not ready yet: {name}{progress}.")
        return ready

    async def wait_served(self) -> EngineReady:
        """Return limits(); wait a moment for an engine that serves and has not greeted this worker. Raises the same."""
        end_s = time.monotonic() + _GREETING_S
        while self.client.ready is None and self._is_served and time.monotonic() < end_s:
            if self.lets_wait and self.client.last_ready is not None:
                break
            await asyncio.sleep(_GREETING_POLL_S)
        return self.limits()

    @property
    def lets_wait(self) -> bool:
        """True if requests that come while no engine serves wait for the next one (State.lets_wait)."""
        state = self.launcher.state
        return state.lets_wait and state.is_alive and self.config.max_replays > 0

    @property
    def _is_served(self) -> bool:
        state = self.launcher.state
        return state.stage.name == "ready" and not state.is_draining

    async def check_room(self) -> None:
        """Refuse a generating request before any work is done for it.

        Raises Draining, NotReady, Overloaded, or UnsupportedFeature if the model does not generate.
        """
        if not (await self.wait_served()).can_generate:
            raise UnsupportedFeature(
                f"{self.config.served_model_names[0]} makes embeddings and no text, since it has no language-model"
                " head: use /v1/embeddings.",
                param="model",
            )
        self._check_full()

    async def check_queue(self) -> None:
        """Refuse a request that would wait too long in the queue. Raises Draining, NotReady or Overloaded."""
        await self.wait_served()
        self._check_full()

    def _check_full(self) -> None:
        if self.client.is_full:
            raise Overloaded(QUEUE_IS_FULL)

    def embedding_model(self) -> EmbeddingModel:
        """Return the embedding settings of the model. Raises UnsupportedFeature if it makes no embeddings."""
        if self.embedding is None:
            raise UnsupportedFeature(
                f"{self.config.served_model_names[0]} is not an embedding model (it has no modules.json): start the"
                " server with --pooling last or --pooling mean to make embeddings of its hidden states.",
                param="model",
            )
        return self.embedding

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with. Raises ModelNotFound."""
        names = self.config.served_model_names + self.config.lora_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ModelNotFound(
                f"The model {asked[:200]!r} does not exist; served here: {', '.join(names)}.", param="model"
            )
        return asked

    def lora_index(self, name: str) -> int:
        """Return the adapter index for AddRequest of a name that model_name() returned; 0: the base model."""
        loras = self.config.lora_names
        return loras.index(name) + 1 if name in loras else 0

    def ignored_header(self, ignored: list[str]) -> dict[str, str]:
        """Return the header that names fields without effect. Raises InvalidParameter in strict mode."""
        if not ignored:
            return {}
        if self.config.strict:
            raise InvalidParameter(f"The field {ignored[0][:100]} is unknown or has no effect here.", param=ignored[0])
        names = [_UNSAFE_IN_HEADER.sub("?", name[:64]) for name in ignored[:_MAX_IGNORED_SHOWN]]
        more = len(ignored) - len(names)
        return {"x-quire-ignored": ", ".join(names) + (f", and {more} more" if more else "")}

    def drop_priority(self, body: Prioritized, record: RequestRecord) -> list[str]:
        """Remove the priority of a body that may not set it (--priority); return the names of fields without effect.

        One without a priority gets 0, or its key's ceiling. Raises InvalidParameter for one over the ceiling.
        """
        ignored = []
        if body.priority and not self._may_prioritize(record):
            body.priority = None
            ignored = ["priority"]
        ceiling = record.tenant.priority_ceiling
        if ceiling is not None:
            if body.priority is None:
                body.priority = max(ceiling, 0)
            elif body.priority < ceiling:
                raise InvalidParameter(
                    f"priority is {body.priority}; the API key {record.tenant.name} has the priority_ceiling {ceiling},"
                    " and a smaller value is an earlier turn.",
                    param="priority",
                )
        return ignored

    def _may_prioritize(self, record: RequestRecord) -> bool:
        who = self.config.priority
        if who is None:
            who = "all" if len(self.launcher.key_hashes or self.config.api_key_hashes) <= 1 else "off"
        return who == "all" or (who == "keys" and "priority" in record.key_roles)

    async def encode_texts(self, texts: Sequence[str], *, num_bytes: int, param: str) -> list[list[int]]:
        """Return the ids of prompts, up to the first that does not fit the context. Raises as encode_checked() does.

        num_bytes: of the request's body, which counts many short texts, too.
        """
        max_model_len = self.limits().max_model_len
        encode = partial(
            self.tokenizer.encode_checked,
            texts,
            max_model_len=max_model_len,
            max_total=LIMITS.prompt_tokens_of(max_model_len),
            param=param,
        )
        num_chars = sum(map(len, texts))
        is_brief = self.work.is_brief(max(num_bytes, num_chars))
        return encode() if is_brief else await self.work.run(num_chars, encode)

    def request_context(self, record: RequestRecord) -> RequestContext:
        """Return the facts of a request besides its body, with a new seed."""
        timeout_s, seed = self.config.request_timeout_s, secrets.randbits(63)
        return RequestContext(record.arrival_s, timeout_s, seed, record.key_hash, record.tenant)

    def count_rejected(self, error: ServiceError) -> None:
        """Count a refused request. HttpMetrics counts requests that fail later."""
        match error:
            case DeadlineExceeded():
                return
            case Draining():
                reason = "draining"
            case NotReady():
                reason = "not_ready"
            case RateLimited():
                reason = "rate_limit_exceeded"
            case Overloaded() | TooManyBodies():
                reason = "overloaded"
            case RequestError() | HttpError():
                reason = "invalid"
            case _:
                return
        self.metrics.count("requests_rejected_total", label=reason)


def make_app_state(
    config: ServerConfig, *, client: EngineClient, launcher: LauncherChannel, metrics: Metrics, created: int
) -> AppState:
    """Load the text side of the model. Raises StartupError."""
    folder = Path(config.model)
    tokenizer = load_tokenizer(folder, chat_template=Path(config.chat_template) if config.chat_template else None)
    defaults = load_generation_defaults(folder, tokenizer_eos_id=tokenizer.eos_id)
    embedding = load_embedding_model(folder, pooling=config.pooling)
    grammars = GrammarChecker(folder, meter=client)
    return AppState(config, client, launcher, metrics, tokenizer, defaults, created, grammars, embedding)
