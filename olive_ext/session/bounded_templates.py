"""Jinja's sandbox with limits of size: a template of a few letters can ask for more memory than there is; and how an
attribute of another library is replaced for a while. Knows no template."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from typing_extensions import override

LONGEST_TEXT = 2**24
"""Characters of a text that a template gives: some four million tokens, which take a tokenizer gigabytes."""

LARGEST_NUMBER = 2**16
"""Bits of a number that a template computes."""


def refuse_long(text: str, what: str) -> str:
    """The text; raises `SecurityError`, which begins with `what`, for one beyond `LONGEST_TEXT`."""
    if len(text) > LONGEST_TEXT:
        raise SecurityError(f"{what} has {len(text):,} characters: at most {LONGEST_TEXT:,} (LONGEST_TEXT)")
    return text


class BoundedEnvironment(SandboxedEnvironment):
    """Refuses products and powers that are too large before they are computed, and texts as they grow."""

    intercepted_binops = frozenset({"*", "**"})

    @override
    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)) if operator == "*" else ():
            if hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > LONGEST_TEXT:
                raise SecurityError(f"a product of {len(one) * other:,} letters or items: at most {LONGEST_TEXT:,}")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > LARGEST_NUMBER:
                raise SecurityError(f"a number of more than {LARGEST_NUMBER:,} bits (LARGEST_NUMBER)")
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a template, or a block or a macro within one, gives, part by part."""
        kept, length = [], 0
        for part in parts:
            kept.append(part)
            length += len(part)
            if max(length, len(kept)) > LONGEST_TEXT:
                raise SecurityError(f"a text of more than {LONGEST_TEXT:,} characters (LONGEST_TEXT)")
        return "".join(kept)


class _BoundedChat(BoundedEnvironment, ImmutableSandboxedEnvironment):
    """The environment of chat templates."""


@contextmanager
def bounded_chat_templates() -> Iterator[None]:
    """Chat templates that transformers compiles meanwhile have the limits."""
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    own = getattr(module, "ImmutableSandboxedEnvironment", None)
    if own is not ImmutableSandboxedEnvironment:
        yield
        return
    with replaced(module, "ImmutableSandboxedEnvironment", _BoundedChat):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module, a class or an object has another value in the block; what was inherited is so again
    after it."""
    own, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, own)
        else:
            delattr(owner, name)
