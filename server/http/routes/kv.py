"""Routes GET /kv/snapshot and /kv/stream: the KV cache state for the page at /kv. With API keys both need one.

Of several engines (--disaggregate) they show the one that ?engine= names, or the first that decodes and serves.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import msgspec
from fastapi import Response

from engine.interface.client import EngineClient
from engine.interface.errors import EngineDead, InvalidParameter, ServiceError, ShuttingDown
from engine.interface.paired_client import PairedEngineClient
from server.api.app_state import AppState
from server.api.sse import EventStreamResponse
from server.http.routes.api_route import ApiRoute
from server.http.routes.kv_feed import INTERVAL_S, KvFeed, KvState

_NEVER_KEPT = {"cache-control": "no-store, no-transform"}


class Same(msgspec.Struct, tag="same", tag_field="event"):
    """Nothing but the time has changed since the last event."""

    time: float


class Gap(msgspec.Struct, tag="state", tag_field="event"):
    """There is no snapshot now. stage: as /ready has it, or "busy" while the engine does not answer."""

    stage: str
    detail: str


class End(msgspec.Struct, tag="end", tag_field="event"):
    """The last event: the server shuts down."""

    detail: str


class _Feeds:
    """The feeds of one worker, one for each engine that somebody has looked at; an engine's viewers share it."""

    def __init__(self, client: EngineClient, *, model: str) -> None:
        self._client = client
        self._model = model
        self._feeds: dict[str | None, KvFeed] = {}

    def choose(self, engine: str | None) -> KvFeed:
        """Return the feed of an engine; None: of the one that serves. Raises InvalidParameter."""
        client, engines = self._client, list(self._client.engines)
        if isinstance(client, PairedEngineClient):
            engine, client = client.client_of(engine)
        elif engine is not None:
            raise InvalidParameter(
                f"engine: {engine[:100]!r} cannot be chosen, since this server has one engine.", param="engine"
            )
        if engine not in self._feeds:
            self._feeds[engine] = KvFeed(client, model=self._model, engine=engine, engines=engines)
        return self._feeds[engine]


def kv_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the routes, bound to one worker's state."""
    feeds = _Feeds(app_state.client, model=app_state.config.served_model_names[0])

    async def snapshot(engine: str | None = None) -> Response:
        feeds.choose(engine)
        await app_state.wait_served()
        return Response((await feeds.choose(engine).next()).body, media_type="application/json", headers=_NEVER_KEPT)

    async def stream_head() -> Response:
        return Response(media_type=EventStreamResponse.media_type, headers=_NEVER_KEPT)

    async def stream(engine: str | None = None) -> Response:
        feeds.choose(engine)
        events = _events(app_state, lambda: feeds.choose(engine))
        return EventStreamResponse(events, headers=_NEVER_KEPT, on_disconnect=_nothing, close=events.aclose)

    return [
        ApiRoute(
            path="/kv/snapshot",
            handler=snapshot,
            summary="Who holds which block of the KV cache",
            answer=KvState,
            role="admin",
            error_statuses=(400, 503),
        ),
        ApiRoute(methods=("HEAD",), path="/kv/stream", handler=stream_head, role="admin"),
        # not in the document: it has no end, so that tools that read all of it would wait
        ApiRoute(methods=("GET",), path="/kv/stream", handler=stream, role="admin"),
    ]


async def _events(app_state: AppState, choose: Callable[[], KvFeed]) -> AsyncGenerator[bytes, None]:
    """Yield snapshots, four a second at most, until the server drains or another daemon has its port.

    choose: returns the feed to show now. A page whose stream ends connects again, then to the other daemon.
    """
    revision, told, feed = 0, "", choose()
    while _is_served(app_state):
        if (chosen := choose()) is not feed:
            feed, revision = chosen, 0
        try:
            shown = await feed.next()
        except ShuttingDown:
            break
        except ServiceError as error:
            stage = _stage(app_state, error)
            if stage != told:
                told, revision = stage, 0
                yield _named(Gap(stage, error.message))
            await asyncio.sleep(INTERVAL_S)
            continue
        told = ""
        yield (
            _named(Same(shown.time))
            if shown.revision == revision
            else b"event: snapshot\ndata: " + shown.body + b"\n\n"
        )
        revision = shown.revision
        while (rest_s := shown.next_s - time.monotonic()) > 0 and _is_served(app_state):
            await asyncio.sleep(min(rest_s, INTERVAL_S))
    yield _named(End("The server is shutting down."))


def _is_served(app_state: AppState) -> bool:
    state = app_state.launcher.state
    return state.accepts and not state.is_draining


def _stage(app_state: AppState, error: ServiceError) -> str:
    """Return the reason for a missing snapshot."""
    if not isinstance(error, EngineDead):
        return "busy"
    stage = app_state.launcher.state.stage.name
    return "restarting" if stage == "ready" else stage


def _named(event: Same | Gap | End) -> bytes:
    name = event.__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"


def _nothing() -> None:
    """Do nothing: a viewer that disconnects is no aborted request."""
