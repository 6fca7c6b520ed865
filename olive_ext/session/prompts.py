"""What prompts, texts and sources of requests may be, and their checks, each of which raises `ConfigError` that names
the field. Knows no tokenizer and no request.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeIs

from olive_ext.errors import ConfigError

_Value = TypeVar("_Value")
Text: TypeAlias = str | Sequence[int]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
SourceInput: TypeAlias = str | Sequence[int] | npt.NDArray[Any]
"""A text or token ids for an encoder of text; an array of features without a batch axis for one of sound."""


def is_chat(prompt: Prompt) -> TypeIs[Sequence[Mapping[str, Any]]]:
    """Whether the prompt of a request is chat messages: its first item tells, because requests are checked."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_ids(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Token ids, as Python's integers."""
    try:
        ids = tuple(map(operator.index, [values] if isinstance(values, bytes) else values))
    except TypeError:
        raise ConfigError(f"'{name}': text or a list of token ids, not {_shown(values)}") from None
    for one in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= one < 2**31:
            raise ConfigError(f"'{name}' holds {one}: token ids are from 0 to 2147483647")
    return ids


def checked_text(name: str, value: Any) -> Text:
    """A text, or token ids."""
    return whole_text(name, value) if isinstance(value, str) else checked_ids(name, value)


def whole_text(name: str, value: _Value) -> _Value:
    """`value`, a text or what may hold texts. Raises `ConfigError` for half of a surrogate pair, which has no bytes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"'{name}' has half of a surrogate pair at character {error.start}") from error
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        whole_text(f"{name}[{key}]", item)
    return value


def checked_source(value: Any) -> SourceInput | None:
    """What an encoder takes, where a request has that."""
    if value is None or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
        return value
    return checked_text("source", value)


def checked_items(name: str, value: Any) -> tuple[Any, ...]:
    """Pictures or sounds."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"'{name}' = {_shown(value)}: a list is expected")
    return tuple(value)


def checked_prompt(name: str, value: Any, *, may_be_empty: bool = False) -> Prompt:
    """A text, token ids, or chat messages, each of which has a role and a content."""
    if isinstance(value, str):
        return whole_text(name, value)
    if value is None or not hasattr(value, "__len__") or isinstance(value, Mapping):
        raise ConfigError(f"'{name}' = {_shown(value)}: text, a list of chat messages, or a list of token ids")
    if len(value) == 0 and may_be_empty:
        return ""
    if len(value) == 0:
        raise ConfigError(f"'{name}' is an empty list: give text, chat messages, or token ids")
    if not isinstance(value[0], Mapping):
        return checked_ids(name, value)
    for index, message in enumerate(value):
        whole_text(f"{name}[{index}]", message)
        if not isinstance(message, Mapping) or "role" not in message:
            raise ConfigError(f"'{name}' holds {_shown(message)}: a chat message has a 'role' and a 'content'")
        if not isinstance(content := message.get("content"), (str, list, tuple, NoneType)):
            raise ConfigError(f"'{name}' has a message whose 'content' is {_shown(content)}: text, or a list of parts")
    return tuple(value)


def checked_stops(value: Any) -> tuple[str, ...]:
    """Stop strings; one alone may be given as a text."""
    if not isinstance(value, (str, list, tuple)):
        raise ConfigError(f"'stop' = {_shown(value)}: a text or a list of texts")
    stops = (value,) if isinstance(value, str) else tuple(value)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ConfigError(f"'stop' holds {stop!r}: texts of at least one character")
        whole_text("stop", stop)
    return stops


def _shown(value: object) -> str:
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
