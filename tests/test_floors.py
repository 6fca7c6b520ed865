"""The house's two rules about imports: down only, between rooms as between floors, and one door for each framework.

Imports inside functions and under TYPE_CHECKING count. Only the standard library is used, and nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "olive_ext"

# Package -> its floors, the lowest first. Members of one floor do not import each other; each (a module or a room)
# imports within itself as it likes. Where two members hold a module, the longer name counts.
FLOORS = {
    package: [floor.split() for floor in floors.split("<")]
    for package, floors in {
        "olive_ext": (
            "errors package_versions python_processes < registry < config report records graph < model stats < media < "
            "engine < session < backends < run < check.recipe < workflow < check < cli < plugins"
        ),
        "olive_ext.plugins": "cluster code diagnose gate jobs mlflow speech suites",
        "olive_ext.model": "types providers.table < spec < files < providers < decisions < runtimes < resolve",
        "olive_ext.model.files": (
            "package_config < content grids hub < constants < node_numbers < damage < model_package < locate"
        ),
        "olive_ext.model.providers": "devices table < resolution < compiled < ort_session < bindings",
        "olive_ext.session": (
            "tokenizer requests < generation_bounds tokenizer_fit < placeholders < conversion < answer_journal < "
            "session < local < workers < opening"
        ),
        "olive_ext.session.workers": "worker < crew",
        "olive_ext.engine": (
            "requests < step < scheduling.sequences scheduling.blocks < scheduling.prefix_tree < "
            "runners.runner < forms.kv_store runners.trials < runners.ort.inputs < forms "
            "< scheduling runners < runtimes reference < engine"
        ),
        "olive_ext.engine.forms": (
            "kv_store < buckets paged_attention < rows attention_trial < tree packed returned < registry"
        ),
        "olive_ext.media": "items pictures processors < graphs < processor encoder source_encoder",
        "olive_ext.engine.runners": "runner < trials < ort genai_runner hf_runner",
        "olive_ext.engine.runners.ort": "inputs < ort_runner < opening",
    }.items()
}

# Framework -> the modules that may import it. `backends` are themselves doors to evaluation frameworks.
DOORS = {
    framework: [f"olive_ext.{door}" for door in doors.split()]
    for framework, doors in {
        # engine.reference binds rows of logits, places and remedy run parts of graphs and ONNX Runtime's quantizer
        "onnxruntime": (
            "model.providers.resolution model.providers.ort_session model.providers.bindings engine.forms.* "
            "engine.runners.ort.* media.encoder media.graphs media.source_encoder media.items "
            "engine.reference plugins.speech.transducer plugins.diagnose.places.place "
            "plugins.diagnose.remedy.weights"
        ),
        "onnxruntime_genai": "engine.runners.genai_runner",
        # hf_runner runs references in their own form
        "transformers": "session.tokenizer model.files.* media.processors engine.runners.hf_runner backends.*",
        "PIL": "media.pictures",
        "lm_eval": "backends.* plugins.suites.*",
        "evalution": "plugins.suites.*",
        "mteb": "plugins.suites.mteb.*",
        "lmms_eval": "plugins.suites.*",
        "ray": "plugins.cluster.ray_worker",
        "mlflow": "plugins.mlflow.mlflow_log",
        "jinja2": "report.html.render session.tokenizer backends.*",
        "matplotlib": "",
        "olive": "workflow workflow.* plugins.*.passes plugins.speech.*",
        "onnx": (
            "engine.forms.paged_attention engine.forms.attention_trial engine.forms.tree "
            "engine.runners.ort.opening graph graph.* plugins.diagnose.remedy.* plugins.diagnose.places.* "
            "model.spec.decoder_spec model.spec.attention model.spec.encoder_spec model.files.content "
            "model.files.constants model.files.damage model.files.grids model.files.node_numbers model.spec.media_spec "
            "model.spec.step_choices"
        ),
    }.items()
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


def place_of(name: str, package: str) -> tuple[int, str] | None:
    """The floor of "olive_ext.x.y..." in a package that holds it, and that floor's member. The package's own names,
    such as `olive_ext.open`, are above everything and stand nowhere."""
    inside = name.removeprefix(f"{package}.") + "."
    places = [(floor, member) for floor, members in enumerate(FLOORS[package]) for member in members]
    found = [place for place in places if inside.startswith(f"{place[1]}.")]
    return max(found, key=lambda place: len(place[1]), default=None)


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
    if name.split(".")[0] != "olive_ext" or "olive_ext" in (module, name):
        return ""
    if name.removeprefix("olive_ext.") in FREE:
        return ""
    packages = [package for package in FLOORS if all(one.startswith(f"{package}.") for one in (module, name))]
    return next((why for package in packages if (why := upward_in(package, module, name))), "")


def upward_in(package: str, module: str, name: str) -> str:
    """Why `module` may not import `name`, by the floors of a package that holds both."""
    importing, imported = place_of(module, package), place_of(name, package)
    if importing is None:
        return "the importing module stands on no floor"
    if imported is None:
        return "what it imports stands on no floor"
    where = "" if package == "olive_ext" else f" of {package}"
    if imported[0] > importing[0]:
        return f"floor {importing[0]} may not import floor {imported[0]}{where}"
    if imported[0] == importing[0] and imported[1] != importing[1]:
        return f"modules on floor {imported[0]}{where} do not import each other"
    return ""


def second_door(module: str, name: str) -> str:
    doors = DOORS.get(name.split(".")[0])
    if doors is None or any(fnmatch(module, door) for door in doors):
        return ""
    return f"only {', '.join(doors)} may"


def test_package_has_no_upward_import_and_no_second_door() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize("package", FLOORS)
def test_every_module_stands_on_a_floor(package: str) -> None:
    folder = PACKAGE.parent.joinpath(*package.split("."))
    standing = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    members = {name for members in FLOORS[package] for name in members if "." not in name}
    assert standing - {"__init__"} == members


IN_FUNCTIONS = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import olive_ext.cli
def f():
    from ..backends import lm_eval
def g():
    importlib.import_module('olive_ext.workflow')
"""
RUNNERS, ENGINE = "olive_ext.engine.runners", "of olive_ext.engine"


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("engine/step", "from olive_ext.engine.engine import Engine", [f"floor 1 may not import floor 10 {ENGINE}"]),
        ("engine/runners/ort/planted", "from olive_ext.engine.scheduling.slots import Slots", [f"floor 8 {ENGINE}"]),
        ("engine/scheduling/planted", f"from {RUNNERS}.hf_runner import HfRunner", ["do not import each other"]),
        ("engine/scheduling/planted", "from onnxruntime import InferenceSession", ["only olive_ext.model.providers"]),
        ("model/planted", IN_FUNCTIONS, ["olive_ext.cli", "olive_ext.backends.lm_eval", "olive_ext.workflow"]),
        ("cli/planted", "importlib.import_module('olive_ext.plugins.jobs')", ["floor"]),
        ("plugins/gate/planted", "from olive_ext.plugins.jobs.azureml import portable", ["do not import each other"]),
        ("session/planted", "from olive_ext import __version__, open", ["imports olive_ext.open"]),
        ("helpers", "from olive_ext.errors import OliveExtError", ["the importing module stands on no floor"]),
        ("workflow/evaluator", "from olive.evaluator.registry import Registry", []),  # the framework's door
        ("engine/scheduling/planted", f"from {RUNNERS}.runner import Traits", []),
    ],
)
def test_planted_import_is_found(tmp_path: Path, module: str, text: str, found: list[str]) -> None:
    path = tmp_path / "olive_ext" / f"{module}.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"{text}\n", encoding="utf-8")
    for why, line in zip(found, violations(tmp_path / "olive_ext"), strict=True):
        assert why in line


def test_tests_of_the_core_need_no_plugin() -> None:
    folder, of_plugins = PACKAGE.parent / "tests", ("olive_ext.plugins.", "tests.plugins.")
    for path in folder.rglob("*.py"):
        if not path.is_relative_to(folder / "plugins") and "plugins" in path.read_text(encoding="utf-8"):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            assert [name for name in imports(path, module) if name.startswith(of_plugins)] == [], module
