"""How far an evaluation is: a bar on a terminal, a line a minute in a file or a pipe. Knows no model and no task."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm  # type: ignore[import-untyped]

LINE_SECONDS = 60.0

_said = [0.0]
"""When a line was last said, by the monotonic clock."""

shown: ContextVar[bool | None] = ContextVar("shown", default=None)
"""Whether progress is shown at all. None, for those who drive the model themselves: on a terminal only."""


def say(line: str) -> None:
    """Writes a line of progress to stderr at once."""
    _said[0] = time.monotonic()
    sys.stderr.write(f"olive-ext: {line}\n")
    sys.stderr.flush()


def silence() -> float:
    """Seconds since a line was last said."""
    return time.monotonic() - _said[0]


@contextmanager
def progress_bar(
    doing: str,
    total: int,
    num_tokens: Callable[[], int],
    is_disabled: bool,
    *,
    unit: str = "requests",
    at_work: Callable[[], str] = str,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with the number of requests, or of another `unit`, that are newly done.

    Shows those done, tokens fed per second (`num_tokens` counts those fed so far), the time left, and between them
    what `at_work` says of workers.
    """
    is_hidden = is_disabled or shown.get() is False
    before, begin = num_tokens(), now()
    done, first, last = 0, (0, begin), begin
    with tqdm(total=total, desc=doing, disable=True if is_hidden else None) as bar:
        has_lines = bar.disable and not is_hidden and shown.get() is True

        def advance(count: int) -> None:
            nonlocal done, first, last
            at, done = now(), done + count
            first = first if first[0] else (done, at)  # what precedes the first result does not come again
            speed = f"{(num_tokens() - before) / max(at - begin, 1e-9):.0f} tokens/s"
            state = ", ".join(filter(None, [speed, at_work()]))
            if not bar.disable:
                bar.set_postfix_str(state, refresh=False)
            bar.update(count)
            if has_lines and at - last >= LINE_SECONDS and done > first[0]:
                last = at
                left = tqdm.format_interval((at - first[1]) / (done - first[0]) * (total - done))
                say(f"{doing}: {done} of {total} {unit}, {state}, {left} left")

        yield advance
