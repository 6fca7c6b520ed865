"""The commands of `olive-ext`: their arguments, and a function for each that makes one configuration, passes it on and
prints the result. Knows no exit status, and of options only their tables."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from olive_ext import __version__
from olive_ext.cli.options import BENCH_OPTIONS, OPTIONS, add_options, written_values
from olive_ext.cli.quickstart import copy_quickstart
from olive_ext.config import SCHEMA_KINDS, EvaluationConfig, schema
from olive_ext.config.bench import BenchConfig
from olive_ext.errors import ConfigError, UnwrittenError, printable, understood

if TYPE_CHECKING:
    from olive_ext.report import Report

Command = Callable[[Namespace], int]
RECIPE_SUFFIXES = (".json", ".yaml", ".yml")

ABOUT = "Evaluates ONNX language models, alone or inside Microsoft Olive."
COMMANDS = {
    "quickstart": "Copy the quickstart (recipe, small trained model, tasks) into a new folder, ready to run.",
    "evaluate": "Evaluate one model with lm-eval tasks.",
    "bench": "Measure the speed of one model beside other backends, on the same requests.",
    "compare": "Put earlier reports side by side in one table and one page; refuse what was not asked in the same way.",
    "evalution": "Run Evalution's suites on one model, as its YAML specification says.",
    "run": "Run an Olive recipe: the same arguments as `olive run`; OrtLMEvaluator and OrtLMEvaluation are known.",
    "job": "Write the folder of a job for a recipe: job.yml, code, environment, README. Never submits it.",
    "check": "Say what a recipe or a model resolves to, without running it.",
    "schema": "Print the JSON schema of an evaluator block, a pass block or a recipe.",
}
MODEL_HELP = "An .onnx file, a folder with one or with genai_config.json, or a Hugging Face model."
BENCH_MODEL_HELP = "An .onnx file, or a folder with one or with genai_config.json."
TARGET_HELP = "A recipe (.json, .yaml, .yml), or a model as for `evaluate`."
VERIFY_HELP = "Also run the model: compare the log-probabilities of the scoring-head graph and the untouched graph."
RECIPE_HELP = "The recipe, .json or .yaml."
RUN_MODEL_HELP = "An input model in place of the recipe's."
RUN_HELP = (
    "All other arguments of `olive run` are passed on, for instance -o DIR, --list_required_packages, --tempdir DIR, "
    "--log_level N; `olive run --help` lists them."
)
SCHEMA_HELP = "Which schema; recipe by default."

REPORT_HELP = (
    "Folder with a report.json, the file itself, or a folder of such folders; NAME=PATH gives the report a name. Two "
    "or more, the first being the baseline."
)
BASELINE_HELP = "Name or path of the report that the others are held against; by default the first."
SPEC_HELP = "A YAML specification of Evalution: engine (`type: OrtEngine`, or one of its own), model and tests."
RESULT_HELP = "File for the result, as JSON. Without it stdout gets it; messages and bars go to stderr."
OUTPUT_HELP = "Folder for compare.html. Without it only the table is printed."
JOB_KINDS = ("azureml",)
JOB_KIND_HELP = "Where the job is to run: azureml (a command job of Azure ML, for `az ml job create`)."
JOB_OPTIONS = (
    ("--compute", "compute", "NAME", "Compute cluster, or another target that Azure ML knows by this name."),
    ("--output", "output", "DIR", "A folder that is new or empty."),
)
NODES_HELP = "Nodes of the cluster; more than one form a Ray cluster with a worker on each. By default 1."
FOLDER_HELP = "A folder that is new or empty."
COMPARE_OPTIONS = (("--baseline", "baseline", "REPORT", BASELINE_HELP), ("--output", "output", "DIR", OUTPUT_HELP))


class _Parser(ArgumentParser):
    """Raises instead of printing the usage and exiting: the caller prints one line."""

    passes_on = False
    """Whether another program reads the arguments that this one does not know."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see '{self.prog} --help')")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which has the command's own parser leave it to the whole one to refuse what is unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.passes_on:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f": did you mean '{near[0]}'?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def build_parser() -> _Parser:
    """The parser; `arguments.command` names the command."""
    parser = _Parser(prog="olive-ext", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"olive-ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {
        name: commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in COMMANDS.items()
    }
    made["quickstart"].add_argument("folder", metavar="DIR", help=FOLDER_HELP)
    made["evaluate"].add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_options(made["evaluate"], OPTIONS)
    made["bench"].add_argument("model", metavar="MODEL", help=BENCH_MODEL_HELP)
    add_options(made["bench"], BENCH_OPTIONS)
    made["compare"].add_argument("reports", metavar="REPORT", nargs="+", help=REPORT_HELP)
    for flag, key, metavar, text in COMPARE_OPTIONS:
        made["compare"].add_argument(flag, dest=key, metavar=metavar, help=text)
    made["evalution"].add_argument("spec", metavar="SPEC", help=SPEC_HELP)
    made["evalution"].add_argument("--output", metavar="FILE", help=RESULT_HELP)
    made["run"].epilog = RUN_HELP
    made["run"].passes_on = True
    made["run"].add_argument("--config", "--run-config", metavar="RECIPE", required=True, help=RECIPE_HELP)
    made["run"].add_argument("-m", "--model_name_or_path", dest="model", metavar="MODEL", help=RUN_MODEL_HELP)
    made["job"].add_argument("kind", metavar="|".join(JOB_KINDS), choices=JOB_KINDS, help=JOB_KIND_HELP)
    made["job"].add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    for flag, key, metavar, text in JOB_OPTIONS:
        made["job"].add_argument(flag, dest=key, metavar=metavar, required=True, help=text)
    made["job"].add_argument("--nodes", metavar="N", type=_count, default=1, help=NODES_HELP)
    made["check"].add_argument("target", metavar="RECIPE|MODEL", help=TARGET_HELP)
    made["check"].add_argument("--verify", action="store_true", help=VERIFY_HELP)
    add_options(made["check"], [option for option in OPTIONS if option.for_check])
    made["schema"].add_argument(
        "kind", metavar="|".join(SCHEMA_KINDS), nargs="?", choices=SCHEMA_KINDS, default="recipe", help=SCHEMA_HELP
    )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def parse(argv: list[str]) -> Namespace:
    """The arguments; raises `ConfigError`, and SystemExit behind a help text. Olive reads those of `run`, too."""
    parser = build_parser()
    parser.passes_on = argv[:1] == ["run"]
    arguments: Namespace = parser.parse_known_args(argv, Namespace(passed_on=argv[1:]))[0]
    return arguments


def quickstart_command(arguments: Namespace) -> int:
    """Copies the quickstart and says how to run it."""
    folder = Path(arguments.folder)
    copy_quickstart(folder)
    sys.stdout.write(f"cd {shlex.quote(str(folder))} && olive run --config recipe.json\n")
    return 0


def evaluate_command(arguments: Namespace) -> int:
    """Evaluates one model and prints the table, also where the disk refuses the report: the numbers may have taken
    hours."""
    config = EvaluationConfig.parse(written_values(arguments, arguments.model)).as_job()
    from olive_ext.report import print_table
    from olive_ext.run import check_complete, evaluate

    try:
        report = evaluate(config, progress=True)
    except UnwrittenError as error:
        print_table(cast("Report", error.report))
        raise
    print_table(report)
    check_complete(report, config.on_error)
    return 0


def bench_command(arguments: Namespace) -> int:
    """Measures the backends; a line on stderr for each process that has ended, the table on stdout. 1: one failed."""
    config = BenchConfig.parse({"model": arguments.model, **written_values(arguments, options=BENCH_OPTIONS)})
    from olive_ext.bench import bench
    from olive_ext.bench.tables import print_summary

    summary = bench(config, say=_say)
    print_summary(summary, f"{config.model}: {', '.join(config.tasks)}")
    return int(any(row.error for row in summary.rows))


def _say(line: str) -> None:
    sys.stderr.write(f"olive-ext: {line}\n")
    sys.stderr.flush()


def compare_command(arguments: Namespace) -> int:
    """Prints one table over the reports, and writes the page where a folder for it is named."""
    from olive_ext.report import check_writable, print_page, write_page
    from olive_ext.run import compare

    if arguments.output is not None:
        check_writable(arguments.output, "--output")
    with understood(", ".join(arguments.reports), "report", ConfigError):
        page = compare(arguments.reports, arguments.baseline)
        print_page(page)
        if arguments.output is not None:
            sys.stdout.write(f"{write_page(page, arguments.output)}\n")
    return 0


def evalution_command(arguments: Namespace) -> int:
    """Runs a specification of Evalution and writes its result. Imports Evalution, which is an extra, here only."""
    if not Path(arguments.spec).is_file():
        raise ConfigError(f"'{arguments.spec}': no such file")
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


def run_command(arguments: Namespace) -> int:
    """Runs Olive with the arguments as they were given; what the recipe's text shows to be wrong is told before."""
    from olive_ext.check import mistakes, read_recipe

    if found := list(mistakes(read_recipe(arguments.config), has_model=arguments.model is None)):
        raise ConfigError("; ".join(found))
    from olive_ext.workflow import cli_run

    return cli_run(arguments.passed_on)


def job_command(arguments: Namespace) -> int:
    """Writes a job's folder and says how to submit it."""
    from olive_ext.jobs import make_azureml_job, submit_command

    make_azureml_job(arguments.recipe, arguments.compute, arguments.output, arguments.nodes)
    sys.stdout.write(f"cd {shlex.quote(arguments.output)} && {submit_command(arguments.nodes)}\n")
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
    sys.stdout.write(printable(found.text()))
    if found.problems:
        raise ConfigError("; ".join(found.problems))
    return 0


def schema_command(arguments: Namespace) -> int:
    """Prints a JSON schema."""
    sys.stdout.write(json.dumps(schema(arguments.kind), indent=2) + "\n")
    return 0


COMMAND_FUNCTIONS: dict[str, Command] = {
    "quickstart": quickstart_command,
    "evaluate": evaluate_command,
    "bench": bench_command,
    "compare": compare_command,
    "evalution": evalution_command,
    "run": run_command,
    "job": job_command,
    "check": check_command,
    "schema": schema_command,
}
