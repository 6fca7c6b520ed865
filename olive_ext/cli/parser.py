"""The parser of `olive-ext`: its commands, and their arguments as one table. Knows no function of a command."""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any, NoReturn

from olive_ext import __version__
from olive_ext.cli.options import add_options
from olive_ext.config import SCHEMA_KINDS, EvaluationConfig
from olive_ext.errors import ConfigError, suggest
from olive_ext.registry import Command, entries, load

ABOUT = "Evaluates ONNX language models, alone or inside Microsoft Olive."
RUN_HELP = (
    "All other arguments of `olive run` are passed on, for instance -o DIR, --list_required_packages, --tempdir DIR, "
    "--log_level N; `olive run --help` lists them."
)
_REPORTS = (
    "Folder with a report.json, the file itself, or a folder of such folders; NAME=PATH gives the report a name. Two "
    "or more, the first being the baseline."
)
_BASELINE = "Name or path of the report that the others are held against; by default the first."
_VERIFY = "Also run the model: compare log-probabilities of the scoring-head graph, the untouched graph and the CPU."
_AGAINST = (
    "Also hold the model against the Hugging Face checkpoint it was exported from, on texts of growing length: where "
    "they differ, from which length on, in which layer, and what the export left out."
)
_MODEL = "An .onnx file, a folder with one or with genai_config.json, or a Hugging Face model."
_RECORDS = "The file: distributions, answers, versions, provider, processor. Its size is printed before the model runs."
_NEEDED = {"required": True}


_HERE = "olive_ext.cli.commands"
CORE: dict[str, Command] = {
    "quickstart": Command(
        "Copy the quickstart (recipe, small trained model, tasks) into a new folder, ready to run.",
        f"{_HERE}:quickstart_command",
        (("folder", "DIR", "A folder that is new or empty.", {}),),
    ),
    "evaluate": Command(
        "Evaluate one model with lm-eval tasks.",
        f"{_HERE}:evaluate_command",
        (("model", "MODEL", _MODEL, {}),),
        "olive_ext.cli.options:OPTIONS",
    ),
    "record": Command(
        "Record what a model says to tasks in one file, a reference for elsewhere (--reference FILE.records).",
        f"{_HERE}:record_command",
        (("model", "MODEL", _MODEL, {}), ("--output", "FILE.records", _RECORDS, _NEEDED)),
        "olive_ext.cli.options:RECORD_OPTIONS",
    ),
    "compare": Command(
        "Put earlier reports side by side in one table and one page; refuse what was not asked in the same way.",
        f"{_HERE}:compare_command",
        (
            ("reports", "REPORT", _REPORTS, {"nargs": "+"}),
            ("--baseline", "REPORT", _BASELINE, {}),
            ("--output", "DIR", "Folder for compare.html. Without it only the table is printed.", {}),
        ),
    ),
    "run": Command(
        "Run an Olive recipe: the same arguments as `olive run`; its evaluator and passes are known.",
        f"{_HERE}:run_command",
        (
            (
                "--config --run-config",
                "RECIPE",
                "The recipe, .json or .yaml; as the first argument also without the option's name.",
                _NEEDED,
            ),
            ("-m --model_name_or_path", "MODEL", "An input model in place of the recipe's.", {"dest": "model"}),
        ),
    ),
    "check": Command(
        "Say what a recipe or a model resolves to, without running it.",
        f"{_HERE}:check_command",
        (
            ("target", "RECIPE|MODEL", "A recipe (.json, .yaml, .yml), or a model as for `evaluate`.", {}),
            ("--verify", "", _VERIFY, {"action": "store_true"}),
            ("--against", "CHECKPOINT", _AGAINST, {}),
        ),
        "olive_ext.cli.options:CHECK_OPTIONS",
    ),
    "schema": Command(
        "Print the JSON schema of an evaluator block, a pass block or a recipe.",
        f"{_HERE}:schema_command",
        (
            (
                "kind",
                "|".join(SCHEMA_KINDS),
                "Which schema; recipe by default.",
                {"nargs": "?", "choices": SCHEMA_KINDS, "default": "recipe"},
            ),
        ),
    ),
}


def commands() -> Mapping[str, Command]:
    """All commands by name: the core's, then those of plug-ins."""
    return entries("commands", CORE)


class _Parser(ArgumentParser):
    """Raises instead of printing the usage and exiting: the caller prints one line."""

    passes_on = False
    """Whether another program reads the arguments that this one does not know."""

    def error(self, message: str) -> NoReturn:
        listed = f": {', '.join(commands())}" if message.endswith("required: COMMAND") else ""
        raise ConfigError(f"{message}{listed} (see '{self.prog} --help')")

    def _check_value(self, action: Any, value: Any) -> None:
        """As argparse's, with the nearest name."""
        if action.choices is not None and value not in action.choices and (hint := suggest(value, action.choices)):
            raise ArgumentError(action, f"invalid choice: {value!r}: {hint}")
        super()._check_value(action, value)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which leaves it to the whole parser to refuse what a command's own parser does not know."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.passes_on:
            words = [*(args or ())]
            place = words.index("--tasks") + 2 if "--tasks" in words else len(words)
            flag, known = unknown[0].partition("=")[0], self._option_string_actions
            key = flag.removeprefix("--").replace("-", "_")
            is_key = self.prog.endswith(" evaluate") and key in EvaluationConfig.model_fields
            hint = f"it is a key: --set {key}=VALUE" if is_key else suggest(flag, known)
            hint = "did you mean --against?" if flag == "--reference" and "--against" in known else hint
            hint = "--tasks takes names with commas between: A,B" if unknown[:1] == words[place : place + 1] else hint
            self.error(": ".join(filter(None, [f"unrecognized arguments: {' '.join(unknown)}", hint])))
        return arguments, unknown


def build_parser() -> _Parser:
    """The parser; `arguments.command` names the command."""
    parser = _Parser(prog="olive-ext", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"olive-ext {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands().items():
        made = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        for names, metavar, text, more in command.arguments:
            named: dict[str, Any] = {"metavar": metavar} if metavar else {}
            made.add_argument(*names.split(), help=text, **named, **more)
        if command.options:
            add_options(made, load(command.options))
        if name == "run":
            made.epilog, made.passes_on = RUN_HELP, True
    return parser


def parse(argv: list[str]) -> Namespace:
    """The arguments; raises `ConfigError`, and SystemExit after a help text. Olive reads those of `run`, too, where a
    recipe that comes first is the value of `--config`."""
    if argv[:1] == ["run"] and argv[1:] and not argv[1].startswith("-"):
        argv = ["run", "--config", *argv[1:]]
    parser = build_parser()
    parser.passes_on = argv[:1] == ["run"]
    arguments: Namespace = parser.parse_known_args(argv, Namespace(passed_on=argv[1:]))[0]
    return arguments
