"""Other frameworks' suites on this package's engine: Evalution, mteb, lmms-eval. Each needs its extra."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from olive_ext.errors import ConfigError
from olive_ext.registry import Command, Plugin

_SPEC = "A YAML specification of Evalution: engine (`type: OrtEngine`, or one of its own), model and tests."
_OUTPUT = "File for the result, as JSON; else stdout gets it. Messages and bars go to stderr."

plugin = Plugin(
    commands={
        "evalution": Command(
            "Run Evalution's suites on one model, as its YAML specification says.",
            "olive_ext.plugins.suites:evalution_command",
            (("spec", "SPEC", _SPEC, {}), ("--output", "FILE", _OUTPUT, {})),
        )
    },
    hooks={"embedding_tasks": "olive_ext.plugins.suites:evaluate_embeddings"},
)


def evaluate_embeddings(*arguments: Any) -> Any:
    """See `mteb.evaluation.evaluate_tasks`. Imports mteb, which is an extra, here only."""
    try:
        from olive_ext.plugins.suites.mteb.evaluation import evaluate_tasks
    except ImportError as error:
        problem = f"'tasks' need mteb ({error}): install the extra 'mteb' ('.[mteb]' in a clone)"
        raise ConfigError(problem, code="needs_package") from error
    return evaluate_tasks(*arguments)


def evalution_command(arguments: Namespace) -> int:
    """Runs a specification of Evalution and writes its result. Imports Evalution, which is an extra, here only."""
    if not Path(arguments.spec).is_file():
        raise ConfigError(f"'{arguments.spec}': no such file", code="not_found")
    try:
        from olive_ext.plugins.suites.evalution import run_spec
    except ModuleNotFoundError as error:
        if error.name != "evalution":
            raise
        raise ConfigError("needs Evalution: install the extra 'evalution' ('.[evalution]' in a clone)") from error

    text = json.dumps(run_spec(Path(arguments.spec)), indent=2) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        Path(arguments.output).write_text(text, encoding="utf-8")
    return 0
