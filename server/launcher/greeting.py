"""What an engine says first to whoever connects. Imports engine's protocol and transport only; never torch."""

import asyncio

from engine.interface.protocol import EngineReady, FromEngine
from engine.interface.transport import read_messages


async def read_greeting(engine_socket: str) -> EngineReady | None:
    """Connect, read the engine's limits and leave; None if it is gone."""
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
