"""The argument parser of `olive-ext`. Knows the commands, not what they do."""

from __future__ import annotations

import argparse
from typing import NoReturn

from olive_ext import __version__
from olive_ext.cli.options import BENCH_OPTIONS, OPTIONS, add_options
from olive_ext.config import SCHEMA_KINDS

ABOUT = "Evaluates ONNX language models, alone or inside Microsoft Olive."
COMMANDS = {
    "evaluate": "Evaluate one model with lm-eval tasks.",
    "bench": "Measure the speed of one model beside other backends, on the same requests.",
    "compare": "Put earlier reports side by side in one table and one page; refuse what was not asked in the same way.",
    "evalution": "Run Evalution's suites on one model, as its YAML specification says.",
    "run": "Run an Olive recipe: the same arguments as `olive run`; OrtLMEvaluator and OrtLMEvaluation are known.",
    "check": "Say what a recipe or a model resolves to, without running it.",
    "schema": "Print the JSON schema of an evaluator block, a pass block or a recipe.",
}
MODEL_HELP = "An .onnx file, a folder with one or with genai_config.json, or a Hugging Face model."
BENCH_MODEL_HELP = "An .onnx file, or a folder with one or with genai_config.json."
TARGET_HELP = "A recipe (.json, .yaml, .yml), or a model as for `evaluate`."
VERIFY_HELP = "Also run the model: compare the log-probabilities of the scoring-head graph and the untouched graph."
RUN_HELP = "Arguments of `olive run`, for instance --config recipe.json."
SCHEMA_HELP = "Which schema; recipe by default."

REPORT_HELP = (
    "Folder with a report.json, the file itself, or a folder of such folders; NAME=PATH gives the report a name. Two "
    "or more, the first being the baseline."
)
BASELINE_HELP = "Name or path of the report that the others are held against; by default the first."
SPEC_HELP = "A YAML specification of Evalution: engine (`type: OrtEngine`, or one of its own), model and tests."
RESULT_HELP = "File for the result, as JSON. Without it stdout gets it; messages and bars go to stderr."
OUTPUT_HELP = "Folder for compare.html. Without it only the table is printed."
COMPARE_OPTIONS = (("--baseline", "baseline", "REPORT", BASELINE_HELP), ("--output", "output", "DIR", OUTPUT_HELP))


class UsageError(Exception):
    """The command line itself is wrong."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage and exiting: the caller prints one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see '{self.prog} --help')")


def build_parser() -> argparse.ArgumentParser:
    """The parser; `arguments.command` names the command."""
    parser = _Parser(prog="olive-ext", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"olive-ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {
        name: commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in COMMANDS.items()
    }
    made["evaluate"].add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_options(made["evaluate"], OPTIONS)
    made["bench"].add_argument("model", metavar="MODEL", help=BENCH_MODEL_HELP)
    add_options(made["bench"], BENCH_OPTIONS)
    made["compare"].add_argument("reports", metavar="REPORT", nargs="+", help=REPORT_HELP)
    for flag, key, metavar, text in COMPARE_OPTIONS:
        made["compare"].add_argument(flag, dest=key, metavar=metavar, help=text)
    made["evalution"].add_argument("spec", metavar="SPEC", help=SPEC_HELP)
    made["evalution"].add_argument("--output", metavar="FILE", help=RESULT_HELP)
    made["run"].add_argument("arguments", metavar="ARGUMENT", nargs="*", help=RUN_HELP)
    made["check"].add_argument("target", metavar="RECIPE|MODEL", help=TARGET_HELP)
    made["check"].add_argument("--verify", action="store_true", help=VERIFY_HELP)
    add_options(made["check"], [option for option in OPTIONS if option.for_check])
    made["schema"].add_argument(
        "kind", metavar="|".join(SCHEMA_KINDS), nargs="?", choices=SCHEMA_KINDS, default="recipe", help=SCHEMA_HELP
    )
    return parser
