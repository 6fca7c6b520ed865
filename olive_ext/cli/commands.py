"""The commands of `olive-ext`: a function for each, which makes one configuration, passes it on and prints the result.
Knows no exit status, and of options only their tables."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from olive_ext.cli.exit_status import FAILED, going_on
from olive_ext.cli.options import RECORD_OPTIONS, advised, written_values
from olive_ext.config import RECIPE_SUFFIXES, EvaluationConfig, schema
from olive_ext.errors import ConfigError, OliveExtError, RequirementError, UnwrittenError, combined, printable, reading

Function = Callable[[Namespace], int]

PACKAGE = Path(__file__).resolve().parents[1]
IN_WHEEL, IN_CLONE = PACKAGE / "quickstart", PACKAGE.parent / "recipes" / "quickstart"
CLONE_PREFIX = "recipes/quickstart/"
"""Olive reads a recipe's paths relative to the working directory: a clone's root here, the copy's folder in a copy."""

NOT_COPIED = ("make", "__pycache__", "README.md", "info.yml", "requirements.txt")
"""Parts of the clone's folder that are not part of the recipe. setup.py leaves the same out of the wheel."""


def quickstart_command(arguments: Namespace) -> int:
    """Copies the quickstart and says how to run it."""
    folder = Path(arguments.folder)
    copy_quickstart(folder)
    sys.stdout.write(f"cd {shlex.quote(str(folder))} && olive run --config recipe.json\n")
    return 0


def copy_quickstart(target: Path) -> None:
    """Makes the folder `target`, with the recipe's paths relative to it: all of it or nothing.

    Raises `ConfigError` where `target` exists and is not an empty folder.
    """
    source = next((folder for folder in (IN_WHEEL, IN_CLONE) if (folder / "recipe.json").is_file()), None)
    if source is None:
        raise OliveExtError(f"the quickstart is missing: '{IN_WHEEL}', '{IN_CLONE}'", code="not_found")
    from olive_ext.report.report_files import refuse_filled, whole_folder

    refuse_filled(target, "folder")
    with whole_folder(target) as made:
        shutil.copytree(source, made, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        for recipe in made.glob("*.json"):
            recipe.write_text(recipe.read_text(encoding="utf-8").replace(CLONE_PREFIX, ""), encoding="utf-8")


def evaluate_command(arguments: Namespace) -> int:
    """Evaluates one model and prints the table, even where the disk refuses the report that took hours."""
    if arguments.model.lower().endswith(RECIPE_SUFFIXES):
        raise ConfigError(f"'{arguments.model}' is a recipe: `olive-ext run` runs it")
    config = EvaluationConfig.parse(written_values(arguments, arguments.model)).as_job()
    try:
        with going_on(config.journal and Path(config.journal).parent):
            from olive_ext.report.plain_text import print_table
            from olive_ext.report.report_files import page_of_report
            from olive_ext.report.verdict import EXIT_STATUS, worst_status
            from olive_ext.run import check_complete, evaluate

            report = evaluate(config, progress=True)
    except RequirementError as error:
        report = error.report
    except UnwrittenError as error:
        print_table(error.report, page=page_of_report(error.report), wording=advised)
        raise
    print_table(report, page=page_of_report(report), wording=advised)
    check_complete(report, config.on_error)
    if report.broken:
        return FAILED
    is_unknown = bool(config.bounds and report.unjudged_damage)  # bounds that are kept say nothing of it
    return EXIT_STATUS["unknown"] if is_unknown else worst_status([report.verdict])


def record_command(arguments: Namespace) -> int:
    """Records one model; prints its table, and the path of its records."""
    config = EvaluationConfig.parse(written_values(arguments, arguments.model, RECORD_OPTIONS)).as_job()
    from olive_ext.report.numbers import size
    from olive_ext.report.plain_text import print_table
    from olive_ext.run import check_complete
    from olive_ext.run.evaluation import record

    report, num_bytes = record(config, arguments.output, progress=True)
    print_table(report)
    sys.stdout.write(f"records: {printable(arguments.output)} ({size(num_bytes)})\n")
    check_complete(report, config.on_error)
    return 0


def compare_command(arguments: Namespace) -> int:
    """Prints one table over the reports, and writes the page where a folder for it is named."""
    from olive_ext.report import check_writable
    from olive_ext.report.plain_text import print_page
    from olive_ext.report.report_files import write_page
    from olive_ext.report.verdict import worst_status
    from olive_ext.run import compare

    if arguments.output is not None:
        check_writable(arguments.output, "--output")
    with reading(", ".join(arguments.reports), "report", ConfigError):
        page = compare(arguments.reports, arguments.baseline)
        print_page(page, wording=advised, is_short=arguments.output is not None)
        if arguments.output is not None:
            sys.stdout.write(f"page: {write_page(page, arguments.output)}\n")
    return worst_status(models.verdict for models in page.compared)


def run_command(arguments: Namespace) -> int:
    """Runs Olive with the arguments as given. Mistakes that the recipe's text shows are reported before."""
    from olive_ext.check import mistakes, read_recipe, refuse
    from olive_ext.check.recipe import mapping, named_models
    from olive_ext.model.files.hub import offline_if_unreachable

    recipe, words = dict(read_recipe(arguments.config)), arguments.passed_on
    if any(word.startswith(("-o", "--output_path")) for word in words):  # in place of the recipe's
        recipe.pop("output_dir", None)
    refuse(mistakes(recipe, has_model=arguments.model is None, runs="--list_required_packages" not in words))
    keys = {"cache_dir": ".olive-cache", **recipe, **mapping(recipe.get("engine"))}  # where Olive keeps what it made
    written = {**keys, **mapping(keys.get("cache_config"))}["cache_dir"]
    names = () if arguments.model is not None else named_models(recipe)
    with going_on(str(written[0] if isinstance(written, list) else written)), offline_if_unreachable(names):
        from olive_ext.workflow import cli_run

        try:
            return cli_run(arguments.passed_on)
        except RequirementError as error:
            if error.report is None or error.report.comparison is None:
                raise
            return FAILED  # the verdict, which was printed, says which bound is broken


def check_command(arguments: Namespace) -> int:
    """Prints what a recipe or model resolves to; of one with problems only what holds, and raises them in one error."""
    from olive_ext.check import check
    from olive_ext.report.verdict import EXIT_STATUS

    written = written_values(arguments)
    findings = check(arguments.target, verify=arguments.verify, against=arguments.against, **written)
    if findings.errors:
        findings.sections = [section for section in findings.sections if section.is_measured]
    sys.stdout.write(printable(findings.text()))
    if findings.errors:
        raise combined(findings.errors)
    return EXIT_STATUS[findings.status]


def schema_command(arguments: Namespace) -> int:
    """Prints a JSON schema."""
    sys.stdout.write(json.dumps(schema(arguments.kind), indent=2) + "\n")
    return 0
