"""How far an evaluation is: a bar on a terminal, a line a minute in a file or a pipe. Knows no model and no task."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm  # type: ignore[import-untyped]

LINE_SECONDS = 60.0
FIRST_LINE_SECONDS = 10.0
"""The first line says how long everything will take."""

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""Without tqdm's own estimate of the time left, which counts requests."""

_said = [0.0]
"""When the last line was written, by the monotonic clock."""

shown: ContextVar[bool | None] = ContextVar("shown", default=None)
"""Whether progress is shown at all. None, for Python users who drive the model themselves: on a terminal only."""


def is_shown(progress: bool | None) -> bool:
    """Whether progress is shown; where nothing says so, on a terminal."""
    return sys.stderr is not None and sys.stderr.isatty() if progress is None else progress


def say(line: str) -> None:
    """Writes a line of progress to stderr at once."""
    _said[0] = time.monotonic()
    sys.stderr.write(f"olive-ext: {line}\n")
    sys.stderr.flush()


def silence() -> float:
    """Seconds since the last line was written."""
    return time.monotonic() - _said[0]


@contextmanager
def progress_bar(
    doing: str,
    total: int,
    num_tokens: Callable[[], int],
    is_disabled: bool,
    *,
    unit: str = "requests",
    expected: float = 0.0,
    about: str = "",
    at_work: Callable[[], str] = str,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[..., None]]:
    """Yields a function to call with the number of newly completed requests, or of another `unit`, and the tokens of
    their prompts and of their answers.

    Shows what it is `about`, then those done, tokens fed per second (`num_tokens` counts those fed so far), what
    `at_work` says of workers, and the time left. Where all prompts together have `expected` tokens, the time left is
    that of the tokens left, because requests that are long, or run together, complete late.
    """
    is_hidden = is_disabled or shown.get() is False
    before, begin = num_tokens(), now()
    done, first, last, every = 0, (0, begin), begin, FIRST_LINE_SECONDS
    prompts = answers = 0.0
    if about and not is_hidden and shown.get() is True:
        say(f"{doing}: {about}")
    with tqdm(total=total, desc=doing, disable=True if is_hidden else None, bar_format=_BAR) as bar:
        has_lines = bar.disable and not is_hidden and shown.get() is True

        def seconds_left(at: float) -> float:
            fed = num_tokens() - before
            if not expected or not fed:
                return (at - first[1]) / max(1, done - first[0]) * (total - done)
            begun = max(0.0, fed - prompts - answers)
            rest = max(0.0, expected - prompts) + answers / done * (total - done) - begun
            return max(0.0, rest) * (at - begin) / fed

        def advance(count: int, tokens: float = 0.0, answered: int = 0) -> None:
            nonlocal done, first, last, every, prompts, answers
            at, done = now(), done + count
            prompts, answers = prompts + tokens, answers + answered
            first = first if first[0] else (done, at)  # what precedes the first result does not come again
            speed = f"{(num_tokens() - before) / max(at - begin, 1e-9):.0f} tokens/s"
            state = ", ".join(filter(None, [speed, at_work()]))
            if not bar.disable:
                bar.set_postfix_str(f"{tqdm.format_interval(seconds_left(at))} left, {state}", refresh=False)
            bar.update(count)
            if has_lines and at - last >= every and done > first[0]:
                last, every = at, LINE_SECONDS
                say(f"{doing}: {done} of {total} {unit}, {state}, {tqdm.format_interval(seconds_left(at))} left")

        yield advance
