"""`olive-ext run`: Olive's own command `olive run`, with this package's types known and failures that count."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

from olive_ext.errors import ConfigError
from olive_ext.workflow.log import logger
from olive_ext.workflow.olive_engine import Outcome, watched_runs

_OK, _FAILED = 0, 1


def cli_run(argv: Sequence[str]) -> int:
    """Runs `olive run` with `argv` and returns its exit code; 1 where Olive logged a failure and went on.

    Raises `OliveExtError` for a user's error, in one line.
    """
    from olive.cli.launcher import main

    with watched_runs() as outcomes, _swallowed() as reasons, _recipe_errors():
        try:
            main(["run", *argv])
        except SystemExit as end:  # argparse: --help, or wrong arguments, which it has printed
            return end.code if isinstance(end.code, int) else _FAILED
    return _status(outcomes, reasons)


def _status(outcomes: Sequence[Outcome], reasons: Sequence[str]) -> int:
    if not any(outcome.gave_up for outcome in outcomes):
        return _OK
    logger.error("Olive went on without a model or its metrics: %s", reasons[-1] if reasons else "see its log")
    return _FAILED


class _Reasons(logging.Handler):
    """Keeps the exceptions that Olive logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            self.reasons.append(" ".join(f"{type(error).__name__}: {error}".split()))


@contextmanager
def _swallowed() -> Iterator[list[str]]:
    handler = _Reasons()
    olive = logging.getLogger("olive")
    olive.addHandler(handler)
    try:
        yield handler.reasons
    finally:
        olive.removeHandler(handler)


@contextmanager
def _recipe_errors() -> Iterator[None]:
    """What Olive says about a recipe that it cannot read, as a `ConfigError`."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"the recipe is not valid: {_problems(error)}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"the recipe is not valid JSON: {error}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"'{error.filename}': no such file") from error


def _problems(error: ValidationError) -> str:
    """Each problem with its place; Olive repeats a broken evaluator as "Invalid evaluators" of the engine."""
    problems = [
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    ]
    real = [problem for problem in problems if not problem.endswith(": Invalid evaluators")]
    return "; ".join(real or problems)
