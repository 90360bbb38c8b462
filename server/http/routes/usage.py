"""Route GET /v1/usage: the ledger of the API keys, for keys with the role admin."""

import msgspec
from fastapi import Response

from engine.interface.control import KeyUsage
from server.api.app_state import AppState
from server.http.routes.api_route import ApiRoute
from server.http.routes.reply import json_reply


class UsageReport(msgspec.Struct, kw_only=True):
    """What each name of API keys has used since the daemon's start, in Unix time."""

    object: str = "usage"
    start_time: int
    data: list[KeyUsage]


def usage_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the route, bound to one worker's state."""

    async def usage() -> Response:
        ledger = await app_state.launcher.usage()
        return json_reply(UsageReport(start_time=int(ledger.start_s), data=ledger.usage))

    return [
        ApiRoute(
            path="/v1/usage",
            handler=usage,
            summary="Requests, tokens and device time by the name of the API key",
            answer=UsageReport,
            role="admin",
        )
    ]
