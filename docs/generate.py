"""Writes the tables of docs/reference from the package itself: configuration, command line, providers, `OrtLM`.

python docs/generate.py            write the files
python docs/generate.py --check    write nothing; exit 1 and name the files that are stale
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402

from docs import decoders  # noqa: E402
from olive_ext.backends.lm_eval.arguments import OrtLMArguments  # noqa: E402
from olive_ext.cli.options import SET_HELP, Option  # noqa: E402
from olive_ext.cli.parser import ABOUT, RUN_HELP, commands  # noqa: E402
from olive_ext.config import (  # noqa: E402
    EVALUATOR_TYPE,
    PASS_TYPE,
    Bound,
    EngineConfig,
    EvaluationSettings,
    ExecutionSettings,
    ModelConfig,
    OpenSettings,
    ReferenceConfig,
    WorkflowSettings,
    accepts,
)
from olive_ext.errors import CODES  # noqa: E402
from olive_ext.model.providers.table import TABLE  # noqa: E402
from olive_ext.plugins.diagnose.settings import LocationSettings, MendingSettings  # noqa: E402
from olive_ext.plugins.speech.settings import MetricSettings  # noqa: E402
from olive_ext.registry import Command, load  # noqa: E402
from olive_ext.report.verdict import EXIT_STATUS  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
BY_HAND = REFERENCE / "python.md"
NOTE = "<!-- Made by docs/generate.py; do not edit. -->"
EDITORS = f"""## In an editor

`olive-ext schema recipe` writes a JSON schema by which editors complete and check recipes; the site has it at
`docs/reference/schema-recipe.json`. Do not put a `$schema` key into a recipe: Olive refuses it. Name the schema in the
editor instead.

```sh
mkdir -p .vscode
olive-ext schema recipe > .vscode/recipe.schema.json
```

JSON recipes, VS Code's `.vscode/settings.json`:

```json
{{
  "json.schemas": [
    {{"fileMatch": ["**/recipes/**/*.json"], "url": "./.vscode/recipe.schema.json"}}
  ]
}}
```

YAML recipes (YAML extension), the recipe's first line, the path taken from the recipe's own folder:

```yaml
# yaml-language-server: $schema=../../.vscode/recipe.schema.json
```

Only `{EVALUATOR_TYPE}` and `{PASS_TYPE}` blocks are checked; everything else in a recipe is Olive's and left open."""


def documents() -> dict[Path, str]:
    """Every generated file and its text."""
    pages = {"cli.md": cli(), "config.md": config(), "ort_lm.md": ort_lm(), "providers.md": providers()}
    rows = json.loads(decoders.ROWS.read_text(encoding="utf-8"))
    return {**{REFERENCE / name: text for name, text in pages.items()}, decoders.PAGE: decoders.render(rows)}


def providers() -> str:
    """The execution providers, one row for each."""
    rows = []
    for row in TABLE:
        names = ", ".join(f"`{name}`" for name in (row.short, *row.aliases))
        defaults = ", ".join(f"`{key}={value}`" for key, value in row.defaults.items())
        rows.append((names, f"`{row.name}`", row.device, defaults, "yes" if row.plans_shapes else ""))
    return _page(
        "Execution providers",
        "Names that `execution_provider` and `--provider` take beside ONNX Runtime's own, where tensors live, default "
        "options, and whether they plan or compile for every shape that they meet (`engine.shapes`). What a provider "
        "cannot do with a model, `olive-ext check` says. A plugin library is registered by `provider_libraries`; a "
        "provider of it that has no row here goes by the exact name that its devices have.",
        _table(("name", "ONNX Runtime's name", "device", "default options", "plans for shapes"), rows),
    )


def config() -> str:
    """The configuration, a table for each model."""
    return _page(
        "Configuration",
        f"Keys of the evaluator `{EVALUATOR_TYPE}`, of the pass `{PASS_TYPE}`, and of `olive_ext.evaluate`. Unknown "
        "keys are refused by name. The command line reaches each of them with `--set KEY=VALUE`.",
        "## Settings",
        _config_table(EvaluationSettings),
        "## `engine`",
        _config_table(EngineConfig),
        "## `reference`",
        _config_table(ReferenceConfig),
        "## In a recipe",
        "Keys of the evaluator and of the pass beside the settings above.",
        _config_table(WorkflowSettings, without=EvaluationSettings),
        "## `require`",
        _config_table(Bound),
        "## `OrtEvaluator`",
        "Keys of the evaluator of Olive's own metrics beside those of how a model is run, which are those above.",
        _config_table(MetricSettings, without=ExecutionSettings),
        "## `OrtLossMap` and `olive_ext.locate`",
        "Keys that differ from those of an evaluation.",
        _config_table(LocationSettings, without=ExecutionSettings),
        "## `OrtMending` and `olive_ext.mend`",
        "Keys beside those of a loss map.",
        _config_table(MendingSettings, without=LocationSettings),
        "## `model`",
        "On the command line and from Python only; in a recipe the model comes from Olive.",
        _config_table(ModelConfig),
        EDITORS,
    )


def ort_lm() -> str:
    """The arguments of `OrtLM`, those of lm-eval's requests and those of opening a model apart."""
    return _page(
        "Arguments of OrtLM",
        "Keyword arguments of `olive_ext.backends.lm_eval.OrtLM`, and keys of `model_args` in a recipe or from Python. "
        "An unknown one is an error. [I live in lm-eval](../start/lm_eval.md) shows them in use.",
        "## How requests are answered",
        _config_table(OrtLMArguments, without=OpenSettings),
        "## How the model is opened",
        "As in the [configuration](config.md#settings).",
        _config_table(OpenSettings),
    )


def _config_table(model: type[BaseModel], without: type[BaseModel] | None = None) -> str:
    rows = []
    for name, field in model.model_fields.items():
        if without is not None and name in without.model_fields:
            continue
        default = "required" if field.is_required() else f"`{_default(field.get_default(call_default_factory=True))}`"
        rows.append((f"`{name}`", accepts(field), default, field.description or ""))
    return _table(("key", "accepts", "default", "meaning"), rows)


def _default(value: object) -> str:
    return "{}" if isinstance(value, BaseModel) else json.dumps(value)


def cli() -> str:
    """The command line, a table for each command."""
    return _page(
        "Command line",
        f"{ABOUT} Progress is a bar on a terminal, else a line a minute on stderr.",
        "| exit status | of every command |\n| --: | --- |\n"
        f"| {EXIT_STATUS['ok']} | done; of a comparison: no loss, or a small one |\n"
        f"| {EXIT_STATUS['loss']} | a loss, a bound (`require`, `--within`) that is not kept, requests without an "
        "answer, or any other failure (`OLIVE_EXT_DEBUG=1` shows the traceback) |\n"
        "| 2 | a mistake in what was given: one line on stderr names it |\n"
        f"| {EXIT_STATUS['unknown']} | a comparison that decides nothing: the last lines say what would decide |\n"
        "| 130, 143 | Ctrl-C, SIGTERM |\n\n"
        "`olive run` itself ends with 0 on a loss, because Olive has no status for it: use `olive-ext run`, or a bound "
        "in `require`.",
        "From Python every mistake is an `olive_ext.errors.OliveExtError` with a `code`, the `field` that is wrong (a "
        "key or an option) and its `value`. Codes are stable, sentences are not.",
        _table(["code", "what is wrong"], ((f"`{code}`", meaning) for code, meaning in CODES.items())),
        *(
            part
            for name, command in commands().items()
            for part in (f"## `olive-ext {name}`", _arguments(name, command))
        ),
    )


def _arguments(name: str, command: Command) -> str:
    """What a command does, and a table of its arguments; options with their keys."""
    rows = [(_called(*argument), text) for *argument, text, _ in command.arguments]
    if command.options:
        return f"{command.help}\n\n{_option_table(rows, load(command.options))}"
    rows += [("ARGUMENT ...", RUN_HELP)] if name == "run" else []
    return f"{command.help}\n\n{_table(('argument', 'meaning'), [(f'`{name}`', text) for name, text in rows])}"


def _called(names: str, metavar: str) -> str:
    """An argument as it is written: by its place, or behind the first of its names."""
    several = " ..." if names == "reports" else ""
    return f"{names.split()[0]} {metavar}".strip() if names.startswith("-") else f"{metavar}{several}"


def _option_table(first: Iterable[tuple[str, str]], options: Sequence[Option], *, has_set: bool = True) -> str:
    rows = [(f"`{name}`", "", text) for name, text in first]
    rows += [(f"`{_usage(option)}`", f"`{option.key}`", option.help) for option in options]
    rows += [("`--set KEY=VALUE`, repeated", "any", SET_HELP)] if has_set else []
    return _table(("argument", "key", "meaning"), rows)


def _usage(option: Option) -> str:
    forms = {
        "names": f"{option.metavar} ...",
        "pairs": f"{option.metavar}",
        "optional": f"[{option.metavar}]",
        "flag": "",
    }
    return f"{option.flag} {forms.get(option.form, option.metavar)}".strip()


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTE, *parts]) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(argv: Sequence[str]) -> int:
    """Writes the files, or with --check compares them."""
    made = documents()
    if "--check" not in argv:
        REFERENCE.mkdir(parents=True, exist_ok=True)
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        return 0
    unknown = {path for path in REFERENCE.iterdir() if path not in made and path != BY_HAND}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in sorted([*stale, *unknown]):
        print(f"{path.relative_to(ROOT)} is stale: run python docs/generate.py", file=sys.stderr)
    return 1 if stale or unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
