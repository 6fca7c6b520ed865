"""Says in words what a field accepts, for error messages and for the docs table. Knows pydantic's fields only."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_PLAIN = {str: "a string", bool: "true or false", int: "an integer", float: "a number", Any: "anything"}


def accepts(field: FieldInfo) -> str:
    """For instance: a positive integer or "auto". That a key may be left out or null is not said."""
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, constraints: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *added = get_args(annotation)
        described = next((item.description for item in added if isinstance(item, FieldInfo)), None)
        return described or _words(inner, [*constraints, *added])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    if origin in (Union, UnionType):
        branches = [branch for branch in get_args(annotation) if branch is not NoneType]
        return _or([_words(branch, constraints) for branch in branches])
    if origin is Literal:
        return _or([json.dumps(value) for value in get_args(annotation)])
    if origin in _CONTAINERS:
        return _CONTAINERS[origin](get_args(annotation), constraints)
    return _scalar(annotation, constraints)


def _scalar(annotation: Any, constraints: list[Any]) -> str:
    least, above, below = (_bound(constraints, name) for name in ("ge", "gt", "lt"))
    if annotation is int and least == 1:
        return "a positive integer"
    if annotation is int and least is not None:
        return f"an integer from {least}"
    if annotation is float and above is not None:
        return f"a number between {above} and {below}"
    return _PLAIN.get(annotation) or f"a {getattr(annotation, '__name__', annotation)}"


def _bound(constraints: list[Any], name: str) -> Any:
    """A bound is an attribute of an annotated_types object, which may stand inside a FieldInfo's own metadata."""
    for item in constraints:
        found = _bound(item.metadata, name) if isinstance(item, FieldInfo) else getattr(item, name, None)
        if found is not None:
            return found
    return None


def _list(items: tuple[Any, ...], constraints: list[Any]) -> str:
    least = _bound(constraints, "min_length")
    return f"a {'non-empty ' if least else ''}list, each item {_words(items[0], [])}"


def _pair(items: tuple[Any, ...], constraints: list[Any]) -> str:
    return f"a pair [{', '.join(_words(item, []) for item in items)}]"


def _mapping(items: tuple[Any, ...], constraints: list[Any]) -> str:
    return "a mapping" if items[1] is Any else f"a mapping of names, each to {_words(items[1], [])}"


_CONTAINERS: dict[Any, Callable[[tuple[Any, ...], list[Any]], str]] = {list: _list, tuple: _pair, dict: _mapping}


def _or(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
