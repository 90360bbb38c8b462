"""Runs a chat: chooses the server, waits until it is ready, and reads questions until the end of input.

The server is the one at --url, else one that answers on port 8000, else a temporary one that the command starts.
Imports httpx; rich on a terminal only.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import httpx
import msgspec

from server.commands.chat.client import Answer, AnswerFailed
from server.commands.chat.session import ChatError, Session, follow, parse_setting
from server.commands.chat.terminal import PlainScreen, Prompt, Screen, clean, make_screen, silence_broken_pipe
from server.commands.child_server import TemporaryServer
from server.commands.server_target import (
    ServerEndpoint,
    ToolError,
    handled,
    leave,
    make_client,
    make_endpoint,
    nobody_message,
    served_models,
    transport_message,
)
from server.commands.target_flags import DEFAULT_URL

_POLL_S = 0.2
_SILENCE_S = 600.0  # Quire sends a comment every 15 s; other servers may think for long


@contextlib.contextmanager
def chat_server(arguments: argparse.Namespace, stream: TextIO) -> Iterator[tuple[ServerEndpoint, str]]:
    """Yield a server that is ready, and the name of the model there. stream: for lines on the start."""
    endpoint = make_endpoint(arguments.url or DEFAULT_URL, arguments.api_key, os.environ)
    names = served_models(endpoint)
    if names is not None:
        name = _name_among(arguments.model, names)
        if name is not None:
            wait_ready(endpoint, stream)
            yield endpoint, name
            return
        if arguments.url is not None:
            message = f"{endpoint.url} serves {', '.join(names) or 'nothing'}, not {arguments.model}."
            raise ToolError(message, exit_code=2)
    elif arguments.url is not None:
        raise ToolError(nobody_message(endpoint, "start one with quire serve"))
    with TemporaryServer(arguments.model, served_names=[], stream=stream) as own:
        own_names = served_models(own.endpoint)
        if not own_names:
            raise ToolError(f"The server that was started is gone: {own.why_gone() or 'it does not answer'}.")
        yield own.endpoint, own_names[0]


def wait_ready(endpoint: ServerEndpoint, stream: TextIO) -> None:
    """Wait until a server is ready. Raises ToolError if it stops responding meanwhile."""
    told = False
    with make_client(endpoint, timeout_s=10.0) as client:
        while True:
            try:
                response = client.get("/ready")
            except httpx.HTTPError as error:
                raise ToolError(transport_message(endpoint, error)) from error
            if response.status_code != 503:  # other servers have no such route
                break
            told = _say(stream, f"Waiting for {endpoint.url}: {_stage(response.content)} …", is_first=not told)
            time.sleep(_POLL_S)
    if told and stream.isatty():
        stream.write("\r\x1b[2K")
        stream.flush()


def run(arguments: argparse.Namespace) -> int:
    """Run `quire chat`; return the exit code. Raises ToolError."""
    settings = _settings(arguments)
    question = None
    if not sys.stdin.isatty():
        question = clean(sys.stdin.buffer.read().decode("utf-8", "surrogateescape"))
        if not question:
            raise ToolError("There is nothing to ask: standard input is empty.", exit_code=2)
    with (
        handled(leave),
        chat_server(arguments, sys.stderr) as (endpoint, model),
        make_client(endpoint, timeout_s=_SILENCE_S) as client,
    ):
        session = Session(model, system=arguments.system, settings=settings, served=lambda: _names_now(endpoint))
        if question is not None:
            return _answer_once(session, client, endpoint, question)
        is_dumb = os.environ.get("TERM", "") in ("", "dumb")
        screen = make_screen(sys.stdout, sys.stderr, is_dumb=is_dumb)
        screen.note(f"{model} on {endpoint.url}. /help lists commands, Ctrl-D leaves.")
        with Prompt(os.environ) as prompt:
            return Chat(session, client, endpoint, screen, prompt).run()


class Chat:
    """An interactive chat on a terminal."""

    def __init__(
        self, session: Session, client: httpx.Client, endpoint: ServerEndpoint, screen: Screen, prompt: Prompt
    ) -> None:
        self._session = session
        self._client = client
        self._endpoint = endpoint
        self._screen = screen
        self._prompt = prompt

    def run(self) -> int:
        """Read questions and show answers until the user leaves; return the exit code."""
        while True:
            try:
                line = self._prompt.read()
                if line and not self._take(line):
                    return 0
            except EOFError:
                self._screen.note("")
                return 0
            except KeyboardInterrupt:
                self._screen.note("\nCtrl-D leaves.")

    def _take(self, line: str) -> bool:
        """Answer a question or run a command; return whether the chat continues."""
        question: str | None = line
        if line.startswith("/"):
            try:
                outcome = follow(self._session, line)
            except ChatError as error:
                self._screen.error(error.message)
                return True
            if outcome.note:
                self._screen.note(outcome.note)
            if outcome.is_end:
                return False
            question = outcome.question
        if question is not None:
            self._session.last_question = question
            with self._prompt.silenced():
                ask(self._session, self._client, self._endpoint, self._screen, question)
        return True


def ask(session: Session, client: httpx.Client, endpoint: ServerEndpoint, screen: Screen, question: str) -> None:
    """Show one answer and keep it, a stopped one as far as it came. One that fails leaves no trace."""
    answer = Answer(client, endpoint, session.body(question))
    settings = session.settings
    screen.begin(thinking=str(settings.get("thinking", "dim")), is_markdown=settings.get("markdown", "on") == "on")
    try:
        for piece in answer:
            screen.piece(piece)
    except KeyboardInterrupt:
        session.keep(question, answer)
        screen.end(answer, is_stopped=True)
    except AnswerFailed as error:
        screen.end(None, is_stopped=False)
        screen.error(error.message)
    else:
        session.keep(question, answer)
        screen.end(answer, is_stopped=False)


class _Readiness(msgspec.Struct):
    stage: str = ""
    done: float = 0.0


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


def _names_now(endpoint: ServerEndpoint) -> list[str]:
    """Return the names that the server answers to now. Raises ChatError."""
    try:
        names = served_models(endpoint)
    except ToolError as error:
        raise ChatError(error.message) from error
    if names is None:
        raise ChatError(f"No server answers at {endpoint.url}.")
    return names


def _answer_once(session: Session, client: httpx.Client, endpoint: ServerEndpoint, question: str) -> int:
    """Answer the question from a pipe, in plain text."""
    answer = Answer(client, endpoint, session.body(question))
    screen = PlainScreen(sys.stdout, sys.stderr)
    try:
        for piece in answer:
            screen.piece(piece)
        screen.end(answer, is_stopped=False)
    except AnswerFailed as error:
        screen.end(None, is_stopped=False)
        screen.error(error.message)
        return 1
    except BrokenPipeError:
        silence_broken_pipe()
        return 1
    return 0


def _settings(arguments: argparse.Namespace) -> dict[str, float | int | str]:
    settings: dict[str, float | int | str] = {"thinking": arguments.thinking}
    if arguments.no_markdown:
        settings["markdown"] = "off"
    if arguments.max_tokens is not None:
        settings["max_tokens"] = arguments.max_tokens
    if arguments.temperature is not None:
        try:
            settings["temperature"] = parse_setting("temperature", arguments.temperature)
        except ChatError as error:
            raise ToolError(f"--{error.message}", exit_code=2) from error
    return settings
