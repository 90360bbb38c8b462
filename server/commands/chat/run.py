"""A chat from its first line to its last. Imports httpx through its neighbours; rich only on a terminal."""

import argparse
import os
import sys

import httpx

from server.commands.chat.chat_cli_commands import follow
from server.commands.chat.chat_cli_input import Prompt, clean
from server.commands.chat.chat_cli_server import chat_server
from server.commands.chat.client import Answer, AnswerFailed
from server.commands.chat.session import ChatError, Session, parse_setting
from server.commands.chat.terminal import PlainScreen, Screen, make_screen, silence_broken_pipe
from server.commands.server_target import Target, ToolError, make_client
from server.commands.tool_signals import handled, leave

_SILENCE_S = 600.0  # Quire sends a comment every 15 s; other servers may think for long


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
        chat_server(arguments, sys.stderr) as (target, model),
        make_client(target, timeout_s=_SILENCE_S) as client,
    ):
        session = Session(model, system=arguments.system, settings=settings)
        if question is not None:
            return _answer_once(session, client, target, question)
        is_dumb = os.environ.get("TERM", "") in ("", "dumb")
        screen = make_screen(sys.stdout, sys.stderr, is_dumb=is_dumb)
        screen.note(f"{model} on {target.url}. /help lists commands, Ctrl-D leaves.")
        with Prompt(os.environ) as prompt:
            return Chat(session, client, target, screen, prompt).run()


class Chat:
    """A chat with a person."""

    def __init__(self, session: Session, client: httpx.Client, target: Target, screen: Screen, prompt: Prompt) -> None:
        self._session = session
        self._client = client
        self._target = target
        self._screen = screen
        self._prompt = prompt

    def run(self) -> int:
        """Ask and answer until the person leaves; return the exit code."""
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
        """Answer a question or follow a command; return whether the chat goes on."""
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
            ask(self._session, self._client, self._target, self._screen, question)
        return True


def ask(session: Session, client: httpx.Client, target: Target, screen: Screen, question: str) -> None:
    """Show one answer and keep it, a stopped one as far as it came. One that fails leaves no trace."""
    answer = Answer(client, target, session.body(question))
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


def _answer_once(session: Session, client: httpx.Client, target: Target, question: str) -> int:
    """Answer what a pipe asks, in plain text."""
    answer = Answer(client, target, session.body(question))
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
