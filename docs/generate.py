"""Writes docs/reference from the package itself: configuration tables, command line, JSON schemas.

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

from olive_ext.cli.commands import (  # noqa: E402
    ABOUT,
    BENCH_MODEL_HELP,
    COMMANDS,
    COMPARE_OPTIONS,
    FOLDER_HELP,
    JOB_KIND_HELP,
    JOB_OPTIONS,
    MODEL_HELP,
    NODES_HELP,
    RECIPE_HELP,
    REPORT_HELP,
    RESULT_HELP,
    RUN_HELP,
    RUN_MODEL_HELP,
    SCHEMA_HELP,
    SPEC_HELP,
    TARGET_HELP,
    VERIFY_HELP,
)
from olive_ext.cli.options import BENCH_OPTIONS, OPTIONS, SET_HELP, Option  # noqa: E402
from olive_ext.config import (  # noqa: E402
    EVALUATOR_TYPE,
    PASS_TYPE,
    SCHEMA_KINDS,
    Bound,
    EngineConfig,
    EvaluationSettings,
    ModelConfig,
    ReferenceConfig,
    WorkflowSettings,
    accepts,
    schema,
)
from olive_ext.model.provider_table import NOT_RUN, TABLE  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Made by docs/generate.py; do not edit. -->"
EDITORS = f"""## In an editor

The schemas beside this page complete and check recipes. Do not put a `$schema` key into a recipe: Olive refuses it.
Name the schema in the editor instead.

JSON recipes, VS Code's `settings.json`:

```json
{{
  "json.schemas": [
    {{"fileMatch": ["**/recipes/**/*.json"], "url": "./docs/reference/schema-recipe.json"}}
  ]
}}
```

YAML recipes (YAML extension), the recipe's first line, the path taken from the recipe's own folder:

```yaml
# yaml-language-server: $schema=../../docs/reference/schema-recipe.json
```

`olive-ext schema recipe > recipe.schema.json` writes the same schema where there is no clone. Only `{EVALUATOR_TYPE}`
and `{PASS_TYPE}` blocks are checked; everything else in a recipe is Olive's and left open."""


def documents() -> dict[Path, str]:
    """Every generated file and its text."""
    schemas = {
        REFERENCE / f"schema-{kind}.json": json.dumps(schema(kind), indent=2, ensure_ascii=False) + "\n"
        for kind in SCHEMA_KINDS
    }
    pages = {"cli.md": cli(), "config.md": config(), "providers.md": providers()}
    return {**{REFERENCE / name: text for name, text in pages.items()}, **schemas}


def providers() -> str:
    """The execution providers, one row for each."""
    rows = []
    for row in TABLE:
        names = ", ".join(f"`{name}`" for name in (row.short, *row.aliases))
        defaults = ", ".join(f"`{key}={value}`" for key, value in row.defaults.items())
        rows.append(
            (names, f"`{row.name}`", row.device, defaults, "yes" if row.plans_shapes else "", row.known or NOT_RUN)
        )
    return _page(
        "Execution providers",
        "Names that `execution_provider` and `--provider` take beside ONNX Runtime's own, where tensors live, default "
        "options, whether they plan or compile for every shape that they meet (`engine.shapes`), and what is known not "
        "to work. Plugin libraries are named in `provider_libraries`.",
        _table(
            ("name", "ONNX Runtime's name", "device", "default options", "plans for shapes", "known not to work"), rows
        ),
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
        "## `model`",
        "On the command line and from Python only; in a recipe the model comes from Olive.",
        _config_table(ModelConfig),
        EDITORS,
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
        f"{ABOUT} Exit status: 0; 2 for a user's error, with one line on stderr that names it; 130 after Ctrl-C; 1 for "
        "any other failure (`OLIVE_EXT_DEBUG=1` shows the traceback). Progress is a bar on a terminal, else a "
        "line a minute on stderr.",
        "## `olive-ext quickstart DIR`",
        COMMANDS["quickstart"],
        _table(("argument", "meaning"), [("`DIR`", FOLDER_HELP)]),
        "## `olive-ext evaluate MODEL --tasks A,B [OPTION ...]`",
        COMMANDS["evaluate"],
        _option_table([("MODEL", MODEL_HELP)], OPTIONS),
        "## `olive-ext bench MODEL --tasks A,B --output DIR [OPTION ...]`",
        COMMANDS["bench"],
        _option_table([("MODEL", BENCH_MODEL_HELP)], BENCH_OPTIONS),
        "## `olive-ext compare REPORT REPORT ... [OPTION ...]`",
        COMMANDS["compare"],
        _table(
            ("argument", "meaning"),
            [
                ("`REPORT ...`", REPORT_HELP),
                *((f"`{flag} {metavar}`", text) for flag, _, metavar, text in COMPARE_OPTIONS),
            ],
        ),
        "## `olive-ext evalution SPEC [--output FILE]`",
        COMMANDS["evalution"],
        _table(("argument", "meaning"), [("`SPEC`", SPEC_HELP), ("`--output FILE`", RESULT_HELP)]),
        "## `olive-ext run --config RECIPE ...`",
        COMMANDS["run"],
        _table(
            ("argument", "meaning"),
            [("`--config RECIPE`", RECIPE_HELP), ("`-m MODEL`", RUN_MODEL_HELP), ("`ARGUMENT ...`", RUN_HELP)],
        ),
        "## `olive-ext job azureml RECIPE --compute NAME --output DIR [--nodes N]`",
        COMMANDS["job"],
        _table(
            ("argument", "meaning"),
            [
                ("`azureml`", JOB_KIND_HELP),
                ("`RECIPE`", RECIPE_HELP),
                *((f"`{flag} {metavar}`", text) for flag, _, metavar, text in JOB_OPTIONS),
                ("`--nodes N`", NODES_HELP),
            ],
        ),
        "## `olive-ext check RECIPE|MODEL [OPTION ...]`",
        COMMANDS["check"],
        _option_table(
            [("RECIPE|MODEL", TARGET_HELP), ("--verify", VERIFY_HELP)], [item for item in OPTIONS if item.for_check]
        ),
        f"## `olive-ext schema [{'|'.join(SCHEMA_KINDS)}]`",
        f"{COMMANDS['schema']} {SCHEMA_HELP}",
    )


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
    unknown = {path for path in REFERENCE.iterdir() if path not in made}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in sorted([*stale, *unknown]):
        print(f"{path.relative_to(ROOT)} is stale: run python docs/generate.py", file=sys.stderr)
    return 1 if stale or unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
