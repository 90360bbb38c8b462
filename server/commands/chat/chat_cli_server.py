"""Which server a chat talks to: the one at --url, the one on port 8000, or one of its own."""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import httpx
import msgspec

from server.commands.child_server import OwnServer
from server.commands.server_target import Target, ToolError, make_client, make_target, served_models, transport_message
from server.commands.target_flags import DEFAULT_URL

_POLL_S = 0.2


class _Readiness(msgspec.Struct):
    stage: str = ""
    done: float = 0.0


@contextlib.contextmanager
def chat_server(arguments: argparse.Namespace, stream: TextIO) -> Iterator[tuple[Target, str]]:
    """Yield a server that is ready, and the name of the model there. stream: for lines on the start."""
    target = make_target(arguments.url or DEFAULT_URL, arguments.api_key, os.environ)
    names = served_models(target)
    if names is not None:
        name = _name_among(arguments.model, names)
        if name is not None:
            wait_ready(target, stream)
            yield target, name
            return
        if arguments.url is not None:
            message = f"{target.url} serves {', '.join(names) or 'nothing'}, not {arguments.model}."
            raise ToolError(message, exit_code=2)
    elif arguments.url is not None:
        raise ToolError(f"No server with OpenAI's API answers at {target.url}: start one with quire serve.")
    with OwnServer(arguments.model, served_names=[], stream=stream) as own:
        own_names = served_models(own.target)
        if not own_names:
            raise ToolError(f"The server that was started is gone: {own.why_gone() or 'it does not answer'}.")
        yield own.target, own_names[0]


def wait_ready(target: Target, stream: TextIO) -> None:
    """Wait while a server says that it is starting. Raises ToolError when it goes away meanwhile."""
    told = False
    with make_client(target, timeout_s=10.0) as client:
        while True:
            try:
                response = client.get("/ready")
            except httpx.HTTPError as error:
                raise ToolError(transport_message(target, error)) from error
            if response.status_code != 503:  # other servers have no such route
                break
            told = _say(stream, f"Waiting for {target.url}: {_stage(response.content)} …", is_first=not told)
            time.sleep(_POLL_S)
    if told and stream.isatty():
        stream.write("\r\x1b[2K")
        stream.flush()


def _say(stream: TextIO, text: str, *, is_first: bool) -> bool:
    if stream.isatty():
        stream.write(f"\r\x1b[2K{text}")
    elif is_first:
        stream.write(text + "\n")
    stream.flush()
    return True


def _stage(body: bytes) -> str:
    try:
        readiness = msgspec.json.decode(body, type=_Readiness)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "starting"
    return f"{readiness.stage or 'starting'} {readiness.done:.0%}"


def _name_among(model: str | None, names: list[str]) -> str | None:
    """Return the served name that MODEL means: the first without one; a folder goes by its own name as well."""
    if model is None:
        return names[0] if names else None
    return next((name for name in (model, Path(model).expanduser().resolve().name) if name in names), None)
