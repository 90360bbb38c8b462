"""Quire on Ray Serve: each replica is a whole daemon, behind Ray's proxies and AffinityRouter. Imports ray.

    serve run deploy.ray.app:build model=MODEL replicas=2 gpus=1        (deploy/ray/settings.py has every key)
    serve run deploy/ray/quire.yaml
Life of a replica: created by Ray → engine ready → serving, with health checks → no longer routed to → its streams have
finished, or drain_timeout has passed → removed. A dead engine is restarted within its replica; if it does not return,
or makes no progress, Ray replaces the replica.
"""

import asyncio
import logging
import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.ray.edge import CALLBACK, CALLBACK_VARIABLE
from deploy.ray.metrics import export
from deploy.ray.settings import read_arguments
from server.hosted.app import HostedApp

logger = logging.getLogger(__name__)

_ROUTING_STATS_PERIOD_S = 1.0  # maximum time that a replica without an engine is still routed to
_START_ATTEMPTS = 3  # of a replica, before the deployment fails with the reason


@serve.deployment(name="Quire")
@serve.ingress()
class QuireReplica:
    """One replica: Quire's ASGI app in Ray's event loop, with launcher and engine in separate processes."""

    def __init__(self, flags: list[str]) -> None:
        self._hosted = HostedApp(flags)
        self._export: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the app once the engine serves; Ray calls this, since the deployment has no app at import."""
        app = await self._hosted.start()
        app.add_middleware(ReplicaName, name=serve.get_replica_context().replica_id.unique_id)
        self._export = asyncio.create_task(export(self._hosted))
        if os.environ.get(CALLBACK_VARIABLE) != CALLBACK:
            logger.warning("routing by prompt is off: start Ray with %s=%s", CALLBACK_VARIABLE, CALLBACK)
        return app

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine is dead or stalled; Ray replaces the replica after three failures."""
        if not self._hosted.is_alive:
            raise RuntimeError(f"This replica cannot serve: {self._hosted.fault}.")

    async def record_routing_stats(self) -> dict[str, bool]:
        """Return the readiness of this replica for the routers."""
        return {"is_ready": not self._hosted.fault}

    async def __del__(self) -> None:
        """Stop the daemon; Ray calls this once no request is left."""
        if self._export is not None:
            self._export.cancel()
        await self._hosted.aclose()


class ReplicaName:
    """Middleware that adds the replica's name to each response, as header x-quire-replica."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-quire-replica"] = self._name
            await send(message)

        await self._app(scope, receive, send_named)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application that `serve run` starts. Raises ValueError or StartupError for invalid arguments."""
    settings, reservation, flags = read_arguments(arguments)
    router = RequestRouterConfig(
        request_router_class="deploy.ray.routing:AffinityRouter",
        request_router_kwargs={"max_imbalance": settings.max_imbalance},
        request_routing_stats_period_s=_ROUTING_STATS_PERIOD_S,
    )
    replica: Any = QuireReplica  # a serve.Deployment: type checkers pass over decorators of classes
    deployment = replica.options(
        ray_actor_options={"num_cpus": reservation.cpus, "num_gpus": reservation.gpus},
        placement_group_bundles=[reservation.bundle()] if reservation.is_split else None,
        placement_group_strategy="STRICT_PACK" if reservation.is_split else None,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        request_router_config=router,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=settings.health_period,
        max_constructor_retry_count=_START_ATTEMPTS,
    )
    if settings.max_replicas is None:
        return deployment.options(num_replicas=settings.replicas).bind(flags)
    scaling = AutoscalingConfig(
        min_replicas=settings.replicas,
        max_replicas=settings.max_replicas,
        target_ongoing_requests=settings.target_ongoing_requests,
    )
    return deployment.options(autoscaling_config=scaling).bind(flags)
