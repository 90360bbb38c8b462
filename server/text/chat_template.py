"""ChatTemplate: renders messages to prompt text. Imports jinja2 and engine.interface.errors; never transformers.

The text equals transformers' apply_chat_template byte for byte (utils/chat_template_utils.py, 5.x), which is the
reference for the environment's options, filters and globals, and for continue_final_message.

Users' text never becomes a control token. Where a message contains one, render(mark=True) wraps it in two
noncharacters (U+FDD0, U+FDD1), by which the encoder distinguishes the template's text from the user's. That
includes the keys of objects that users send; only the names of a message's own fields are left unmarked.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta

from engine.interface.errors import InvalidParameter, sentence
from server.text.template_sandbox import FREE_SIZE, BoundedEnvironment

MARK_START, MARK_END = "\ufdd0", "\ufdd1"
_WRITTEN_OUT = (r"\ufdd0", r"\ufdd1")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class ChatTemplate:
    """One compiled template. Thread-safe once made."""

    def __init__(
        self, source: str, *, variables: dict[str, str], special_tokens: Iterable[str], added_tokens: Iterable[str]
    ) -> None:
        """`variables`: bos_token and its like. `added_tokens`: those that are tokens, but not special ones.

        Raises jinja2.TemplateSyntaxError.
        """
        self.source = source
        self._environment = environment = _environment()
        self._template = environment.from_string(source)
        self._variables = variables
        tree = environment.parse(source)
        self.names_read = _names_read(tree)  # variables that the one who renders may set
        self._needs_parts = _needs_parts(tree)
        literals = _literal_text(tree)
        special = list(special_tokens)
        # An added token that the template itself writes steers the model; one that it never writes is mere vocabulary.
        control = special + [token for token in added_tokens if token in literals and not token.isspace()]
        self._special_pattern = _any_of(special)
        self._control_pattern = _any_of(control)

    def has_control_tokens(self, value: Any) -> bool:
        """True if a string or key anywhere in `value` contains a control token: it must then be rendered marked."""
        if isinstance(value, str):
            return self._control_pattern.search(value) is not None
        if isinstance(value, dict):
            return any(map(self.has_control_tokens, (*value.keys(), *value.values())))
        return isinstance(value, list) and any(map(self.has_control_tokens, value))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        mark: bool = False,
        deadline_s: float | None = None,
        free_size: int = FREE_SIZE,
    ) -> str:
        """Return the prompt text. Blocks; every step of the template looks at `deadline_s`, a time.thread_time().

        free_size: characters and steps beside those that the messages allow. Raises RenderTooLong beyond them or the
        deadline, and InvalidParameter when the template refuses the messages.
        """
        chat = _alias_reasoning([{key: value for key, value in m.items() if value is not None} for m in messages])
        template_kwargs = template_kwargs or {}
        if mark:
            chat = [self._mark_message(message) for message in chat]
            tools = _mark(tools, self._control_pattern)
            template_kwargs = {key: _mark(value, self._control_pattern) for key, value in template_kwargs.items()}
        if continue_final_message:
            chat[-1]["content"] = _final_content(chat) + _CONTINUE_TAG
        if self._needs_parts:
            chat = [_in_parts(message) for message in chat]
        context = {
            "messages": chat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
            **template_kwargs,
        }
        text = self._run(context, deadline_s, free_size)
        if mark:  # JSON in ASCII and str() of an object write the marks out
            text = text.replace(_WRITTEN_OUT[0], MARK_START).replace(_WRITTEN_OUT[1], MARK_END)
        return _cut_at_tag(text) if continue_final_message else text

    def _run(self, context: dict[str, Any], deadline_s: float | None, free_size: int) -> str:
        try:
            with self._environment.bounded(context, deadline_s, free_size):
                return "".join(self._template.generate(context))
        except InvalidParameter:
            raise
        except Exception as error:
            # A template is a program over the client's messages: whatever it raises means that it cannot take them.
            raise InvalidParameter(
                f"The model's chat template cannot render these messages: {sentence(str(error)[:300])}",
                param="messages",
            ) from error

    def _mark_message(self, message: Message) -> Message:
        # The model's own <think> or <tool_call> in the history are tokens when they are not special ones: templates
        # split on them, and the prefix cache expects the ids that the model produced.
        pattern = self._special_pattern if message.get("role") == "assistant" else self._control_pattern
        return {key: value if key == "role" else _mark(value, pattern) for key, value in message.items()}


def split_marked(text: str) -> list[tuple[str, bool]]:
    """Split marked text into (piece, is_plain): plain pieces are user text that must not become a control token.

    A template that cuts strings can leave lone marks; they vanish, and still separate what is beside them.
    """
    pieces = []
    for part in re.split(f"({MARK_START}[^{MARK_START}{MARK_END}]*{MARK_END})", text):
        is_plain = part.startswith(MARK_START) and part.endswith(MARK_END)
        inner = [part[1:-1]] if is_plain else re.split(f"[{MARK_START}{MARK_END}]", part)
        pieces += [(piece, is_plain) for piece in inner if piece]
    return pieces


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment([_GenerationTag, jinja2.ext.loopcontrols], {"tojson": _tojson})
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %}: marks assistant text for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:  # noqa: A002 (the name in templates)
    if re.search(r"\d{5}", format):  # a width
        raise ValueError("strftime_now: a width has 4 digits at most")
    return datetime.now().strftime(format)  # noqa: DTZ005


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _names_read(tree: jinja2.nodes.Template) -> frozenset[str]:
    tests = [test.node for test in tree.find_all(jinja2.nodes.Test) if test.name in ("defined", "undefined")]
    asked_for = {node.name for node in tests if isinstance(node, jinja2.nodes.Name)}  # and given a default, if absent
    return frozenset(jinja2.meta.find_undeclared_variables(tree) | asked_for)


def _literal_text(tree: jinja2.nodes.Template) -> str:
    nodes = jinja2.nodes
    literals = [node.data for node in tree.find_all(nodes.TemplateData)]
    literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(literals)


def _any_of(tokens: list[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _mark(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        value = value.replace(MARK_START, "").replace(MARK_END, "")  # a user's own marks would forge a border
        value = re.sub(r"\\+(?=ufdd[01])", "", value)
        return pattern.sub(f"{MARK_START}\\g<0>{MARK_END}", value)
    if isinstance(value, dict):
        return {_mark(key, pattern): _mark(item, pattern) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, pattern) for item in value]
    return value


def _alias_reasoning(chat: list[Message]) -> list[Message]:
    """Templates read a message's reasoning under different names; give it all of them."""
    for i, message in enumerate(chat):
        reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
        if reasoning is not None:
            chat[i] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return chat


def _needs_parts(tree: jinja2.nodes.Template) -> bool:
    """Return whether a template only goes through the parts of a content, as LLaVA's: it would leave out a string."""
    if any(test.name in ("string", "iterable", "sequence", "mapping") for test in tree.find_all(jinja2.nodes.Test)):
        return False
    printing = tree.find_all((jinja2.nodes.Output, jinja2.nodes.Add, jinja2.nodes.Concat))
    if any(_is_content(child) for node in printing for child in node.iter_child_nodes()):
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node | None) -> bool:
    """Return whether an expression is a message's content, filtered or not."""
    while isinstance(node, jinja2.nodes.Filter):
        node = node.node
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Getattr) and node.attr == "content"


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _final_content(chat: list[Message]) -> str:
    content = chat[-1].get("content")
    if not isinstance(content, str):
        raise InvalidParameter(
            "continue_final_message needs a last message with text content.", param="continue_final_message"
        )
    return content


def _cut_at_tag(text: str) -> str:
    start = text.rfind(_CONTINUE_TAG.strip())
    if start < 0:
        raise InvalidParameter(
            "continue_final_message: the chat template leaves out the last message's content.",
            param="continue_final_message",
        )
    if text.startswith(_CONTINUE_TAG, start):
        return text[:start]
    return text[:start].rstrip()  # the template trims its messages, so the content's own trailing space goes as well
