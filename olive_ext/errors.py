"""The errors a user can cause, each a ValueError.

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
