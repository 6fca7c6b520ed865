"""The entry point: runs a command and turns its end into an exit status and at most one line on stderr."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from olive_ext.cli.commands import COMMAND_FUNCTIONS, Command, UsageError, parse
from olive_ext.errors import IncompleteError, OliveExtError, printable

OK, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
DEBUG_VARIABLE = "OLIVE_EXT_DEBUG"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command by the same road as Ctrl-C: what is open is closed, workers are ended."""


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] | None = None) -> int:
    """Runs `olive-ext`; returns 0, 2 for a user's error, 130 after Ctrl-C, 143 after SIGTERM, 1 for requests without
    an answer and any other failure.

    With OLIVE_EXT_DEBUG=1 the traceback precedes the line. `commands` stand in for `COMMAND_FUNCTIONS`.
    """
    if argv is None and not _is_debug():
        _quiet_libraries()
    try:
        with _warnings_on_stderr(), _sigterm_raises():
            return _command(list(sys.argv[1:] if argv is None else argv), commands)
    except IncompleteError as error:
        return _end(f"error: {error}", FAILED)
    except (UsageError, OliveExtError) as error:
        return _end(f"error: {error}", USER_ERROR)
    except _Terminated:
        return _end("terminated", TERMINATED)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout has gone, as in `olive-ext schema | head`: keep Python from failing again as it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001 - the last place that can make one line of it
        return _failed(error)


def _command(argv: list[str], commands: Mapping[str, Command] | None) -> int:
    try:
        arguments = parse(argv)
    except SystemExit as end:  # --help and --version
        return int(end.code or OK)
    status = (commands or COMMAND_FUNCTIONS)[arguments.command](arguments)
    sys.stdout.flush()
    return status


def _failed(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # of a path that is no setting
        name = str(error.filename)
        return _end(f"error: '{name[:60]}...' has {len(name):,} characters: too long for a file's name", USER_ERROR)
    hint = "" if _is_debug() else f" ({DEBUG_VARIABLE}=1 shows the traceback)"
    return _end(f"error: {type(error).__name__}: {error}{hint}", FAILED)


def _quiet_libraries() -> None:
    """Silences other libraries, in a process that is the command and nothing else: messages of transformers and lm-eval
    about task and tokenizer files are not for our users, and progress bars stay out of files and pipes."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Shows this package's own warnings, a line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("olive-ext: %(levelname)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("olive_ext")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise `_Terminated`, a second one end the process at once. Only the main thread may set this."""

    def terminate(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(message: str, status: int) -> int:
    if _is_debug():
        traceback.print_exc()
    sys.stderr.write(f"olive-ext: {printable(' '.join(message.split()))}\n")
    return status


def _is_debug() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
