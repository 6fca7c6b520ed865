"""Finds plug-ins: the packages in `olive_ext.plugins`, and those that other distributions name as entry points of the
group "olive_ext.plugins". The core asks for hooks by name and imports no plug-in itself."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from olive_ext.errors import ANY_FAILURE, ConfigError, first_line

GROUP = "olive_ext.plugins"
"""Entry points of other distributions; each names a `Plugin`."""

Argument = tuple[str, str, str, Mapping[str, Any]]
"""Names, metavar and help of an argument of a command, and what else argparse takes for it."""


@dataclass(frozen=True)
class Command:
    """A command of `olive-ext`."""

    help: str
    function: str
    """Takes the parsed arguments and returns the exit status. "module:name", as everything that is imported when used.
    """

    arguments: Sequence[Argument] = ()
    options: str = ""
    """A table of `olive_ext.cli.options.Option`, "module:name"; empty without configuration keys."""


@dataclass(frozen=True)
class Pass:
    """A pass of Olive's; its type is its name in `Plugin.passes`."""

    kind: str
    """The class, "module:name"."""

    settings: str
    """The configuration model, "module:name"."""

    description: str
    """What it does, for the schema."""

    changes_model: bool = False


@dataclass(frozen=True)
class Evaluator:
    """An evaluator of metrics that a recipe declares; its type is its name in `Plugin.evaluators`."""

    module: str
    """Registers the type with Olive when it is imported. Importing it may itself be what first imports Olive."""

    settings: str
    """Its keys, an `olive_ext.config.EvaluatorSettings`, "module:name"."""

    description: str
    """What it is, for the schema."""

    mistakes: str
    """Takes the recipe, a place in it, its metrics as written, and the settings; returns a sentence for each mistake.
    It is called before anything runs."""

    describe: str
    """Takes the metrics as written and the settings; returns a text for a person."""


@dataclass(frozen=True)
class Plugin:
    """What a plug-in adds, by hook. Its module imports nothing heavy: objects are named "module:name"."""

    commands: Mapping[str, Command] = field(default_factory=dict)
    passes: Mapping[str, Pass] = field(default_factory=dict)
    evaluators: Mapping[str, Evaluator] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    """Functions that the package gains, such as `olive_ext.locate`."""

    runtimes: Mapping[str, str] = field(default_factory=dict)
    """Libraries that run models: `olive_ext.model.runtimes.Runtime`s, by the name that `engine.runtime` then takes."""

    hooks: Mapping[str, str] = field(default_factory=dict)
    """Other objects, by the names under which the core asks for them (`hook`, `hooks`)."""


@functools.cache
def plugins() -> Mapping[str, Plugin]:
    """All plug-ins by name. Raises `ConfigError` for one of another distribution that cannot be imported, or has a name
    that is taken."""
    inside = pkgutil.iter_modules([str(Path(__file__).with_name("plugins"))])
    named = [(module.name, f"olive_ext.plugins.{module.name}:plugin") for module in inside]
    known: dict[str, Plugin] = {}
    for name, value in [*named, *((entry.name, entry.value) for entry in entry_points(group=GROUP))]:
        if name in known:
            raise ConfigError(f"plug-in '{name}': '{value}' has the name of another plug-in")
        known[name] = load(value, f"plug-in '{name}'")
    return known


def load(name: str, what: str = "") -> Any:
    """The object "module:name". With `what`, another distribution's: any failure is then a `ConfigError`."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ANY_FAILURE as error:
        if not what:
            raise
        raise ConfigError(f"{what}: '{name}' cannot be loaded: {first_line(error)}") from error


def entries(kind: str, built_in: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Any]:
    """What is built in and what plug-ins add of a kind (a field of `Plugin`), by name. `ConfigError` for one twice."""
    known = dict(built_in)
    for plugin, one in plugins().items():
        if twice := known.keys() & getattr(one, kind).keys():
            raise ConfigError(f"plug-in '{plugin}': its {kind} have '{min(twice)}', which is there already")
        known |= getattr(one, kind)
    return known


def hooks(name: str) -> Mapping[str, Any]:
    """The objects of plug-ins for a hook, by the plug-ins' names."""
    named = {plugin: one.hooks[name] for plugin, one in plugins().items() if name in one.hooks}
    return {plugin: load(value) for plugin, value in named.items()}


def hook(name: str, needed_for: str) -> Any:
    """The one object that a plug-in has for a hook. Raises `ConfigError` that names what it is needed for."""
    objects = hooks(name)
    if not objects:
        raise ConfigError(f"{needed_for}: no plug-in of this installation has '{name}'", code="unknown_name")
    return next(iter(objects.values()))
