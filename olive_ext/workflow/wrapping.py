"""Replaces a method of a class by one that calls it, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_wrapped_by_olive_ext"


def wrap_once(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Puts `make(original)` in the place of the method `name` of `owner`; False where that was done before."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return False
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, True)
    setattr(owner, name, replacement)
    return True
