"""The commands of a chat, all of which begin with a slash."""

from collections.abc import Callable
from typing import NamedTuple

from server.commands.chat.session import SETTINGS, ChatError, Session


class Outcome(NamedTuple):
    """What follows from a command: something to say, a question to ask, or the end."""

    note: str = ""
    question: str | None = None
    is_end: bool = False


class _Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[Session, str], Outcome]


def follow(session: Session, line: str) -> Outcome:
    """Follow a line that begins with a slash. Raises ChatError."""
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


def _system(session: Session, argument: str) -> Outcome:
    if not argument:
        return Outcome(session.system or "There is no system message.")
    session.system = None if argument == "none" else argument
    return Outcome("From the next answer on." if session.system else "There is no system message any more.")


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
        raise ChatError("Where to: /save FILE.")
    return Outcome(f"{len(session.messages)} messages are in {session.save(argument)}.")


def _load(session: Session, argument: str) -> Outcome:
    if not argument:
        raise ChatError("What: /load FILE.")
    path = session.load(argument)
    return Outcome(f"{len(session.messages)} messages of {path}.")


def _retry(session: Session, _: str) -> Outcome:
    return Outcome(question=session.take_back())


def _clear(session: Session, _: str) -> Outcome:
    session.clear()
    return Outcome("Nothing was said yet.")


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
    "/system": _Command("/system [TEXT]", "show or set what the model is told first; none removes it", _system),
    "/set": _Command("/set [NAME VALUE]", "show or change settings, such as temperature or thinking", _set),
    "/save": _Command("/save FILE", "write the chat to a file", _save),
    "/load": _Command("/load FILE", "go on with a chat from a file", _load),
    "/retry": _Command("/retry", "ask the last question again", _retry),
    "/clear": _Command("/clear", "forget the messages", _clear),
    "/stats": _Command("/stats", "tokens, TTFT and cache hits so far", _stats),
    "/exit": _Command("/exit", "leave", _exit),
}
