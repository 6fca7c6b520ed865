"""How tests ask for an error: by its class, code, field and value, and by names and numbers that its sentence holds.
The sentence itself is free; `tests/test_errors.py` shows some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from olive_ext.errors import OliveExtError

Kind = TypeVar("Kind", bound=OliveExtError)


@contextmanager
def refused(
    kind: type[Kind], code: str, field: str = "", value: Any = ..., *, holds: str | tuple[str, ...] = ()
) -> Iterator[pytest.ExceptionInfo[Kind]]:
    """Passes where the block raises an error of this `kind`. `value` is compared where one is given; `holds` are names
    and numbers, in any order."""
    with pytest.raises(kind) as raised:
        yield raised
    assert_says(raised.value, code, field, value, holds=holds)


def assert_says(
    error: OliveExtError, code: str, field: str = "", value: Any = ..., *, holds: str | tuple[str, ...] = ()
) -> None:
    """The same of an error that was not raised."""
    text = str(error)
    assert (error.code, error.field) == (code, field), f"{error.code} {error.field!r}: {text}"
    assert value is ... or error.value == value, text
    assert not [name for name in ([holds] if isinstance(holds, str) else holds) if name not in text], text


def tells(text: object, words: str) -> bool:
    """Whether a text holds these names and numbers, in any order."""
    return all(word in str(text) for word in words.split())


def value_at(values: Any, field: str) -> Any:
    """What stands at a dotted key, a list's place among them; `...` where nothing does."""
    for name in field.split("."):
        if isinstance(values, list) and name.isdigit() and int(name) < len(values):
            values = values[int(name)]
        elif isinstance(values, Mapping) and name in values:
            values = values[name]
        else:
            return ...
    return values


_BY = r"( by the (evaluated model|reference))?"
_BEFORE = rf"olive-ext: WARNING|olive-ext: (Scoring|Scoring texts|Generating){_BY}: .* to compute"


def last_lines(err: str) -> list[str]:
    """The lines of a command that come after its warnings, and after what it is about to compute."""
    return [line for line in err.splitlines() if not re.match(_BEFORE, line)]
