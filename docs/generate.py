"""Writes from the package itself docs/reference, configuration (with `OrtLM` and providers) and command line, and
olive_ext/functions.pyi.

python docs/generate.py            write the files
python docs/generate.py --check    write nothing; exit 1 and name the files that are stale
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402

from docs import decoders, stubs  # noqa: E402
from olive_ext.backends.lm_eval.arguments import OrtLMArguments  # noqa: E402
from olive_ext.cli.options import ABOUT, RUN_HELP, SET_HELP, Option, commands  # noqa: E402
from olive_ext.config import (  # noqa: E402
    EVALUATOR_TYPE,
    PASS_TYPE,
    Bound,
    EngineConfig,
    EvaluationConfig,
    EvaluationSettings,
    ExecutionSettings,
    ModelConfig,
    ReferenceConfig,
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
EDITORS = """## In an editor

`olive-ext schema recipe` writes a JSON schema by which editors complete and check recipes; the site has it at
`docs/reference/schema-recipe.json`. Do not put a `$schema` key into a recipe: Olive refuses it. Name the schema in the
editor instead.

```sh
mkdir -p .vscode
olive-ext schema recipe > .vscode/recipe.schema.json
```

JSON recipes, VS Code's `.vscode/settings.json`:

```json
{
  "json.schemas": [
    {"fileMatch": ["**/recipes/**/*.json"], "url": "./.vscode/recipe.schema.json"}
  ]
}
```

YAML recipes (YAML extension), the recipe's first line, the path taken from the recipe's own folder:

```yaml
# yaml-language-server: $schema=../../.vscode/recipe.schema.json
```

Only evaluators and passes of this package are checked; everything else in a recipe is Olive's and left open."""


def documents() -> dict[Path, str]:
    """Every generated file and its text."""
    pages = {"cli.md": cli(), "config.md": config()}
    rows = json.loads(decoders.ROWS.read_text(encoding="utf-8"))
    others = {decoders.PAGE: decoders.render(rows), ROOT / "olive_ext" / "functions.pyi": stubs.functions()}
    return {**{REFERENCE / name: text for name, text in pages.items()}, **others}


def providers() -> list[str]:
    """The execution providers, one row for each."""
    rows = []
    for row in TABLE:
        names = ", ".join(f"`{name}`" for name in (row.short, *row.aliases))
        defaults = ", ".join(f"`{key}={value}`" for key, value in row.defaults.items())
        rows.append((names, f"`{row.name}`", row.device, defaults, "yes" if row.plans_shapes else ""))
    return [
        "## Execution providers",
        "Names that `execution_provider` takes beside ONNX Runtime's own, where tensors live, default options, and "
        "whether steps have few shapes (`engine.shapes`). A provider of a plugin library (`provider_libraries`) with "
        "no row has the exact name of its devices. `olive-ext check MODEL --provider NAME` says what it cannot do.",
        _table(("name", "ONNX Runtime's name", "device", "default options", "few shapes"), rows),
    ]


def config() -> str:
    """The configuration, a table for each model; a key is described once."""
    return _page(
        "Configuration",
        f"Keys of the evaluator `{EVALUATOR_TYPE}`, of the pass `{PASS_TYPE}`, and of `olive_ext.evaluate`. Unknown "
        "keys are refused by name. The command line takes each of them as `--set KEY=VALUE`.",
        "## Settings",
        *_config_table(EvaluationConfig),
        "## `engine`",
        *_config_table(EngineConfig),
        "## `model`",
        "On the command line and from Python only; in a recipe the model comes from Olive.",
        *_config_table(ModelConfig),
        "## `reference`",
        *_config_table(ReferenceConfig, described=(ModelConfig,)),
        "## `require`",
        *_config_table(Bound),
        "## `OrtEvaluator`",
        "The evaluator of Olive's own metrics takes the keys of how a model is run, and these.",
        *_config_table(MetricSettings, without=ExecutionSettings, described=(EvaluationSettings,)),
        "## `OrtLossMap` and `olive_ext.locate`",
        *_config_table(LocationSettings, without=ExecutionSettings, described=(EvaluationSettings,)),
        "## `OrtMending` and `olive_ext.mend`",
        "Keys beside those of a loss map.",
        *_config_table(MendingSettings, without=LocationSettings),
        "## Arguments of OrtLM",
        "Keywords of `olive_ext.backends.lm_eval.OrtLM`, and keys of `model_args`. An unknown one is an error.",
        *_config_table(OrtLMArguments, described=(EvaluationSettings, ModelConfig)),
        *providers(),
        EDITORS,
    )


_FIRST = {"model": 0, "tasks": 1, "reference": 2}
"""Keys that stand first in a table."""


def _config_table(
    model: type[BaseModel], without: type[BaseModel] | None = None, described: Sequence[type[BaseModel]] = ()
) -> list[str]:
    """The keys of `model` but for those of `without`; those that another table describes in the same words by name."""
    rows, same = [], []
    for name, field in sorted(model.model_fields.items(), key=lambda item: _FIRST.get(item[0], len(_FIRST))):
        if without is not None and name in without.model_fields:
            continue
        others = [other.model_fields[name] for other in described if name in other.model_fields]
        if any(other.description == field.description and other.default == field.default for other in others):
            same.append(f"`{name}`")
            continue
        default = "required" if field.is_required() else f"`{_default(field.get_default(call_default_factory=True))}`"
        rows.append((f"`{name}`", accepts(field), default, field.description or ""))
    return [
        _table(("key", "accepts", "default", "meaning"), rows),
        *([f"As above: {', '.join(same)}."] if same else []),
    ]


def _default(value: object) -> str:
    return "{}" if isinstance(value, BaseModel) else json.dumps(value)


def cli() -> str:
    """The command line, a table for each command."""
    shared = _shared()
    return _page(
        "Command line",
        f"{ABOUT} Progress is a bar on a terminal, else a line a minute on stderr.",
        "| exit status | of every command |\n| --: | --- |\n"
        f"| {EXIT_STATUS['ok']} | done; of a comparison: no loss, or a small one |\n"
        f"| {EXIT_STATUS['loss']} | a loss, a bound (`require`, `--within`) that is not kept, requests without an "
        "answer, or a failure that nobody foresaw (`OLIVE_EXT_DEBUG=1` shows the traceback) |\n"
        "| 2 | what was given cannot be done (a mistake, a damaged model, too little memory or disk): one line on "
        "stderr names it |\n"
        f"| {EXIT_STATUS['unknown']} | an undecided comparison, or damage beside kept bounds: see the last lines |\n"
        "| 130, 143 | Ctrl-C, SIGTERM |\n\n"
        "`mend`, and `olive-ext run` without `fail_on_loss`, end with 0 where nothing is decided: the model is made. "
        "`olive run` itself ends with 0 on a loss, too, because Olive has no status for it: use a bound.",
        "From Python a mistake is an `olive_ext.errors.OliveExtError` with a `code`, and with `field` (a key or an "
        "option) and `value` where one is wrong. Codes are stable, sentences are not.",
        _table(["code", "what is wrong"], ((f"`{code}`", meaning) for code, meaning in CODES.items())),
        *(
            part
            for name, command in commands().items()
            for part in (f"## `olive-ext {name}`", _arguments(name, command, shared))
        ),
        "## Shared options",
        "Each sets a key of the [configuration](config.md), which says more.",
        _table(("option", "key", "meaning"), [*shared, ("`--set KEY=VALUE`, repeated", "any", SET_HELP)]),
    )


def _arguments(name: str, command: Command, shared: Sequence[tuple[str, str, str]]) -> str:
    """What a command does, a table of its arguments, and the options that it shares with other commands."""
    rows = [(f"`{_called(*argument)}`", "", _first(text)) for *argument, text, _ in command.arguments]
    rows += [("`ARGUMENT ...`", "", RUN_HELP)] if name == "run" else []
    options: Sequence[Option] = load(command.options) if command.options else ()
    rows += [row for option in options if (row := _row(option)) not in shared]
    table = _table(("argument", "key", "meaning"), rows)
    also = [f"`{option.flag}`" for option in options if _row(option) in shared]
    return "\n\n".join([command.help, table, *([f"Shared options: {', '.join(also)}, `--set`."] if options else [])])


def _shared() -> list[tuple[str, str, str]]:
    """Rows of options that several commands have in the same words."""
    rows = [_row(option) for command in commands().values() if command.options for option in load(command.options)]
    return [row for row in dict.fromkeys(rows) if rows.count(row) > 1]


def _row(option: Option) -> tuple[str, str, str]:
    return f"`{_usage(option)}`", f"`{option.key}`", _first(option.help)


def _first(text: str) -> str:
    """The first sentence; what follows stands in the configuration."""
    return re.split(r"(?<=[a-z\])`\"])\. (?=[A-Z\"`])", " ".join(text.split()))[0].rstrip(".") + "."


def _called(names: str, metavar: str) -> str:
    """An argument as it is written: by its place, or after the first of its names."""
    several = " ..." if names == "reports" else ""
    return f"{names.split()[0]} {metavar}".strip() if names.startswith("-") else f"{metavar}{several}"


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
