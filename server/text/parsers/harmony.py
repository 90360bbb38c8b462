"""HarmonyParser: splits an answer in OpenAI's harmony format (gpt-oss) into reasoning, text and calls. Never raises.

    <|channel|>analysis<|message|> … <|end|> <|start|>assistant<|channel|>final<|message|> …

An answer is a row of messages. The header before <|message|> names the channel and, with to=, a recipient. Messages of
the channel analysis are reasoning, all others text (commentary without a recipient is what the model says before a
call). A message to a tool of the request is a call, in any channel, with the recipient before or after the channel's
name; one to anything else (python, browser) is reasoning: this server runs no tools, and it is not meant for the user.
The prompt ends within a header, <|start|>assistant. Text where a header should be, or a header that is none, is text.
Messages of a kind are separated by a newline. Imports server.text.parsers.
"""

import re
from collections.abc import Collection
from enum import Enum, auto

from server.text.parsers.base import Arguments, CallStart, Part, Reasoning, Text
from server.text.parsers.json_call import JsonEscaper
from server.text.parsers.reasoning import ReasoningTags
from server.text.parsers.tool_calls import held_length

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
STOPS = (RETURN, CALL)  # tokens that end an answer
REASONING = ReasoningTags(f"{CHANNEL}analysis{MESSAGE}", END)
NAMESPACE = "functions."
_ENDS = (END, CALL, RETURN)
_AFTER_BODY = (*_ENDS, START, CHANNEL)
_ROLE = "assistant"
_MAX_HEADER_CHARS = 512
_HEADER_TEXT = re.compile(r"[\w.:=/\- ]*")
_OPENING = re.compile(r"\s*(assistant)?\s*(to=[^\s<]{1,256})?\s*")  # of a header without its <|start|>
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class _State(Enum):
    BETWEEN = auto()  # messages, or at the beginning: a header may come without its <|start|>
    HEADER = auto()
    BODY = auto()


class HarmonyParser:
    """Splits one choice's text."""

    def __init__(self, names: Collection[str], *, is_open: bool) -> None:
        """`names`: the request's tools. `is_open`: the prompt ends within reasoning."""
        self._names = names
        self._state = _State.BODY if is_open else _State.BETWEEN
        self._kind: type[Text] | type[Reasoning] | None = Reasoning if is_open else None  # of the body; None: a call
        self._held = ""
        self._header = ""
        self._space = ""  # at the end of what was read of a reasoning message
        self._seen: set[type[Part]] = set()  # kinds that have text
        self._is_new = True  # no text of this message was given out
        self._arguments: JsonEscaper | None = None
        self._parts: list[Part] = []

    @property
    def is_reasoning(self) -> bool:
        return self._state is _State.BODY and self._kind is Reasoning

    def push(self, text: str) -> list[Part]:
        buffer, self._held = self._held + text, ""
        while buffer:
            match self._state:
                case _State.BETWEEN:
                    buffer = self._between(buffer)
                case _State.HEADER:
                    buffer = self._in_header(buffer)
                case _State.BODY:
                    buffer = self._in_body(buffer)
        return self._take()

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state is _State.BETWEEN and (held.strip() or not self._seen):
            self._open(Text)
        if self._state is _State.BODY:  # a header that is cut off has no text
            self._add(held)
            self._close()
        return self._take()

    def _between(self, buffer: str) -> str:
        start, tag = _first_tag(buffer, TAGS)
        before = buffer[:start] if tag else buffer[: len(buffer) - _held_length(buffer, TAGS)]
        if not tag and _may_open(before):
            self._held = buffer
            return ""
        if not _OPENING.fullmatch(before) or (before.strip() and tag not in (CHANNEL, MESSAGE)):
            self._open(Text)
            return buffer
        if tag in _ENDS:
            return buffer[start + len(tag) :]
        self._state, self._header = _State.HEADER, before + tag
        return self._read_tag(tag, buffer[start + len(tag) :])

    def _in_header(self, buffer: str) -> str:
        start, tag = _first_tag(buffer, TAGS)
        end = start if tag else len(buffer) - _held_length(buffer, TAGS)
        good = _HEADER_TEXT.match(buffer, 0, end)
        assert good is not None
        is_good = good.end() == end and len(self._header) + end <= _MAX_HEADER_CHARS
        if not is_good or tag in (START, *_ENDS):
            raw, self._header = self._header, ""
            self._open(Text)
            self._add(raw)
            return buffer
        self._header += buffer[:end]
        if not tag:
            self._held = buffer[end:]
            return ""
        self._header += tag
        return self._read_tag(tag, buffer[end + len(tag) :])

    def _read_tag(self, tag: str, rest: str) -> str:
        if tag == MESSAGE:
            self._begin_body(self._header)
            self._header = ""
        return rest

    def _begin_body(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient is not None and recipient[1] != _ROLE:
            name = self._tool_name(recipient[1])
            if name is None:
                self._open(Reasoning)
                return
            self._state, self._kind = _State.BODY, None
            self._arguments = JsonEscaper()
            self._seen.add(CallStart)
            self._parts.append(CallStart(name))
            return
        self._open(Reasoning if channel is not None and channel[1] == "analysis" else Text)

    def _tool_name(self, recipient: str) -> str | None:
        """Return the function that a message is for, or None."""
        name = recipient.removeprefix(NAMESPACE)
        if self._names and name and name != recipient:
            return name
        last = recipient.rpartition(".")[2]
        return next((name for name in (recipient, last) if name in self._names), None)

    def _in_body(self, buffer: str) -> str:
        start, tag = _first_tag(buffer, _AFTER_BODY)
        end = start if tag else len(buffer) - _held_length(buffer, _AFTER_BODY)
        self._add(buffer[:end])
        if not tag:
            self._held = buffer[end:]
            return ""
        self._close()
        self._state = _State.BETWEEN
        return buffer[end + len(tag) :] if tag in _ENDS else buffer[end:]

    def _open(self, kind: type[Text] | type[Reasoning]) -> None:
        self._state, self._kind, self._is_new, self._space = _State.BODY, kind, True, ""

    def _add(self, text: str) -> None:
        """Add to the body of the message that is being read."""
        if self._arguments is not None:
            if escaped := self._arguments.push(text):
                self._parts.append(Arguments(escaped))
            return
        kind = self._kind or Text
        if kind is Reasoning:  # whitespace beside the tags is dropped
            whole = self._space + text
            text = whole.rstrip()
            self._space = whole[len(text) :]
            text = text.lstrip() if self._is_new else text
        if not text:
            return
        if self._is_new and kind in self._seen:
            text = "\n" + text
        self._is_new = False
        self._seen.add(kind)
        self._parts.append(kind(text))

    def _close(self) -> None:
        if self._arguments is not None and self._arguments.is_empty:
            self._parts.append(Arguments("{}"))
        self._arguments = None

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def _first_tag(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Return where the first of the tags begins, and which it is; "" if there is none."""
    return min(((text.find(tag), tag) for tag in tags if tag in text), default=(-1, ""))


def _held_length(text: str, tags: tuple[str, ...]) -> int:
    return max(held_length(text, tag) for tag in tags)


def _may_open(text: str) -> bool:
    """Return whether more text can make this the beginning of a header without its <|start|>."""
    if _OPENING.fullmatch(text):
        return True
    rest = text.lstrip()
    if _ROLE.startswith(rest):
        return True
    return "to=".startswith(rest.removeprefix(_ROLE).lstrip())
