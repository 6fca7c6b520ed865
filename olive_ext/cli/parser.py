"""The parser of `olive-ext`: its commands, and their arguments as one table. Knows no function that a command calls."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn

from olive_ext import __version__
from olive_ext.cli.options import LOCATE_OPTIONS, MEND_OPTIONS, OPTIONS, RECORD_OPTIONS, add_options
from olive_ext.config import SCHEMA_KINDS
from olive_ext.errors import ConfigError

ABOUT = "Evaluates ONNX language models, alone or inside Microsoft Olive."
COMMANDS = {
    "quickstart": "Copy the quickstart (recipe, small trained model, tasks) into a new folder, ready to run.",
    "evaluate": "Evaluate one model with lm-eval tasks.",
    "record": "Record what a model says to tasks in one file, a reference for elsewhere (--reference FILE.records).",
    "compare": "Put earlier reports side by side in one table and one page; refuse what was not asked in the same way.",
    "gate": "Hold an evaluation against a baseline in the repository: 0 passed, 1 a loss, 3 cannot tell, 2 a mistake.",
    "locate": "Say which weights of a quantized model its loss comes from, against the float model it was made of.",
    "mend": "Write a quantized model anew, the weights that lose most in a finer precision, to keep a loss or a size.",
    "evalution": "Run Evalution's suites on one model, as its YAML specification says.",
    "run": "Run an Olive recipe: the same arguments as `olive run`; its evaluator and passes are known.",
    "job": "Write the folder of a job for a recipe: job.yml, code, environment, README. Never submits it.",
    "check": "Say what a recipe or a model resolves to, without running it.",
    "schema": "Print the JSON schema of an evaluator block, a pass block or a recipe.",
}
RUN_HELP = (
    "All other arguments of `olive run` are passed on, for instance -o DIR, --list_required_packages, --tempdir DIR, "
    "--log_level N; `olive run --help` lists them."
)
_REPORTS = (
    "Folder with a report.json, the file itself, or a folder of such folders; NAME=PATH gives the report a name. Two "
    "or more, the first being the baseline."
)
_BASELINE = "Name or path of the report that the others are held against; by default the first."
_RUN = (
    "Folder of an evaluation with its sample logs, or a .json or .yaml file with the keys of an evaluation, which is "
    'then made here; with "documents": "enough" it stops as soon as the decision is certain.'
)
_GATE_BASELINE = "File with the baseline: metrics with errors, and each document's values under a key of its content."
_UPDATE = "Write the baseline from the evaluation; nothing is decided."
_WITHIN = "Points of accuracy whose loss is too much. By default the evaluation's `matters`, else 1."
_JUNIT = "File for the result as JUnit XML, a case a bound."
_SPEC = "A YAML specification of Evalution: engine (`type: OrtEngine`, or one of its own), model and tests."
_VERIFY = "Also run the model: compare the log-probabilities of the scoring-head graph and the untouched graph."
_AGAINST = (
    "Also hold the model against the Hugging Face checkpoint it was exported from, on texts of growing length: where "
    "they differ, from which length on, in which layer, and what the export left out."
)
_JOB_KIND = "Where the job is to run: azureml (a command job of Azure ML, for `az ml job create`)."
_NODES = "Nodes of the cluster; more than one form a Ray cluster with a worker on each. By default 1."
_MODEL = "An .onnx file, a folder with one or with genai_config.json, or a Hugging Face model."
_ONNX_MODEL = "An .onnx file, or a folder with one or with genai_config.json."
_RECORDS = "The file: distributions, answers, versions, provider, processor. Its size is told before the model runs."
_NEEDED = {"required": True}


def _points(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 100:
            return float(text)
    raise ArgumentTypeError(f"{text!r}: give points of accuracy, above 0 and below 100")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


ARGUMENTS: dict[str, tuple[tuple[str, str, str, dict[str, Any]], ...]] = {
    "quickstart": (("folder", "DIR", "A folder that is new or empty.", {}),),
    "evaluate": (("model", "MODEL", _MODEL, {}),),
    "record": (
        ("model", "MODEL", _MODEL, {}),
        ("--output", "FILE.records", _RECORDS, _NEEDED),
    ),
    "locate": (("model", "MODEL", _ONNX_MODEL, {}),),
    "mend": (("model", "MODEL", _ONNX_MODEL, {}),),
    "compare": (
        ("reports", "REPORT", _REPORTS, {"nargs": "+"}),
        ("--baseline", "REPORT", _BASELINE, {}),
        ("--output", "DIR", "Folder for compare.html. Without it only the table is printed.", {}),
    ),
    "gate": (
        ("run", "RUN", _RUN, {}),
        ("--baseline", "FILE", _GATE_BASELINE, _NEEDED),
        ("--update-baseline", "", _UPDATE, {"action": "store_true"}),
        ("--within", "POINTS", _WITHIN, {"type": _points}),
        ("--junit", "FILE", _JUNIT, {}),
    ),
    "evalution": (
        ("spec", "SPEC", _SPEC, {}),
        ("--output", "FILE", "File for the result, as JSON; else stdout gets it. Messages and bars go to stderr.", {}),
    ),
    "run": (
        ("--config --run-config", "RECIPE", "The recipe, .json or .yaml.", _NEEDED),
        ("-m --model_name_or_path", "MODEL", "An input model in place of the recipe's.", {"dest": "model"}),
    ),
    "job": (
        ("kind", "azureml", _JOB_KIND, {"choices": ("azureml",)}),
        ("recipe", "RECIPE", "The recipe, .json or .yaml.", {}),
        ("--compute", "NAME", "Compute cluster, or another target that Azure ML knows by this name.", _NEEDED),
        ("--output", "DIR", "A folder that is new or empty.", _NEEDED),
        ("--nodes", "N", _NODES, {"type": _count, "default": 1}),
    ),
    "check": (
        ("target", "RECIPE|MODEL", "A recipe (.json, .yaml, .yml), or a model as for `evaluate`.", {}),
        ("--verify", "", _VERIFY, {"action": "store_true"}),
        ("--against", "CHECKPOINT", _AGAINST, {}),
    ),
    "schema": (
        ("kind", "|".join(SCHEMA_KINDS), "Which schema; recipe by default.",
         {"nargs": "?", "choices": SCHEMA_KINDS, "default": "recipe"}),
    ),
}  # fmt: skip
"""By command: names, metavar and help of each argument, and what else argparse is told of it."""


class _Parser(ArgumentParser):
    """Raises instead of printing the usage and exiting: the caller prints one line."""

    passes_on = False
    """Whether another program reads the arguments that this one does not know."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see '{self.prog} --help')")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which has the command's own parser leave it to the whole one to refuse what is unknown."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.passes_on:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f": did you mean '{near[0]}'?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return arguments, unknown


def build_parser() -> _Parser:
    """The parser; `arguments.command` names the command."""
    parser = _Parser(prog="olive-ext", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"olive-ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {
        name: commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in COMMANDS.items()
    }
    for command, arguments in ARGUMENTS.items():
        for names, metavar, text, more in arguments:
            named: dict[str, Any] = {"metavar": metavar} if metavar else {}
            made[command].add_argument(*names.split(), help=text, **named, **more)
    add_options(made["evaluate"], OPTIONS)
    add_options(made["record"], RECORD_OPTIONS)
    add_options(made["locate"], LOCATE_OPTIONS)
    add_options(made["mend"], MEND_OPTIONS)
    add_options(made["check"], [option for option in OPTIONS if option.for_check])
    made["run"].epilog, made["run"].passes_on = RUN_HELP, True
    return parser


def parse(argv: list[str]) -> Namespace:
    """The arguments; raises `ConfigError`, and SystemExit behind a help text. Olive reads those of `run`, too."""
    parser = build_parser()
    parser.passes_on = argv[:1] == ["run"]
    arguments: Namespace = parser.parse_known_args(argv, Namespace(passed_on=argv[1:]))[0]
    return arguments
