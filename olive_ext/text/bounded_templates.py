"""Jinja's sandbox with limits: a template of a few letters can ask for more memory or time than there is. Knows what no
template says."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from typing_extensions import override

LONGEST_TEXT = 2**24
"""Characters of a text that a template gives: some four million tokens, which take a tokenizer gigabytes."""

LARGEST_NUMBER = 2**16
"""Bits of a number that a template computes."""

MOST_LOOPED = 10**7
"""Turns of all loops of one rendering: some seconds."""

_TURNS = " turns"
"""Of the filter before each loop; no template can name it."""


_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*([0-9]+)?(?:\.([0-9]+))?|:[^{}0-9]*([0-9]+)?(?:\.([0-9]+))?")
"""Widths and precisions in a format, printf's or Python's."""

_MOST_DIGITS = 20

_NESTED = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")
"""A width that stands among the values."""


def _formatted(text: str, values: list[Any]) -> int:
    """What a format makes at least, its values left out."""
    widths = [int(number[:_MOST_DIGITS]) for match in _WIDTHS.findall(text) for number in match if number]
    return sum(widths) + (_largest(values) if _NESTED.search(text) else 0)


def _largest(values: Iterable[Any]) -> int:
    """The largest number among values, those in tuples and mappings included."""
    largest = 0
    for value in values:
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
        largest = max(largest, _largest(inner), value if isinstance(value, int) else 0)
    return largest


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


_GROWN: dict[str, Callable[[Any, list[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "batch", "slice", "to_bytes"), lambda _, own: _largest(own)),
    "expandtabs": lambda text, given: text.count("\t") * _largest(given),
    "indent": lambda text, given: (str(text).count("\n") + 1) * max(_largest(given), *map(_size, given), 4),
    "tojson": lambda value, given: 0 if isinstance(value, str) else (_size(value) + 1) * _largest(given),
    "replace": lambda text, given: str(text).count(str(given[0])) * _size(given[1]) if len(given) > 1 else 0,
    "join": lambda value, given: _size(value) * max(map(_size, given), default=0),
    "wordwrap": lambda text, given: _size(text) * max((_size(one) for one in given if isinstance(one, str)), default=0),
    **dict.fromkeys(("format", "format_map"), lambda text, given: _formatted(str(text), given)),
    "generate_lorem_ipsum": lambda _, given: 200 * _largest(given),
}
"""Methods and filters whose result can be longer than all that they are given, with the letters or items that it has at
least, by the value that they work on and the other arguments."""


def _refuse_grown(name: str, value: Any, given: list[Any]) -> None:
    """Raises `SecurityError` for a call whose result would be longer than `LONGEST_TEXT`."""
    if name in _GROWN and _GROWN[name](value, given) > LONGEST_TEXT:
        raise SecurityError(f"'{name}' gives more than {LONGEST_TEXT:,} letters or items (LONGEST_TEXT)")


def _refuse_size(value: Any) -> Any:
    """The value; raises `SecurityError` for a text or a list that is too long."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > LONGEST_TEXT:
        raise SecurityError(f"{len(value):,} letters or items: at most {LONGEST_TEXT:,} (LONGEST_TEXT)")
    return value


class _BoundedFilter:
    """A filter that refuses what would be too long."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        functools.update_wrapper(self, function)
        self._place = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the value, behind what jinja passes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_grown(self._name, args[self._place], [*args[self._place + 1 :], *kwargs.values()])
        return _refuse_size(self._function(*args, **kwargs))


class _Generator(CodeGenerator):
    """Has the environment join what `~` stands between."""

    @override
    def visit_Concat(self, node: Any, frame: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:  # where it escapes, too
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat_values((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


def refuse_long(text: str, what: str) -> str:
    """The text; raises `SecurityError`, which begins with `what`, for one beyond `LONGEST_TEXT`."""
    if len(text) > LONGEST_TEXT:
        raise SecurityError(f"{what} has {len(text):,} characters: at most {LONGEST_TEXT:,} (LONGEST_TEXT)")
    return text


class BoundedEnvironment(SandboxedEnvironment):
    """Refuses what is too large before it is computed, and texts and loops as they grow."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._looped = self._depth = 0
        self.filters[_TURNS] = self._counted

    def from_string(self, *args: Any, **options: Any) -> Any:
        """With the limits of filters that were set meanwhile, too."""
        own = {name: function for name, function in self.filters.items() if name in _GROWN}
        new = {name: one for name, one in own.items() if not isinstance(one, _BoundedFilter)}
        self.filters |= {name: _BoundedFilter(name, one) for name, one in new.items()}
        return super().from_string(*args, **options)

    @override
    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox's own `format`
        name, value = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        _refuse_grown(name, value, [*args, *kwargs.values()])
        return _refuse_size(super().call(context, obj, *args, **kwargs))

    def concat_values(self, values: Iterable[Any]) -> str:
        """The texts of values, as `~` joins them."""
        result: str = _refuse_size("".join(map(str, values)))
        return result

    @override
    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _refuse_grown("format", left, [right])
        for one, other in ((left, right), (right, left)) if operator == "*" else ():
            if hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > LONGEST_TEXT:
                raise SecurityError(f"a product of {len(one) * other:,} letters or items: at most {LONGEST_TEXT:,}")
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > LARGEST_NUMBER:
                raise SecurityError(f"a number of more than {LARGEST_NUMBER:,} bits (LARGEST_NUMBER)")
        return _refuse_size(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a template, or a block or a macro within one, gives, part by part."""
        if not self._depth:
            self._looped = 0
        kept, length = [], 0
        self._depth += 1
        try:
            for part in parts:
                kept.append(part)
                length += len(part)
                if max(length, len(kept)) > LONGEST_TEXT:
                    raise SecurityError(f"a text of more than {LONGEST_TEXT:,} characters (LONGEST_TEXT)")
        finally:
            self._depth -= 1
        return "".join(kept)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template with what each of its loops goes over counted."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            counted = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno)
            loop.iter = counted.set_environment(self)
        return template

    @pass_context  # without a context jinja would count literals once, as it compiles
    def _counted(self, _: Any, items: Any) -> Any:
        if not hasattr(items, "__len__"):
            return map(self._turn, items) if isinstance(items, Iterator) else items
        self._turn(None, len(items))
        return items

    def _turn(self, item: Any, turns: int = 1) -> Any:
        self._looped += turns
        if self._looped > MOST_LOOPED:
            raise SecurityError(f"loops of more than {MOST_LOOPED:,} turns (MOST_LOOPED)")
        return item


class _BoundedChat(BoundedEnvironment, ImmutableSandboxedEnvironment):
    """Of chat templates."""


@contextmanager
def bounded_chat_templates() -> Iterator[None]:
    """Chat templates that transformers compiles meanwhile have the limits."""
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    own = getattr(module, "ImmutableSandboxedEnvironment", None)
    if own is not ImmutableSandboxedEnvironment:
        yield
        return
    module.ImmutableSandboxedEnvironment = _BoundedChat
    try:
        yield
    finally:
        module.ImmutableSandboxedEnvironment = own
