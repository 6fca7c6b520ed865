"""The house's two rules about imports: down only, and one door for each foreign framework.

Imports inside functions and under TYPE_CHECKING count. Only the standard library is used, and nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "olive_ext"

# Floor 0 is the lowest. Modules on one floor do not import each other.
FLOORS = [
    ["errors"],
    ["config", "report", "records"],
    ["model", "graph", "stats"],
    ["engine"],
    ["text"],
    ["session"],
    ["backends"],
    ["run"],
    ["workflow", "check"],
    ["bench"],
    ["cli"],
]

# Framework -> the modules that may import it. `backends` are themselves doors to evaluation frameworks.
DOORS = {
    "onnxruntime": [
        "olive_ext.model.providers",
        "olive_ext.model.ort_session",
        "olive_ext.engine.runners.ort.*",
        "olive_ext.engine.reference.kernels",  # binds the rows of logits that runners leave on their devices
        "olive_ext.backends.peer_backends",  # tells the backends we compare with how many threads to use
    ],
    "pynvml": ["olive_ext.model.free_memory"],
    "onnxruntime_genai": ["olive_ext.engine.runners.genai.genai_model", "olive_ext.backends.peer_backends"],
    # runners.hf: a reference in its original form runs on transformers
    "transformers": ["olive_ext.text.tokenizer", "olive_ext.engine.runners.hf.hf_runner", "olive_ext.backends.*"],
    "lm_eval": ["olive_ext.backends.*"],
    "evalution": ["olive_ext.backends.*"],
    "mlflow": ["olive_ext.run.mlflow_log"],
    "jinja2": ["olive_ext.report.html.render", "olive_ext.text.tokenizer", "olive_ext.backends.*"],
    "matplotlib": ["olive_ext.report.html.svg", "olive_ext.bench.picture"],
    "olive": ["olive_ext.workflow", "olive_ext.workflow.*"],
    "onnx": [
        "olive_ext.graph",
        "olive_ext.graph.*",
        "olive_ext.model.decoder_spec",
        "olive_ext.model.attention",
        "olive_ext.model.encoder_spec",
        "olive_ext.model.locate",
        "olive_ext.model.rounding",
    ],
}

FREE = {"__version__"}  # what every floor may take from the package itself


def imports(path: Path, module: str) -> Iterator[str]:
    """Every module or name that the file imports, absolute: `from a.b import c` gives "a.b.c"."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _names(node.func) in ("import_module", "importlib.import_module"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _names(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def floor_of(name: str) -> int | None:
    """The floor of "olive_ext.x.y..."; the package's own `open` and `evaluate` are above everything."""
    part = name.split(".")[1]
    for floor, members in enumerate(FLOORS):
        if part in members:
            return floor
    return None


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package.parent).with_suffix("").parts)
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name in imports(path, module):
            found += [
                f"{module} imports {name}: {why}" for why in [upward(module, name), second_door(module, name)] if why
            ]
    return found


def upward(module: str, name: str) -> str:
    if name.split(".")[0] != "olive_ext" or module == "olive_ext" or name == "olive_ext":
        return ""
    inside, target = floor_of(module), floor_of(name)
    if inside is None:
        return "the importing module stands on no floor"
    if target is None:
        return "" if name.split(".")[1] in FREE else "what it imports stands on no floor"
    if target > inside:
        return f"floor {inside} may not import floor {target}"
    if target == inside and module.split(".")[1] != name.split(".")[1]:
        return f"modules on floor {inside} do not import each other"
    return ""


def second_door(module: str, name: str) -> str:
    doors = DOORS.get(name.split(".")[0])
    if doors is None or any(fnmatch(module, door) for door in doors):
        return ""
    return f"only {', '.join(doors)} may"


def plant(folder: Path, module: str, text: str) -> Path:
    """A package that holds one file."""
    path = folder / "olive_ext" / module
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return folder / "olive_ext"


def test_package_has_no_upward_import_and_no_second_door() -> None:
    assert violations(PACKAGE) == []


def test_every_module_stands_on_a_floor() -> None:
    standing = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert standing - {"__init__"} <= {name for members in FLOORS for name in members}


def test_upward_import_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "engine/planted.py", "from olive_ext.session import Session\n")
    assert violations(package) == [
        "olive_ext.engine.planted imports olive_ext.session.Session: floor 3 may not import floor 5"
    ]


def test_upward_import_is_found_in_a_function_and_under_type_checking(tmp_path: Path) -> None:
    text = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import olive_ext.cli\n"
        "def f():\n    from ..backends import lm_eval\n"
        "def g():\n    importlib.import_module('olive_ext.workflow')\n"
    )
    package = plant(tmp_path, "model/planted.py", text)
    found = {line.split(":")[0] for line in violations(package)}
    assert found == {
        "olive_ext.model.planted imports olive_ext.cli",
        "olive_ext.model.planted imports olive_ext.backends.lm_eval",
        "olive_ext.model.planted imports olive_ext.workflow",
    }


def test_import_between_modules_of_one_floor_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "graph/planted.py", "from olive_ext.model.types import DecoderSpec\n")
    assert "do not import each other" in violations(package)[0]


def test_public_names_of_the_package_count_as_upward(tmp_path: Path) -> None:
    package = plant(tmp_path, "text/planted.py", "from olive_ext import __version__, open\n")
    assert [line.split(":")[0] for line in violations(package)] == ["olive_ext.text.planted imports olive_ext.open"]


def test_second_door_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "session.py", "def f():\n    import onnxruntime as ort\n")
    assert violations(package)[0].startswith("olive_ext.session imports onnxruntime: only ")


def test_door_may_import_its_framework(tmp_path: Path) -> None:
    package = plant(tmp_path, "workflow/evaluator.py", "from olive.evaluator.registry import Registry\n")
    assert violations(package) == []


def test_module_on_no_floor_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "helpers.py", "from olive_ext.errors import OliveExtError\n")
    assert violations(package) == [
        "olive_ext.helpers imports olive_ext.errors.OliveExtError: the importing module stands on no floor"
    ]
