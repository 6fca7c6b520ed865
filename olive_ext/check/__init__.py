"""What a recipe or a model resolves to, and what is wrong with it, without evaluating anything.

`recipe` says what is wrong with a recipe, to every entry; `model_check` and `recipe_check` are `olive-ext check`. Knows
the resolver, and nothing of how a model is scored. The room is itself the function `check`, as `olive_ext.check`.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from olive_ext.check.model_check import Findings, check_model
from olive_ext.check.recipe import blocks, mistakes, refuse
from olive_ext.check.recipe_check import check_recipe
from olive_ext.config import RECIPE_SUFFIXES, EvaluationConfig
from olive_ext.config.base import takes
from olive_ext.config.yaml_files import read_recipe
from olive_ext.errors import ConfigError

__all__ = ["Findings", "blocks", "check", "check_model", "check_recipe", "mistakes", "read_recipe", "refuse"]


@takes(EvaluationConfig)
def check(target: str | Path, *, verify: bool = False, against: str | Path | None = None, **settings: Any) -> Findings:
    """What a recipe (.json, .yaml, .yml) or a model at `target` resolves to, without running it: print it. What is
    wrong is in its `errors`, what was lost in its `differences`, and the sentences of both in its `problems`.

    `settings` are keys of an evaluation of the model; with `tasks` its work is predicted. `verify` also runs the model
    and compares its log-probabilities with those of the untouched graph; `against`, a checkpoint, compares with that.
    Raises `ConfigError` for settings that are wrong in themselves.
    """
    if str(target).lower().endswith(RECIPE_SUFFIXES):
        if settings or against is not None:
            raise ConfigError("options are for models; a recipe says all itself", next(iter(settings), "against"))
        return check_recipe(target, verify=verify)
    model = {"path": str(target), **settings.get("model", {})}
    config = EvaluationConfig.of({"tasks": ["size_on_disk"], **settings, "model": model}, {})
    held = None if against is None else str(against)
    return check_model(config, work="tasks" in settings, verify=verify, against=held)


class _Room(ModuleType):
    """Python makes a package's room its attribute of that name, whichever was asked for first."""

    __call__ = staticmethod(check)


sys.modules[__name__].__class__ = _Room
__signature__ = inspect.signature(check)  # that of a module with `__call__` would lack the first argument
