"""Errors that a user can cause, each a ValueError; the conversion of other exceptions to them; and the warning about
ignored settings. Knows no framework.

Olive swallows every exception that is not a ValueError, TypeError, ImportError, AttributeError or AssertionError and
exits with 0, so nothing else may leave this package for a user's mistake.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import sysconfig
import tempfile
import threading
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

logger = logging.getLogger(__name__)

_MACHINE = (MemoryError, OSError, RuntimeError)
"""Exceptions of the machine: a valid request failed. All others come from a task, its data or its settings."""

_INSTALLED = ("<", sysconfig.get_path("stdlib"), str(Path(__file__).parent))
"""How names of files begin that belong to Python and to this package."""

_OF_CODE = (NotImplementedError, RecursionError)
"""Exceptions that mistakes in code raise, although they are kinds of `RuntimeError`."""

_PLAIN = (str, int, float, list, tuple, dict)
"""Types of values that an error keeps as they are: it crosses processes and is written as JSON."""

ANY_FAILURE = (Exception, SystemExit)
"""Exceptions from the code of a task, a model or a package: its `exit()` must not end an evaluation silently."""


CODES = {
    "unknown_key": "no setting has this name",
    "unknown_name": "no task, metric, provider or other thing has this name",
    "wrong_value": "a value is not accepted",
    "missing": "something that is needed was not given",
    "contradiction": "settings, files or models exclude each other",
    "not_found": "a file or folder is not there",
    "exists": "a file or folder is there already",
    "no_access": "the system does not let a file be read or written",
    "damaged": "a file's content is not what it has to be",
    "too_large": "a size is beyond a limit",
    "unsupported": "a model, a task or a request asks for what this package does not do",
    "not_comparable": "two models, runs or reports cannot be compared",
    "untrusted": "a model or a task names files or code that are not trusted",
    "needs_package": "a package is not installed",
    "needs_network": "a file is not on this machine, and the network cannot be asked",
    "provider": "an execution provider is missing, or was not used",
    "task": "a task, its data or its code is wrong",
    "media": "a picture or sound cannot be read or used",
    "records": "records of a reference are missing, damaged, or were made with other settings",
    "bound_broken": "a metric breaks a bound",
    "not_finite": "a model's output is NaN or infinite",
    "out_of_memory": "there is no memory for an allocation",
    "worker": "a worker cannot be started, or was lost",
    "failed": "the machine failed while a valid request ran",
    "incomplete": "requests have no answer",
    "unwritten": "an evaluation is done, and its report cannot be written",
    "closed": "a session was closed, or another of its calls has not ended",
}
"""What can be wrong, by the code that an error carries. Codes are stable; sentences are not."""


class OliveExtError(ValueError):
    """Base of all errors that name a setting, file or object of the user's.

    `field` is the key of a recipe or the option that is wrong, and `value` what was written there: None where nothing
    was, and its text where it is no plain data. They are put before the message unless that names the field itself.
    """

    code: str = "unsupported"
    """One of `CODES`."""

    request: Any = None
    """The key, in its call, of the request that the error is about: its index, where the caller gives no other."""

    def __init__(self, message: str, field: str = "", value: Any = ..., *, code: str = "") -> None:
        if code:
            assert code in CODES, code
            self.code = code
        self.about(field, None if value is ... else value)
        if field and (name := named(field)) not in message:
            message = f"{name}: {message}" if value is ... else f"{name} = {shown(value)}: {message}"
        super().__init__(message)

    def about(self, field: str, value: Any = None) -> Self:
        """This error, with another field and value; its message stays."""
        self.field, self.value = field, value if isinstance(value, _PLAIN) or value is None else str(value)
        return self

    def inside(self, where: str, field: str = "") -> Self:
        """The error of the same kind whose message says where: in a task, or in the part `field` of a recipe."""
        inside = self.saying(f"{where}: {self}")
        inside.field = ".".join(filter(None, (field, self.field)))
        return inside

    def saying(self, message: str) -> Self:
        """The same error with another message."""
        made: Self = _made(type(self), (message,), vars(self))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """The form in which it travels from a worker: its class may be made from other arguments."""
        return _made, (type(self), self.args, vars(self))


def _made(kind: Any, arguments: tuple[Any, ...], state: Mapping[str, Any]) -> Any:
    error = kind.__new__(kind, *arguments)
    vars(error).update(state)
    return error


class ConfigError(OliveExtError):
    """A setting is unknown, has a wrong value, or contradicts another one."""

    code = "wrong_value"


class ContradictionError(ConfigError):
    """Settings exclude each other."""

    code = "contradiction"


class MissingError(ConfigError):
    """A setting, or something that a setting needs, was not given."""

    code = "missing"


class NotComparableError(ConfigError):
    """Models, runs or reports cannot be compared."""

    code = "not_comparable"


class UnsupportedError(ConfigError):
    """A setting or request asks for what this model, machine or package does not do."""

    code = "unsupported"


class ModelError(OliveExtError):
    """A model's files cannot be found, read, or evaluated."""


class NotFoundError(ModelError):
    """A file of a model is not there."""

    code = "not_found"


class DamagedError(ModelError):
    """A file's content is not what it has to be."""

    code = "damaged"


class MismatchError(ModelError):
    """Files of a model, or a setting and a file, exclude each other."""

    code = "contradiction"


class ProviderError(OliveExtError):
    """An execution provider is unknown, missing from this build, or was not used by the session."""

    code = "provider"


class TaskError(OliveExtError):
    """A task cannot be found, or needs something that the model cannot do."""

    code = "task"


class UnfitTaskError(TaskError):
    """A task asks for what the model cannot do."""

    code = "unsupported"


class RequirementError(OliveExtError):
    """A model was measured, and a metric breaks a bound. Of an evaluation it has the `report`."""

    code = "bound_broken"

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class RecordsError(OliveExtError):
    """A reference's log-probabilities are missing from its cache on disk, or the cache is damaged."""

    code = "records"


class RunError(OliveExtError):
    """The machine failed while a valid request ran: out of memory, a kernel error, a full disk."""

    code = "failed"


class WorkerError(RunError):
    """A worker cannot be started on this machine or cluster, or was lost before it had opened the model."""

    code = "worker"


class UnwrittenError(RunError):
    """An evaluation is done, and its `report` cannot be written."""

    code = "unwritten"

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


class NonFiniteError(RunError):
    """A model's output is NaN or infinite where a working model's is not. `finding` is the message without advice."""

    code = "not_finite"

    def __init__(self, finding: str, advice: str = "") -> None:
        super().__init__(finding + advice)
        self.finding = finding


class MemoryShortageError(RunError):
    """The host or the device has no memory for an allocation."""

    code = "out_of_memory"


class MediaError(TaskError):
    """Pictures or sound of a request cannot be read or prepared, are too many, too long or missing: that request alone
    has no answer."""

    code = "media"


class LostItemError(RunError):
    """An encoder fails on one picture or sound: requests that have it have no answer."""

    code = "media"

    def __init__(self, message: str, key: str) -> None:
        """`key`: the item's."""
        super().__init__(message)
        self.key = key


class LostRequestsError(RunError):
    """Requests have no answer, because every worker that ran them was lost, what they give cannot be read, or an
    encoder fails on it. All others of the call have theirs."""

    code = "incomplete"

    def __init__(self, lost: Mapping[Any, str]) -> None:
        """`lost`: reasons by the requests' keys, or indices, in the call."""
        self.lost = dict(lost)
        key, reason = next(iter(self.lost.items()))
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        super().__init__(f"request {key!r} has no answer{more}: {reason}")


class IncompleteError(RunError):
    """An evaluation is done and reported, but requests have no answer."""

    code = "incomplete"


class SessionError(OliveExtError):
    """A session was used after it was closed, or inside another of its own calls."""

    code = "closed"


def combined(problems: Sequence[OliveExtError]) -> ConfigError:
    """One error with the sentences of all, and the code, field and value of the first."""
    first = problems[0]
    sentences = "; ".join(dict.fromkeys(map(str, problems)))
    return ConfigError(sentences, code=first.code).about(first.field, first.value)


def shown(value: object, width: int = 120) -> str:
    """The value as Python writes it, at most `width` characters, for an error's message."""
    text = " ".join(map(str.strip, repr(str(value) if isinstance(value, Path) else value).splitlines()))
    return text if len(text) <= width else text[: width - 4] + " ..."


def first_line(error: BaseException) -> str:
    """The first line of the error's message; its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip()


def printable(text: str) -> str:
    """The text with control characters other than line breaks replaced: names of files, models and tasks are written by
    others, and a terminal would obey them."""
    controls = {letter for letter in set(text) - {"\n"} if unicodedata.category(letter).startswith("C")}
    return text.translate({ord(letter): "\N{REPLACEMENT CHARACTER}" for letter in controls})


NOT_TRUSTED = "nothing of a model's folder is run unless 'trust_remote_code' = true"


def why_not_loaded(error: BaseException) -> str:
    """Why transformers does not load a file: the first line, or our switch where the file brings Python that is not
    trusted. transformers names that by an argument that users of this package do not pass."""
    if isinstance(error, UnicodeEncodeError):
        return f"the path '{error.object}' is not UTF-8: rename it"
    if "trust_remote_code" in str(error):
        return f"it brings Python code of its own ('auto_map'); {NOT_TRUSTED}"
    return first_line(error)


def joined_lines(error: BaseException, width: int = 400) -> str:
    """The error's whole message without line breaks, for libraries that break sentences; its type where it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= width else text[: width - 4] + " ..."


def one_line(error: BaseException, width: int = 300) -> str:
    """The error's type and the first line of its message, at most `width` characters."""
    name = type(error).__name__
    text = f"{name}: {first_line(error)}" if str(error).strip() else name
    return text if len(text) <= width else text[: width - 4] + " ..."


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first `most` names, and how many more there are, for an error's message."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@functools.cache  # what the check of a recipe says the evaluation need not say again
def warn_ignored(what: str) -> None:
    """Warns once of a setting of other tools that recipes have and that has no effect here."""
    logger.warning("ignored: %s", what)


def suggest(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """Asks for the nearest `known` names, at most so many, or those that begin with it: "did you mean 'a' or 'b'?".
    Empty where none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, most)
    near = near or [longer for longer in names if name[1:] and longer.startswith(name)][:3]
    return f"did you mean {' or '.join(map(named, near))}?" if near else ""


def named(name: str) -> str:
    """The name in quotes, which an option needs not."""
    return name if name.startswith("--") else repr(name)


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 picture", "0 pictures": the number with `one` of its things, or `many` (with an "s", where that is all)."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def special_kind(path: Path) -> str:
    """ "a pipe", "a socket" or "a device", whose reading may never end; empty for a file, a folder, a missing path."""
    devices = dict.fromkeys((path.is_char_device, path.is_block_device), "a device")
    kinds = {path.is_fifo: "a pipe", path.is_socket: "a socket", **devices}
    with suppress(OSError):
        return next((kind for is_kind, kind in kinds.items() if is_kind()), "")
    return ""


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `object_pairs_hook`. Raises `ValueError` for a key that is there twice: Python takes the last
    value, others the first, and onnxruntime-genai obeys both."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in names if names.count(key) > 1)}' is there twice")
    return content


@contextmanager
def reading(file: object, what: str = "graph", kind: type[OliveExtError] = ModelError) -> Iterator[None]:
    """Turns the errors that a damaged file causes in code that reads it (names that are not text, shapes that do not
    fit) into an error of this `kind` that names the file, `what` it should hold, and what was found."""
    try:
        yield
    except OliveExtError:
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise kind(f"'{file}' is a broken {what}, or one that is not understood: {one_line(error)}") from error


@contextmanager
def named_failures(
    doing: str, *, kind: type[OliveExtError] = TaskError, machine: tuple[type[Exception], ...] = _MACHINE
) -> Iterator[None]:
    """For running others' code: turns every exception, `SystemExit` too, into one of this `kind`, in one line, or into
    a `RunError` where it is one of `machine`. For a process (its `stderr`) the line is the last that it wrote.
    `OliveExtError` and an interruption pass."""
    try:
        yield
    except (OliveExtError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        is_machine = isinstance(error, machine) and not isinstance(error, _OF_CODE)
        written = getattr(error, "stderr", None)
        lines = written.strip().splitlines() if isinstance(written, str) else []
        what = lines[-1] if lines else one_line(error) + raised_at(error)
        raise (RunError if is_machine else kind)(f"{doing}: {what}") from error


def raised_at(error: BaseException) -> str:
    """ " (FILE, line N)" of the innermost call in a file that no package installed, a task's or a model's own code;
    empty where there is none."""
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [call for call in calls if not (call[0].startswith(_INSTALLED) or "-packages" in call[0])]
    return " ({}, line {})".format(*foreign[-1]) if foreign else ""


STDERR = 2
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises a panic within it, which is not an `Exception`, as a `RuntimeError` with its message. A panic also writes
    its stack to the descriptor of stderr, past Python: that is dropped, and anything else written there comes out at
    the end."""
    panicked = False
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as held:
        saved = os.dup(STDERR)
        os.dup2(held.fileno(), STDERR)
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"  # of pyo3, in a module that cannot be imported
            if panicked:
                raise RuntimeError(str(error)) from None
            raise
        finally:
            os.dup2(saved, STDERR)
            os.close(saved)
            held.seek(0)
            if not panicked:
                os.write(STDERR, held.read())
