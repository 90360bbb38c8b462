"""A worker that hears of a hand-over at any time of its start accepts no more connections."""

import asyncio
import socket

import uvicorn

from engine.interface.metrics import Metrics
from server.http.launcher_link import LauncherLink
from server.http.worker import _follow_hand_over, _Server


async def _app(scope: dict, receive: object, send: object) -> None:
    raise AssertionError("no request is sent")


def test_a_hand_over_before_the_server_starts_is_not_lost() -> None:
    async def main() -> None:
        link = LauncherLink("", worker_index=0, metrics=Metrics(), on_cancel=lambda request_id, *, key_hash: False)
        link.handed_over.set()  # while the worker waited for the engine's greeting
        with socket.create_server(("127.0.0.1", 0)) as listener:
            started: list[bool] = []
            server = _Server(
                uvicorn.Config(_app, lifespan="off", log_config=None), on_start=lambda: started.append(True)
            )
            _follow_hand_over(link, server)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with asyncio.timeout(10):
                while not started:
                    await asyncio.sleep(0.01)
            assert listener.fileno() == -1
            server.should_exit = True
            await serving

    asyncio.run(main())
