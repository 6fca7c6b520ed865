"""What the commands do: each makes one configuration, hands it down and prints what comes back."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable

from olive_ext.cli.bench import bench_command
from olive_ext.cli.compare import compare_command
from olive_ext.cli.evalution import evalution_command
from olive_ext.cli.options import written_values
from olive_ext.config import EvaluationConfig, schema
from olive_ext.errors import ConfigError

Command = Callable[[Namespace], int]
RECIPE_SUFFIXES = (".json", ".yaml", ".yml")


def evaluate_command(arguments: Namespace) -> int:
    """Evaluates one model and prints the table; progress bars only where stderr is a terminal."""
    config = EvaluationConfig.parse(written_values(arguments, arguments.model))
    from olive_ext.report import print_table
    from olive_ext.run import evaluate

    print_table(evaluate(config, progress=sys.stderr.isatty()))
    return 0


def check_command(arguments: Namespace) -> int:
    """Prints what a recipe or model resolves to; 2 where there are problems, all of them named on stderr's one line."""
    from olive_ext.check import check_model, check_recipe

    if arguments.target.lower().endswith(RECIPE_SUFFIXES):
        if written_values(arguments):
            raise ConfigError("options are for models; a recipe says everything itself")
        found = check_recipe(arguments.target, verify=arguments.verify)
    else:
        values = {"tasks": ["size_on_disk"], **written_values(arguments, arguments.target)}
        found = check_model(EvaluationConfig.parse(values), verify=arguments.verify)
    sys.stdout.write(found.text())
    if found.problems:
        raise ConfigError("; ".join(found.problems))
    return 0


def schema_command(arguments: Namespace) -> int:
    """Prints a JSON schema."""
    sys.stdout.write(json.dumps(schema(arguments.kind), indent=2) + "\n")
    return 0


COMMAND_FUNCTIONS: dict[str, Command] = {
    "evaluate": evaluate_command,
    "bench": bench_command,
    "compare": compare_command,
    "evalution": evalution_command,
    "check": check_command,
    "schema": schema_command,
}
