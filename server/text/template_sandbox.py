"""BoundedEnvironment: jinja2's sandbox with bounds on the time and the memory of a render. Imports jinja2 only.

The sandbox keeps a template from Python's internals, not from `'a' * 10**9` or a loop that never ends. Here each render
has a budget: every turn of a loop, call, filter, operator and output takes its size from it, before the value is made
where the operands tell the size, and looks at the clock. Nothing is computed when a template is compiled.

Life: bounded() sets the budget of a render in this thread → the template runs → the budget is dropped.
"""

import functools
import re
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes

from engine.interface.errors import InvalidParameter

FREE_SIZE = 16 << 20  # characters, list items and steps
_SIZE_PER_INPUT = 64  # more for each character of the messages
_MAX_WIDTH = 10_000  # of padding and indentation, and items of a group
_MAX_INTEGER_BITS = 1 << 14
_MAX_SLOW_CHARS = 1 << 16
_WIDTH_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"})
_SLOW_FILTERS = frozenset({"striptags", "urlize", "wordwrap"})  # quadratic
# These look at a container's members no deeper than one level; the others write, sort or compare all of it.
_SHALLOW_FILTERS = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map"}
)
_SHALLOW_FILTERS |= {"random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
# These go through an iterator; to the others it is a value, which for one is no JSON
_ITERATING_FILTERS = frozenset({"groupby", "join", "max", "min", "sort", "sum", "unique", "urlencode"})
_LONG_NUMBER = re.compile(r"\d{5}|\*")  # a width in a format, or one that is an argument
_NESTED_FORMAT = re.compile(r":[^{}]*(\{|\d{5})")


class RenderTooLong(InvalidParameter):
    """A render would take more time, or make more text, than it may."""


class _Budget:
    """The rest of what one render may use."""

    def __init__(self, size: int, deadline_s: float | None) -> None:
        self.limit = self.rest = size
        self._deadline_s = deadline_s

    def spend(self, size: int) -> None:
        """Take a step and its size. Raises InvalidParameter at the end of the budget or of the time."""
        self.rest -= size + 1
        if self.rest < 0:
            raise RenderTooLong(
                f"Rendering the chat template takes more than the limit of {self.limit} characters and steps.",
                param="messages",
            )
        if self._deadline_s is not None and time.thread_time() > self._deadline_s:
            raise template_timeout("2 s")

    def weigh(self, value: Any) -> int:
        """Return the size of a value as text, shared parts each time. Raises InvalidParameter beyond the budget."""
        size, num_steps, waiting = 0, 0, [value]
        while waiting:
            item = waiting.pop()
            num_steps += 1
            if num_steps % 1024 == 0:
                self.spend(0)  # looks at the clock
            size += 1 + (len(item) if isinstance(item, str) else 0)
            if isinstance(item, dict):
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, list | tuple):
                waiting += item
            if size + len(waiting) > self.rest:
                self.spend(size + len(waiting))
        return size


def template_timeout(limit: str) -> RenderTooLong:
    """The error for a template that runs too long."""
    return RenderTooLong(f"Rendering the chat template took longer than the limit of {limit}.", param="messages")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates render within bounded()."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, extensions: list[type[jinja2.ext.Extension]], filters: dict[str, Callable[..., Any]]) -> None:
        """`filters`: added to jinja2's own."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=self._output
        )
        self._local = threading.local()
        del self.globals["lipsum"]
        self.filters = {name: self._bounded_filter(name, filter_) for name, filter_ in (self.filters | filters).items()}
        self.filters |= {
            "_spend": self._spend,
            "_concat": self._concat,
            "_charged": self._charged,
            "_compared": self._compared,
        }

    @contextmanager
    def bounded(self, context: dict[str, Any], deadline_s: float | None, free_size: int) -> Iterator[None]:
        """Give the render in this thread a budget by the size of its variables, on top of free_size.

        `deadline_s`: of time.thread_time().
        """
        size = _Budget(1 << 62, None).weigh(context)
        self._local.budget = _Budget(free_size + _SIZE_PER_INPUT * size, deadline_s)
        try:
            yield
        finally:
            del self._local.budget

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator to values whose result fits the budget."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if operator in ("*", "**") and bits > _MAX_INTEGER_BITS:
                raise ValueError("an integer has too many digits")
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        elif operator == "*":
            sequence, factor = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, str | list | tuple) and isinstance(factor, int):
                self._spend(len(sequence) * max(0, factor))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._spend(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls: a step, and its result takes from the budget."""
        if isinstance(obj, types.BuiltinMethodType):
            args = self._checked_arguments(obj.__name__, obj.__self__, args, kwargs)
        self._spend(0)
        return self._charged(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return str.format or str.format_map without widths of too many digits; None for another value."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            text = value.__self__
            if _NESTED_FORMAT.search(text):
                raise ValueError("a format has too large a width")
            self._spend(text.count("{") * self._local.budget.weigh([args, kwargs]))
            return formatted(*args, **kwargs)

        return bounded

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Bounds().visit(source), name, filename, defer_init)

    @jinja2.pass_context  # so that no output is computed when the template is compiled
    def _output(self, context: jinja2.runtime.Context, value: Any) -> Any:
        self._spend(self._size(value))
        return value

    def _spend(self, size: int) -> str:
        self._local.budget.spend(size)
        return ""

    def _size(self, value: Any) -> int:
        """Return the size of a value's text."""
        if isinstance(value, str):
            return len(value)
        return self._local.budget.weigh(value) if isinstance(value, dict | list | tuple) else 0

    def _charged(self, value: Any) -> Any:
        self._spend(len(value) if isinstance(value, str | list | tuple) else 0)
        return value

    def _compared(self, value: Any) -> Any:
        if isinstance(value, dict | list | tuple):
            self._spend(self._local.budget.weigh(value))
        return value

    def _concat(self, parts: list[Any]) -> str:
        self._spend(sum(map(self._size, parts)))
        return "".join(map(str, parts))

    def _check_percent(self, form: str, values: Any) -> None:
        if _LONG_NUMBER.search(form):
            raise ValueError("a format has too large a width")
        self._spend(len(form) + form.count("%") * self._local.budget.weigh(values))

    def _checked_arguments(
        self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments of a builtin method, whose result fits the budget."""
        _check_widths([*args, *kwargs.values()])
        if name == "expandtabs" and isinstance(owner, str):
            self._spend(owner.count("\t") * max([8, *filter(_is_integer, (*args, *kwargs.values()))]))
        if name == "replace" and isinstance(owner, str):
            self._check_replace(owner, args)
        if name == "join" and isinstance(owner, str) and args:
            parts = list(args[0])
            self._spend(sum(map(self._size, parts)) + len(owner) * len(parts))
            return (parts, *args[1:])
        return args

    def _check_replace(self, text: str, args: tuple[Any, ...]) -> None:
        if len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
            self._spend(len(text) + text.count(args[0]) * len(args[1]))

    def _bounded_filter(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter_)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            start = 1 if hasattr(filter_, "jinja_pass_arg") else 0  # the context or the environment comes first
            given = list(args)
            if len(given) > start and isinstance(given[start], types.GeneratorType) and name in _ITERATING_FILTERS:
                given[start] = list(given[start])
            self._check_filter(name, tuple(given[start:]), kwargs)
            return self._charged(filter_(*given, **kwargs))

        return bounded

    def _check_filter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value, others = args[0] if args else None, [*args[1:], *kwargs.values()]
        if name in _SLOW_FILTERS and self._size(value) > _MAX_SLOW_CHARS:
            raise ValueError(f"the filter {name} takes {_MAX_SLOW_CHARS} characters at most")
        if name in _WIDTH_FILTERS:
            _check_widths(others)
        size = 0 if name in _SHALLOW_FILTERS else self._size(value)
        factor = 1
        if name == "join":
            factor += max(map(self._size, others), default=0)
        if name in ("indent", "tojson"):
            factor += max(
                (len(o) if isinstance(o, str) else int(o) for o in others if isinstance(o, str | int)), default=4
            )
            size = value.count("\n") + 1 if name == "indent" and isinstance(value, str) else size
        if name == "replace" and isinstance(value, str):
            self._check_replace(value, (*args[1:], *kwargs.values()))
        if name == "format" and isinstance(value, str):
            self._check_percent(value, others)
        self._spend(size * factor)


class _Bounds(jinja2.visitor.NodeTransformer):
    """Makes the bodies of loops and macros spend, and `~`, slices and comparisons by filters that do."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._spending(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._spending(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._spending(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_charged") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if not any(
            isinstance(operand, nodes.Const) for operand in operands
        ):  # one compares in no time with nested lists
            node.expr = _filtered(node.expr, "_compared")
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, "_compared")
        return node

    def _spending(self, node: Any) -> nodes.Node:
        size = sum(len(data.data) for child in node.body for data in _texts(child))
        self.generic_visit(node)
        size_node = nodes.Const(size, lineno=node.lineno)
        spend = nodes.Filter(size_node, "_spend", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(spend, lineno=node.lineno))
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _texts(node: nodes.Node) -> list[nodes.TemplateData]:
    return [node] if isinstance(node, nodes.TemplateData) else list(node.find_all(nodes.TemplateData))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int)


def _check_widths(values: list[Any]) -> None:
    if any(_is_integer(value) and abs(value) > _MAX_WIDTH for value in values):
        raise ValueError(f"a width or count has the limit of {_MAX_WIDTH}")
