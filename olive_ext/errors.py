"""The errors a user can cause, each a ValueError; and the first line of any error.

Olive swallows every exception that is not a ValueError, TypeError, ImportError, AttributeError or AssertionError and
exits with 0, so nothing else may leave this package for a user's mistake.
"""


class OliveExtError(ValueError):
    """Base of all errors that name what a user wrote or handed over."""


class ConfigError(OliveExtError):
    """A setting is unknown, has a wrong value, or contradicts another one."""


class ModelError(OliveExtError):
    """A model's files cannot be found, read, or evaluated."""


class ProviderError(OliveExtError):
    """An execution provider is unknown, missing from this build, or was not used by the session."""


class TaskError(OliveExtError):
    """A task cannot be found or asks for something the model cannot do."""


class RequirementError(OliveExtError):
    """A model was measured, and breaks a bound that the recipe requires."""


class RecordsError(OliveExtError):
    """What a reference said is missing from its records on disk, or these are damaged."""


class RunError(OliveExtError):
    """The machine failed while a valid request ran: out of memory, a kernel error, a full disk."""


class MemoryShortageError(RunError):
    """The host or the device has no memory for what was tried."""


class SessionError(OliveExtError):
    """A session was used after it was closed, or inside another of its own calls."""


def first_line(error: BaseException, *, with_type: bool = False, width: int = 1000) -> str:
    """The first line of an error's message, at most `width` characters; its type where the message is empty, and in
    front of it `with_type`."""
    name = type(error).__name__
    line = next(iter(str(error).strip().splitlines()), "").strip()
    text = line or name if not with_type else f"{name}: {line}" if line else name
    return text if len(text) <= width else text[: width - 4] + " ..."
