"""Turns what lm-eval, a task's own code or a framework throws into one line that names it. Knows no framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from olive_ext.errors import OliveExtError, RunError, TaskError, first_line

_MACHINE = (MemoryError, OSError, RuntimeError)
"""A valid request failed. Everything else lm-eval raises comes from a task, its data or its settings."""


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
        raise kind(f"{doing}: {first_line(error, with_type=True)}") from error
