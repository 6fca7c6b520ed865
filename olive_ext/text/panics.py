"""Panics of libraries in Rust as errors. Knows no library."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """A panic within, which is no `Exception`, is raised as a `RuntimeError` with its message. It also writes its stack
    to the descriptor of stderr, past Python: that is dropped, and anything else written there comes out at the end.
    """
    panicked = False
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as held:
        own = os.dup(STDERR)
        os.dup2(held.fileno(), STDERR)
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"  # of pyo3, in a module that cannot be imported
            if panicked:
                raise RuntimeError(str(error)) from None
            raise
        finally:
            os.dup2(own, STDERR)
            os.close(own)
            held.seek(0)
            if not panicked:
                os.write(STDERR, held.read())
