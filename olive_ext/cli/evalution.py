"""`olive-ext evalution`: its arguments and what it does. Imports Evalution only when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path

from olive_ext.errors import ConfigError

SPEC_HELP = "A YAML specification of Evalution: engine (`type: OrtEngine`, or one of its own), model and tests."
OUTPUT_HELP = "File for the result, as JSON. Without it stdout gets it; messages and bars go to stderr."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `evalution`."""
    parser.add_argument("spec", metavar="SPEC", help=SPEC_HELP)
    parser.add_argument("--output", metavar="FILE", help=OUTPUT_HELP)


def evalution_command(arguments: Namespace) -> int:
    """Runs the specification and writes Evalution's result."""
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
