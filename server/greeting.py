"""The engine's greeting, for whoever wants its limits and no more. Imports engine's protocol and transport."""

import asyncio

from engine.protocol import EngineReady, FromEngine
from engine.transport import read_messages


async def read_greeting(engine_socket: str) -> EngineReady | None:
    """Connect, take the first message, and leave. None: the engine has died again; the next one will say."""
    try:
        reader, writer = await asyncio.open_unix_connection(engine_socket)
    except OSError:
        return None
    try:
        async for message in read_messages(reader, FromEngine):
            return message if isinstance(message, EngineReady) else None
        return None
    finally:
        writer.close()
