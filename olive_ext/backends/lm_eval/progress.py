"""A progress bar for a call of the model: requests done, tokens fed per second, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]


@contextmanager
def progress_bar(
    doing: str, total: int, num_tokens: Callable[[], int], is_disabled: bool
) -> Iterator[Callable[[int], None]]:
    """Yields what to call with the number of requests that are newly done.

    `num_tokens` counts the tokens fed so far. The bar appears on a terminal only, never in a file or a pipe.
    """
    before, begin = num_tokens(), time.monotonic()
    with tqdm(total=total, desc=doing, disable=is_disabled or None) as bar:

        def advance(count: int) -> None:
            if not bar.disable:
                speed = (num_tokens() - before) / max(time.monotonic() - begin, 1e-9)
                bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
            bar.update(count)

        yield advance
