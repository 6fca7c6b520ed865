"""The registry of runtimes: the libraries that run a model.

Each runtime is one object. The core's own are listed in `BUILT_IN`; a plug-in adds one under the name that
`engine.runtime` then takes. Knows no runner: opening one is up to the runtime.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

from olive_ext import registry
from olive_ext.config import EngineConfig
from olive_ext.errors import ConfigError, ContradictionError, ModelError, named_failures
from olive_ext.model.decisions import Decision
from olive_ext.model.files.locate import Kind
from olive_ext.model.types import ModelFiles
from olive_ext.registry import entries

Resolved: TypeAlias = Any
"""An `olive_ext.model.ResolvedModel`. Its module imports this one, because a resolved model has a runtime; runtimes
name the class itself in their signatures."""

BUILT_IN = {
    "genai": "olive_ext.engine.runtimes:Genai",
    "onnxruntime": "olive_ext.engine.runtimes:OnnxRuntime",
    "transformers": "olive_ext.engine.runtimes:Transformers",
}
"""Module and class of each runtime of this package, in the order in which "auto" asks them."""

_DEFAULTS = EngineConfig()


class Runtime(ABC):
    """A library that runs models: which ones, and how a runner on one is opened. It has no state."""

    name: ClassVar[str]
    """The value of `engine.runtime`, and of the execution's `runtime`."""

    kind: ClassVar[Kind] = "onnx"
    """The kind of model files that the runtime opens; `engine.runtime` chooses among the runtimes of that kind."""

    runs_graph: ClassVar[bool] = False
    """Whether the runtime opens the decoder's graph as this package reads it, so that the runner has the vocabulary,
    inputs and caches that the model's graphs show."""

    nothing_to_verify: ClassVar[str] = "there is nothing to verify: the runtime has the model as it is"
    """Why `olive-ext check --verify` runs nothing. Unused with `runs_graph`."""

    follows: ClassVar[frozenset[str] | None] = None
    """The engine settings that the runtime follows; None for all of them."""

    def auto_reason(self, model: Resolved) -> str:
        """Why "auto" takes this runtime for a model of its `kind`; empty where it does not. Only built-in runtimes are
        asked, so that the choice does not depend on what else is installed."""
        return ""

    def alternative(self, files: ModelFiles) -> str:
        """The end of a sentence that proposes this runtime for a model that another refuses, if it fits."""
        return ""

    def is_on_host(self, model: Resolved) -> bool:
        """Whether the model would be in the host's memory alone."""
        return bool(model.device.kind == "cpu")

    def refuse(self, model: Resolved) -> None:  # noqa: B027 (a runtime may take every setting)
        """Raises `ConfigError` for settings that the runtime cannot follow."""

    @abstractmethod
    def decisions(self, model: Resolved) -> Iterable[Decision]:
        """What opening the model decides, under the names that `describe_execution` has for it."""

    @abstractmethod
    def open(self, model: Resolved) -> Any:
        """An `engine.runners.runner.OpenedRunner`. The library is imported here, and not with the runtime's module.
        Raises `ModelError` for a model that cannot be scored or run, and `ProviderError` where the library or a
        provider does not come up."""


def refuse_settings(model: Resolved) -> list[str]:
    """A sentence for each engine setting without effect, because the model's runtime does not follow it. Raises
    `ConfigError` for settings that a runtime cannot do without. Where `engine.runtime` names the runtime, it raises for
    all of them; where "auto" chose it, the same recipe may be for other models, too."""
    runtime, engine = model.runtime, model.settings.engine
    with failures_named(runtime, "refuse"):
        runtime.refuse(model)
    if runtime.follows is None:
        return []
    ignored = {name: getattr(engine, name) for name in EngineConfig.model_fields.keys() - runtime.follows - {"runtime"}}
    where = f"on '{runtime.name}' ({model.runtime_reason}), which takes {', '.join(sorted(runtime.follows))}"
    sentences = [
        f"'engine.{name}' = {json.dumps(value)} changes nothing {where}"
        for name, value in sorted(ignored.items())
        if value != getattr(_DEFAULTS, name)
    ]
    if sentences and engine.runtime == runtime.name:
        raise ContradictionError(f"{sentences[0]}: leave it out")
    return sentences


def failures_named(runtime: Runtime, doing: str) -> AbstractContextManager[None]:
    """Turns whatever another package's runtime raises in `doing` into an error that names it."""
    if runtime.name in BUILT_IN:
        return nullcontext()
    return named_failures(f"'engine.runtime' = '{runtime.name}' failed in '{doing}'", kind=ModelError)


def choose(model: Resolved) -> tuple[Runtime, str]:
    """The runtime of a model, and which rule chose it. Raises `ConfigError` as `load`."""
    asked = model.settings.engine.runtime
    if asked != "auto" and (runtime := load(asked)).kind == model.kind:
        return runtime, "engine.runtime"
    reasons = ((runtime, runtime.auto_reason(model)) for runtime in map(load, BUILT_IN) if runtime.kind == model.kind)
    return next((runtime, reason) for runtime, reason in reasons if reason)


@lru_cache
def load(name: str) -> Runtime:
    """The runtime of that name. Raises `ConfigError` where no plug-in has it, several do, or its module fails."""
    where, known = f"'engine.runtime' = {name!r}", BUILT_IN if name in BUILT_IN else entries("runtimes", BUILT_IN)
    if name not in known:
        raise ConfigError(f"{where}: no plug-in has a runtime of that name", code="unknown_name")
    kind = registry.load(known[name], where)
    if not (isinstance(kind, type) and issubclass(kind, Runtime)) or kind.name != name:
        raise ConfigError(f"{where}: '{known[name]}' is no olive_ext.model.runtimes.Runtime of that name")
    return kind()


def with_alternative(refusal: ModelError, files: ModelFiles) -> ModelError:
    """The refusal of a graph, with the built-in runtime that may run the model nevertheless."""
    proposals = filter(None, (load(name).alternative(files) for name in BUILT_IN))
    return next((ModelError(f"{refusal}; {proposal}") for proposal in proposals), refusal)
