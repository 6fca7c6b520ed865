"""Jinja's sandbox with limits: a template of a few letters can ask for more memory or time than there is. Knows what no
template says."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from olive_ext.errors import ConfigError

if TYPE_CHECKING:
    from olive_ext.text.tokenizer import Tokenizer

LONGEST_TEXT = 2**24
"""Characters of a text that a template gives: some four million tokens, which take a tokenizer gigabytes."""

LARGEST_NUMBER = 2**16
"""Bits of a number that a template computes."""

MOST_LOOPED = 10**7
"""Turns of all loops of one rendering: some seconds."""

_TURNS = " turns"
"""Of the filter before each loop; no template can name it."""


def refuse_long(text: str, what: str) -> str:
    """The text; raises `SecurityError`, which begins with `what`, for one beyond `LONGEST_TEXT`."""
    if len(text) > LONGEST_TEXT:
        raise SecurityError(f"{what} has {len(text):,} characters: at most {LONGEST_TEXT:,} (LONGEST_TEXT)")
    return text


class BoundedEnvironment(SandboxedEnvironment):
    """Refuses products and powers before they are computed, and texts and loops as they grow."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._looped = 0
        self._is_rendering = False
        self.filters[_TURNS] = self._counted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > LONGEST_TEXT:
                raise SecurityError(f"a product of {len(one) * other:,} letters or items: at most {LONGEST_TEXT:,}")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > LARGEST_NUMBER:
                raise SecurityError(f"a number of more than {LARGEST_NUMBER:,} bits (LARGEST_NUMBER)")
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a template gives, part by part. Macros and blocks within it are joined by the same function."""
        is_whole, self._is_rendering = not self._is_rendering, True
        try:
            if is_whole:
                self._looped = 0
            return _joined(parts)
        finally:
            if is_whole:
                self._is_rendering = False

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


def _joined(parts: Iterable[str]) -> str:
    kept, length = [], 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if max(length, len(kept)) > LONGEST_TEXT:
            raise SecurityError(f"a text of more than {LONGEST_TEXT:,} characters (LONGEST_TEXT)")
    return "".join(kept)


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


def refuse_template(tokenizer: Tokenizer, **kwargs: Any) -> None:
    """Raises `ConfigError` where a chat template renders no message of a user, be it a text or a list of parts."""
    try:
        tokenizer.render_chat([{"role": "user", "content": "a"}], **kwargs)
    except ConfigError:
        with suppress(ConfigError, TypeError):
            tokenizer.render_chat([{"role": "user", "content": [{"type": "text", "text": "a"}]}], **kwargs)
            return
        raise
