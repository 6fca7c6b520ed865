"""One function for each command: it makes one configuration, passes it on and prints the result. Knows no option."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from olive_ext.cli.options import BENCH_OPTIONS, written_values
from olive_ext.config import EvaluationConfig, schema
from olive_ext.config.bench import BenchConfig
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


def bench_command(arguments: Namespace) -> int:
    """Measures the backends; a line on stderr for each process that has ended, the table on stdout."""
    config = BenchConfig.parse({"model": arguments.model, **written_values(arguments, options=BENCH_OPTIONS)})
    from olive_ext.bench import bench
    from olive_ext.bench.tables import print_summary

    print_summary(bench(config, say=_say), f"{config.model}: {', '.join(config.tasks)}")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"olive-ext: {line}\n")
    sys.stderr.flush()


def compare_command(arguments: Namespace) -> int:
    """Prints one table over the reports, and writes the page where a folder for it is named."""
    from olive_ext.report import check_writable, print_page, write_page
    from olive_ext.run import compare

    if arguments.output is not None:
        check_writable(arguments.output, "--output")
    page = compare(arguments.reports, arguments.baseline)
    print_page(page)
    if arguments.output is not None:
        sys.stdout.write(f"{write_page(page, arguments.output)}\n")
    return 0


def evalution_command(arguments: Namespace) -> int:
    """Runs a specification of Evalution and writes its result. Imports Evalution, which is an extra, here only."""
    try:
        from olive_ext.backends.evalution import run_spec
    except ModuleNotFoundError as error:
        if error.name != "evalution":
            raise
        raise ConfigError("Evalution is not installed: pip install 'olive-ext[evalution]'") from error

    text = json.dumps(run_spec(Path(arguments.spec)), indent=2) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        Path(arguments.output).write_text(text, encoding="utf-8")
    return 0


def check_command(arguments: Namespace) -> int:
    """Prints what a recipe or model resolves to; raises `ConfigError` that names all problems where there are any."""
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
