"""Session: the messages, settings and figures of a chat, saved to and loaded from a JSON file; and the slash commands.

Does no I/O except those two files; `served` asks the server for its models.
"""

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from engine.interface.errors import ServiceError
from server.commands.chat.client import Answer

_FLOATS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}
_INTEGERS = {"top_k": (-1, 2**24), "max_tokens": (1, 2**24), "seed": (-(2**63), 2**63 - 1)}
_CHOICES = {
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "thinking": ("dim", "hidden"),
    "markdown": ("on", "off"),
}
SHOWN = ("thinking", "markdown")  # settings of the screen, which the server never sees
SETTINGS = (*_FLOATS, *_INTEGERS, *_CHOICES)


class ChatError(ServiceError):
    """A slash command that cannot be run."""


class Message(msgspec.Struct):
    """One message in the form of OpenAI's API."""

    role: Literal["user", "assistant"]
    content: str


class SavedChat(msgspec.Struct, forbid_unknown_fields=True):
    """The file of /save."""

    quire_chat: Literal[1]
    model: str
    system: str | None
    settings: dict[str, float | int | str]
    messages: list[Message]


class Totals(msgspec.Struct):
    """Figures over all answers of this session."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float = 0.0


class Session:
    """One chat. Its messages always end with an answer."""

    def __init__(
        self,
        model: str,
        *,
        system: str | None,
        settings: dict[str, float | int | str],
        served: Callable[[], list[str]] | None = None,
    ) -> None:
        """served: returns the names that the server answers to now, or raises ChatError; None: the model's alone."""
        self.model = model
        self.served = served or (lambda: [model])
        self.system = system
        self.settings = settings
        self.messages: list[Message] = []
        self.last_question: str | None = None
        self.totals = Totals()

    def body(self, question: str) -> dict[str, object]:
        """Return the request that asks a question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        sent = {name: value for name, value in self.settings.items() if name not in SHOWN}
        messages = [*system, *self.messages, Message("user", question)]
        return {"model": self.model, "messages": messages, **sent}

    def keep(self, question: str, answer: Answer) -> None:
        """Add a question and what came of its answer; one without any text leaves no trace but in the figures."""
        if answer.text:
            self.messages += [Message("user", question), Message("assistant", answer.text)]
        self.totals.num_answers += 1
        self.totals.prompt_tokens += answer.prompt_tokens
        self.totals.cached_tokens += answer.cached_tokens
        self.totals.completion_tokens += answer.completion_tokens
        self.totals.ttft_s += answer.ttft_s

    def take_back(self) -> str:
        """Forget the last question and its answer; return the question. Raises ChatError if there is none."""
        if self.last_question is None:
            raise ChatError("There is no question to ask again.")
        if len(self.messages) >= 2 and self.messages[-2].content == self.last_question:
            del self.messages[-2:]
        return self.last_question

    def clear(self) -> None:
        """Forget every message; system and settings stay."""
        self.messages, self.last_question = [], None

    def set(self, name: str, text: str) -> None:
        """Set a setting from its text; "default" removes it. Raises ChatError."""
        if text == "default":
            parse_setting(name, None)
            self.settings.pop(name, None)
        else:
            self.settings[name] = parse_setting(name, text)

    def save(self, name: str) -> Path:
        """Write the chat; return where. A file that is no chat is not replaced. Raises ChatError."""
        path = Path(name).expanduser()
        if path.exists():
            _read(path)
        saved = SavedChat(1, self.model, self.system, self.settings, self.messages)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise ChatError(f"{path} cannot be written: {error.strerror}.") from error
        return path

    def load(self, name: str) -> Path:
        """Continue a saved chat with this server's model. Raises ChatError, and then changes nothing."""
        path = Path(name).expanduser()
        saved = _read(path)
        settings = {name: parse_setting(name, str(value)) for name, value in saved.settings.items()}
        roles = [message.role for message in saved.messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ChatError(f"{path} is no chat: its messages are not questions and answers in turn.")
        self.system, self.settings, self.messages = saved.system, settings, saved.messages
        self.last_question = saved.messages[-2].content if saved.messages else None
        return path


def parse_setting(name: str, text: str | None) -> float | int | str:
    """Return a checked value; None only checks the name. Raises ChatError that names the limits."""
    if name not in SETTINGS:
        raise ChatError(f"There is no setting {name!r}: it is one of {', '.join(SETTINGS)}.")
    if text is None:
        return ""
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise ChatError(f"{name} is one of {', '.join(_CHOICES[name])}, not {text!r}.")
        return text
    low, high = _FLOATS[name] if name in _FLOATS else _INTEGERS[name]
    try:
        value = float(text) if name in _FLOATS else int(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        kind = "a number" if name in _FLOATS else "a whole number"
        raise ChatError(f"{name} is {kind} from {low:g} to {high:g}, not {text!r}.")
    return value


def _read(path: Path) -> SavedChat:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedChat)
    except OSError as error:
        raise ChatError(f"{path} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChatError(f"{path} is no chat that /save wrote: {error}.") from error


class Outcome(NamedTuple):
    """The result of a command: text to show, a question to send, or the end of the chat."""

    note: str = ""
    question: str | None = None
    is_end: bool = False


class _Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[Session, str], Outcome]


def follow(session: Session, line: str) -> Outcome:
    """Run the slash command in a line. Raises ChatError."""
    name, _, argument = line.partition(" ")
    if name == "/quit":
        name = "/exit"
    if name not in COMMANDS:
        raise ChatError(f"There is no command {name}: /help lists them.")
    return COMMANDS[name].run(session, argument.strip())


def _help(_: Session, __: str) -> Outcome:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    lines.append('Ctrl-C stops an answer, Ctrl-D leaves. \\ at a line\'s end goes on, as do lines between two """.')
    return Outcome("\n".join(lines))


def _model(session: Session, argument: str) -> Outcome:
    names = session.served()
    if not argument:
        lines = [f"{'*' if name == session.model else ' '} {name}" for name in names]
        return Outcome("\n".join(lines) or "The server names no model.")
    if argument not in names:
        raise ChatError(
            f"The server has {', '.join(names) or 'no model'}, not {argument!r}. Another model needs another server: "
            "/exit, then quire chat MODEL."
        )
    session.model = argument
    return Outcome(f"{argument} answers from now on; the messages stay.")


def _system(session: Session, argument: str) -> Outcome:
    if not argument:
        return Outcome(session.system or "There is no system message.")
    session.system = None if argument == "none" else argument
    return Outcome("It applies from the next answer on." if session.system else "The system message is removed.")


def _set(session: Session, argument: str) -> Outcome:
    if not argument:
        lines = [f"{name} = {session.settings.get(name, 'default')}" for name in SETTINGS]
        return Outcome("\n".join(lines))
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    if not value.strip():
        raise ChatError("A setting needs a value: /set NAME VALUE, and /set NAME default takes it back.")
    session.set(name, value.strip())
    return Outcome(f"{name} = {session.settings.get(name, 'default')}")


def _save(session: Session, argument: str) -> Outcome:
    if not argument:
        raise ChatError("/save needs a file name: /save FILE.")
    return Outcome(f"{len(session.messages)} messages are in {session.save(argument)}.")


def _load(session: Session, argument: str) -> Outcome:
    if not argument:
        raise ChatError("/load needs a file name: /load FILE.")
    path = session.load(argument)
    return Outcome(f"{len(session.messages)} messages of {path}.")


def _retry(session: Session, _: str) -> Outcome:
    return Outcome(question=session.take_back())


def _clear(session: Session, _: str) -> Outcome:
    session.clear()
    return Outcome("All messages are deleted.")


def _stats(session: Session, _: str) -> Outcome:
    totals = session.totals
    if not totals.num_answers:
        return Outcome(f"model {session.model}: no answer yet.")
    share = totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0
    lines = [
        f"model          {session.model}",
        f"answers        {totals.num_answers:,} (messages kept: {len(session.messages):,})",
        f"prompt tokens  {totals.prompt_tokens:,}, of them cached {totals.cached_tokens:,} ({share:.0%})",
        f"answer tokens  {totals.completion_tokens:,}",
        f"mean TTFT      {totals.ttft_s / totals.num_answers * 1000:.0f} ms",
    ]
    return Outcome("\n".join(lines))


def _exit(_: Session, __: str) -> Outcome:
    return Outcome(is_end=True)


COMMANDS: dict[str, _Command] = {
    "/help": _Command("/help", "this list", _help),
    "/model": _Command("/model [NAME]", "list the server's models and adapters, or choose one", _model),
    "/system": _Command("/system [TEXT]", "show or set what the model is told first; none removes it", _system),
    "/set": _Command("/set [NAME VALUE]", "show or change settings, such as temperature or thinking", _set),
    "/save": _Command("/save FILE", "write the chat to a file", _save),
    "/load": _Command("/load FILE", "go on with a chat from a file", _load),
    "/retry": _Command("/retry", "ask the last question again", _retry),
    "/clear": _Command("/clear", "forget the messages", _clear),
    "/stats": _Command("/stats", "tokens, TTFT and cache hits so far", _stats),
    "/exit": _Command("/exit", "leave", _exit),
}
