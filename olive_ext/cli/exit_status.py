"""Runs a command and turns its end into an exit status and at most one line on stderr. Standard streams that were
closed are opened to nothing, and the others can be written on any terminal. What takes long to import is imported where
interruptions are handled already."""

from __future__ import annotations

import _thread
import errno
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from olive_ext.errors import (
    ConfigError,
    IncompleteError,
    OliveExtError,
    RequirementError,
    WorkerError,
    one_line,
    printable,
    raised_at,
)

if TYPE_CHECKING:
    from olive_ext.cli.commands import Function

OK, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
DEBUG_VARIABLE = "OLIVE_EXT_DEBUG"

_AGAIN_S = 0.5
"""Seconds after which an interruption that has not ended the command is raised once more."""


def run(argv: Sequence[str] | None, commands: Mapping[str, Function] | None) -> int:
    """See `olive_ext.cli.main`. Without `argv`, this process runs nothing but the command."""
    if argv is None:
        open_streams()
        if not _is_debug():
            _quiet_libraries()
    interruptions = _Interruptions()
    try:
        with interruptions.raised():
            status = command(list(sys.argv[1:] if argv is None else argv), commands)
            sys.stdout.flush()
            return status
    except BaseException as error:  # noqa: BLE001 - the last place that can make one line of it
        return _ended(error, interruptions.signal)
    finally:
        if argv is None:
            _give_up_streams()


def command(argv: list[str], commands: Mapping[str, Function] | None) -> int:
    """The status of a command that has ended. `commands`: functions in place of the known ones."""
    from olive_ext.cli.options import commands as known
    from olive_ext.cli.options import in_options, parse
    from olive_ext.registry import load

    try:
        arguments = parse(argv)
    except SystemExit as end:  # --help and --version
        return int(end.code or OK)
    try:
        Path.cwd()
    except OSError as error:  # torch's libraries end the process without it, with a line of their own
        raise ConfigError("the working directory is gone: change to another one", code="not_found") from error
    name = arguments.command
    function: Function = commands[name] if commands else load(known()[name].function)
    table = known()[name].options

    def with_options(error: OliveExtError) -> OliveExtError:
        return in_options(error, vars(arguments), load(table) if table else ())

    try:
        with _warnings_on_stderr(with_options):
            return function(arguments)
    except OliveExtError as error:
        raise with_options(error) from error.__cause__


@contextmanager
def going_on(kept: str | Path | None) -> Iterator[None]:
    """An interruption inside says where that is kept with which the same command goes on; None: nowhere."""
    try:
        yield
    except KeyboardInterrupt as stop:
        how = "nothing was kept yet" if kept else "nothing is kept without --output"
        journals = [] if kept is None else list(Path(kept).glob("*.jsonl"))
        if kept and Path(kept).exists() and (not journals or any(map(_has_answers, journals))):
            how = f"the same command goes on with what is in '{kept}'"
        raise KeyboardInterrupt(how) from stop


def _has_answers(journal: Path) -> bool:
    """Whether a journal has a line after the first, which is no answer."""
    with journal.open("rb") as lines:
        return bool(lines.readline() and lines.readline())


class _Interruptions:
    """SIGINT and SIGTERM end a command in one way: what is open is closed, and workers are ended. Each raises
    KeyboardInterrupt, again and again until the command ends: libraries swallow it (`except:`), and so does Python
    where nothing can be raised, as in callbacks of imports. A second SIGTERM ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0
        """The latest signal, whatever other libraries turned the exception into: a failed import, for instance."""

        self._insists = self._is_over = False
        self._process = os.getpid()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Only the main thread may set this."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        watched = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._interrupt) for number in watched}
        unraisable, sys.unraisablehook = sys.unraisablehook, _show_others
        try:
            yield
        finally:
            self._is_over = True
            sys.unraisablehook = unraisable
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # of lm-eval's bootstrap, which would print where it was
            os._exit(128 + number)
        if number == signal.SIGTERM == self.signal and not self._insists:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal, self._insists = number, False
        self._look_later()
        raise KeyboardInterrupt

    def _look_later(self) -> None:
        with suppress(RuntimeError):  # no more threads
            timer = threading.Timer(_AGAIN_S, self._look)
            timer.daemon = True
            timer.start()

    def _look(self) -> None:
        """Interrupts again, unless the command is ending."""
        if self._is_over:
            return
        if _is_interrupted(threading.main_thread().ident):
            self._look_later()
        else:
            self._insists = True
            _thread.interrupt_main(signal.Signals(self.signal))


def _is_interrupted(thread: int | None) -> bool:
    """Whether the exception that the thread is handling comes from an interruption."""
    held = sys._current_exceptions().get(thread or 0)
    error = held[1] if isinstance(held, tuple) else held  # as Python has it before 3.12
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _show_others(failure: sys.UnraisableHookArgs) -> None:
    if not issubclass(failure.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(failure)


def _ended(error: BaseException, interruption: int) -> int:
    if interruption or isinstance(error, KeyboardInterrupt):
        word, status = ("terminated", TERMINATED) if interruption == signal.SIGTERM else ("interrupted", INTERRUPTED)
        return _end(": ".join(filter(None, [word, str(error) * isinstance(error, KeyboardInterrupt)])), status)
    if isinstance(error, BrokenPipeError):  # the reader of stdout has gone, as in `olive-ext schema | head`
        return FAILED
    if isinstance(error, OliveExtError):
        is_failure = isinstance(error, (IncompleteError, RequirementError, WorkerError))
        return _end(f"error: {error}", FAILED if is_failure else USER_ERROR)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # of a path that is no setting
        name = str(error.filename)
        return _end(f"error: '{name[:60]}...' has {len(name):,} characters: too long for a file's name", USER_ERROR)
    if not isinstance(error, Exception):  # `exit()` in the code of others, with whatever status
        what = f"{one_line(error)}{raised_at(error)}"
        return _end(f"error: code of a task or a model ended the command: {what}", USER_ERROR)
    hint = "" if _is_debug() else f" ({DEBUG_VARIABLE}=1 shows the traceback)"
    return _end(f"error: {type(error).__name__}: {error}{hint}", FAILED)


def _quiet_libraries() -> None:
    """Silences other libraries, in a process that runs nothing but the command: messages of transformers and lm-eval
    about task and tokenizer files are not for users, and progress bars stay out of files and pipes."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def _warnings_on_stderr(wording: Callable[[OliveExtError], OliveExtError]) -> Iterator[None]:
    """Shows this package's warnings, a line each, by the `wording` of errors: they name others' files and tasks."""
    handler = logging.StreamHandler()

    def line(record: logging.LogRecord) -> str:
        return f"olive-ext: {record.levelname}: {printable(str(wording(OliveExtError(record.getMessage()))))}"

    handler.format = line  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("olive_ext")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _give_up_streams() -> None:
    """Keeps Python from failing, with a status of its own, when it flushes what could not be written. From here on,
    Ctrl-C ends the process without a message."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(message: str, status: int) -> int:
    if _is_debug():
        traceback.print_exc()
    with suppress(OSError):
        sys.stderr.write(f"olive-ext: {printable(' '.join(message.split()))}\n")
    return status


def _is_debug() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def open_streams() -> None:
    """Opens closed streams to nothing: otherwise the next file that is opened would get their number, and everything
    that libraries print. Characters that the terminal lacks are replaced: no error after hours of work."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - while the process lasts
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        messages = _Messages(sys.stderr.detach(), encoding, "replace", line_buffering=True)
        for name in ("stderr", "__stderr__"):
            setattr(sys, name, messages)


class _Messages(io.TextIOWrapper):
    """stderr, whose reader may be gone: the command goes on without it."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
