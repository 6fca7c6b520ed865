"""Runs Evalution's YAML specifications with `type: OrtEngine` in them. Knows no suite."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import evalution
import evalution.yaml

from olive_ext.backends.evalution.ort_engine import OrtEngine
from olive_ext.config.yaml_files import yaml_bytes
from olive_ext.errors import ConfigError


def register() -> None:
    """Makes `type: OrtEngine` known to Evalution's YAML in this process, and `engines.OrtEngine` to what it emits.

    Evalution has no public way for engines of other packages: this writes into its private registry. Raises
    `ConfigError` where a release keeps none by that name; its Python interface takes `OrtEngine` all the same.
    """
    registry = getattr(evalution.yaml, "_ENGINE_REGISTRY", None)
    if not isinstance(registry, dict):
        raise ConfigError(
            f"evalution {evalution.__version__} keeps its engines where olive_ext does not find them: "
            "use evalution.run(engine=OrtEngine(...))"
        )
    spec = getattr(evalution.yaml, "_EngineSpec", None)
    name = OrtEngine.__name__
    registry[name.lower()] = OrtEngine if spec is None else spec(factory=OrtEngine, emit_alias=name)
    setattr(evalution.engines, name, OrtEngine)


def run_spec(spec: Path) -> dict[str, Any]:
    """Runs the YAML file and returns Evalution's result, JSON-ready. Its messages and bars go to stderr.

    Raises `ConfigError` for a specification that Evalution refuses.
    """
    if not spec.is_file():
        raise ConfigError(f"there is no file '{spec}'")
    with redirect_stdout(sys.stderr):
        register()
        try:
            yaml_bytes(spec)
            evalution.python_from_yaml(spec)  # checks engine, model and the form of the tests; opens nothing
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"'{spec}': {error.args[0] if error.args else error}") from error
        result: dict[str, Any] = evalution.run_yaml(spec).to_dict()
    return result
