"""Turns what lm-eval, a task's own code or a framework throws into one line that names it. Knows no framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from olive_ext.errors import OliveExtError, RunError, TaskError

_MACHINE = (MemoryError, OSError, RuntimeError)
"""A valid request failed. Everything else lm-eval raises comes from a task, its data or its settings."""


def one_line(error: BaseException, width: int = 300) -> str:
    """The error's type and the first line of its message, at most `width` characters."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= width else text[: width - 4] + " ..."


@contextmanager
def named_failures(doing: str, *, machine: tuple[type[Exception], ...] = _MACHINE) -> Iterator[None]:
    """Every exception but our own leaves as a `TaskError`, or as a `RunError` where it is one of `machine`.

    KeyboardInterrupt and SystemExit are no exceptions in this sense and pass.
    """
    try:
        yield
    except OliveExtError:
        raise
    except Exception as error:
        is_machine = isinstance(error, machine) and not isinstance(error, NotImplementedError)
        kind = RunError if is_machine else TaskError
        raise kind(f"{doing}: {one_line(error)}") from error
