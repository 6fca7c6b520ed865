"""Free-form options of Olive's passes, and a recipe's keys at the top, held against what the installed packages read.

These packages ignore an option that they do not know, and the model is then quantized otherwise than the recipe says.
What they know is read from their source. Nothing is imported: importing Olive takes seconds.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from olive_ext.config.evaluation import EvaluationSettings
from olive_ext.errors import ConfigError, UnsupportedError, suggest
from olive_ext.package_versions import installed


class _Source(NamedTuple):
    """Source files that read options, and the names that the mapping of options has in them."""

    package: str
    files: tuple[str, ...]
    names: tuple[str, ...] = ()
    is_by_node: bool = False
    """Whether the options of each node stand under its name."""


_BUILDER = _Source("onnxruntime_genai", ("models/**/*.py",), ("extra_options", "kv_pairs"))
_QUANTIZER = _Source(
    "onnxruntime",
    ("quantization/quantize.py", "quantization/*quantizer.py", "quantization/operators/*.py"),
    ("extra_options",),
)
_INC = _Source("olive", ("passes/onnx/inc_quantization.py",), ("weight_only_config",))
_OPTIONS = {
    ("modelbuilder", "extra_options"): _BUILDER,
    ("onnxquantization", "extra_options"): _QUANTIZER,
    ("onnxstaticquantization", "extra_options"): _QUANTIZER,
    ("onnxdynamicquantization", "extra_options"): _QUANTIZER,
    ("orttransformersoptimization", "optimization_options"): _Source(
        "onnxruntime", ("transformers/fusion_options.py",)
    ),
    ("onnxkquantquantization", "customized_weight_config"): _Source(
        "olive", ("passes/onnx/kquant_quantization.py",), ("node_config",), is_by_node=True
    ),
    ("incquantization", "weight_only_config"): _INC,
    ("incstaticquantization", "weight_only_config"): _INC,
}
"""By the pass's type in lower case and its parameter. A file whose mapping has no name keeps options as fields of
`self`. Not held against anything are names of nodes, modules, tensors and patterns, which Olive ignores where the model
has none of them (only the pass's own input shows it), and what passes hand on to other libraries (OpenVINO, Quark,
Optimum), of which some refuse an unknown option and some ignore it."""

_SURGEONS = _Source("olive", ("passes/onnx/graph_surgeries.py",))
_HANDLERS = _Source("olive", ("model/handler/*.py",))
_RECIPE = _Source("olive", ("workflows/run/config.py", "engine/config.py"))
_RECIPE_CLASSES = ("RunConfig", "RunEngineConfig", "EngineConfig")


def unknown_options(pass_type: str, values: Mapping[str, Any], where: str) -> Iterator[ConfigError]:
    """An error for each option in a pass's `values` that the installed package would ignore. `where` is the pass's
    place in the recipe. There is none for a package that is not installed."""
    for (kind, name), source in _OPTIONS.items():
        options = values.get(name)
        if kind == pass_type.lower() and isinstance(options, Mapping):
            who = f"the installed {source.package.replace('_', '-')}"
            for node, own in options.items() if source.is_by_node else (("", options),):
                place = f"{where}.{name}.{node}".rstrip(".")
                yield from unlike(own if isinstance(own, Mapping) else (), _known(source), place, who)
    surgeries = values.get("surgeries") if pass_type.lower() == "graphsurgeries" else None
    for index, surgery in enumerate(surgeries if isinstance(surgeries, list) else ()):
        place, surgeons = f"{where}.surgeries.{index}", _arguments(_SURGEONS, "Surgeon")
        if not surgeons or not isinstance(surgery, Mapping):
            continue
        surgeon = str(surgery.get("surgeon"))
        if surgeon.lower() in surgeons:
            yield from unlike(surgery, ["surgeon", *surgeons[surgeon.lower()]], place, f"surgeon '{surgeon}'")
        else:
            near = _nearest(surgeon.lower(), surgeons)
            problem = near or "the installed olive has " + ", ".join(surgeons)
            yield ConfigError(problem, f"{place}.surgeon", surgeon, code="unknown_name")


def unknown_values(path: str, values: Mapping[str, Any], where: str) -> Iterator[ConfigError]:
    """An error for each text that is none of the enumeration that the pass's parameter takes; words of Olive's search
    are in capitals. Of an enumeration a pass may take a part alone: Olive leaves it out of the run else."""
    for name, known in {**pass_parameters(path), **_validated(path)}.items():
        value = values.get(name)
        if known and isinstance(value, str) and not value.isupper() and value.lower() not in {*map(str.lower, known)}:
            yield ConfigError(f"give {', '.join(sorted(known))}", f"{where}.{name}", value, code="unknown_name")


def unknown_keys(recipe: Mapping[str, Any]) -> Iterator[ConfigError]:
    """An error for each key at the top of a recipe, or of its engine, that Olive does not know, but for "$schema"."""
    known, engine = _fields(), recipe.get("engine")
    of_engine = {f"engine.{key}": value for key, value in engine.items()} if isinstance(engine, Mapping) else {}
    for key, value in {**recipe, **of_engine}.items():
        name = str(key).removeprefix("engine.")
        if known and name not in known and key != "$schema":
            ours = "it is a key of evaluators.NAME, or of a pass" if name in EvaluationSettings.model_fields else ""
            hint = ours or _nearest(name, known) or f"Olive takes {', '.join(sorted(known))}"
            yield ConfigError(f"unknown key '{key}': {hint}", str(key), value, code="unknown_key")


def unknown_of_model(kind: str, keys: Iterable[str]) -> list[ConfigError]:
    """An error for each key of an input model of Olive's type `kind`, in lower case, that Olive does not take."""
    known = _arguments(_HANDLERS, "OliveModelHandler").get(f"{kind}handler", frozenset())
    written = (key for key in keys if key not in ("type", "config", "variant"))  # 'variant' has its own sentence
    return list(unlike([*written], known, "input_model", "Olive"))


def undrivable_builder(pass_type: str, where: str) -> Iterator[UnsupportedError]:
    """An error where the pass ModelBuilder of Olive 0.13.0 would drive onnxruntime-genai from 0.15 on: its builder has
    other modules."""
    olive, genai = installed("olive-ai"), installed("onnxruntime-genai")
    is_newer = tuple(map(int, re.findall(r"\d+", genai)[:2])) >= (0, 15)
    if is_newer and olive == "0.13.0" and pass_type.lower() == "modelbuilder":
        problem = f"Olive {olive} cannot drive onnxruntime-genai {genai}'s builder"
        hint = "install 'onnxruntime-genai<0.15', or give an ONNX model"
        yield UnsupportedError(f"{problem}: {hint}", f"{where}.type", pass_type)


def unbuildable(pass_type: str, values: Mapping[str, Any], provider: str | None, where: str) -> Iterator[ConfigError]:
    """An error where Olive would leave its pass ModelBuilder out, which makes some floats for a GPU's provider only."""
    precision = str(values.get("precision")).lower()
    needed = {"fp16": "a GPU's", "bf16": "CUDA's"}.get(precision) if pass_type.lower() == "modelbuilder" else None
    if needed and (provider == "CPUExecutionProvider" or (precision == "bf16" and "CUDA" not in str(provider))):
        problem = f"Olive builds it for {needed} execution provider, and the accelerator's is {provider}"
        yield UnsupportedError(problem, f"{where}.precision", precision)


def unlike(options: Iterable[Any], known: Collection[str], where: str, who: str) -> Iterator[ConfigError]:
    """An error for each of `options` that is not `known`, the last with all that `who` takes; none if none is known."""
    unknown = [option for option in options if known and option not in known]
    for option in unknown:
        near = _nearest(str(option), known)
        if near and near == _nearest(str(option), [one for one in options if one in known]):
            near = f"{near[:-1]}, which is there already?"
        hints = [near, f"{who} takes {', '.join(sorted(known))}" * (option == unknown[-1])]
        problem = f"unknown key '{where}.{option}'{': ' * any(hints)}{' '.join(filter(None, hints))}"
        yield ConfigError(problem, f"{where}.{option}", code="unknown_key")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Asks for a name with another beginning, which releases change, else for the nearest one."""
    longer = sorted(one for one in known if one.endswith(f"_{name}"))
    return f"did you mean {' or '.join(map(repr, longer))}?" if longer else suggest(name, known)


@cache
def _trees(source: _Source) -> tuple[ast.Module, ...]:
    files = {file for folder in _folders(source.package) for pattern in source.files for file in folder.glob(pattern)}
    return tuple(ast.parse(file.read_bytes()) for file in sorted(files))


def _folders(package: str) -> list[Path]:
    """The folders of a package; of a module its file without the suffix."""
    if not package or (spec := find_spec(package)) is None:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or [str(spec.origin).removesuffix(".py")]]


@cache
def _known(source: _Source) -> frozenset[str]:
    return frozenset(name for tree in _trees(source) for name in _read(tree, source.names))


def _read(tree: ast.Module, names: tuple[str, ...]) -> Iterator[str]:
    """The names by which a mapping called one of `names` is asked: as constants, and as variables that run over
    constants. Without `names`: the fields that methods give `self`."""
    constants: dict[str, set[str]] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.List | ast.Tuple):
            for target in node.targets:
                constants.setdefault(getattr(target, "id", ""), set()).update(_texts(node.value))
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Name):
            for variable in ast.walk(node.target):
                constants.setdefault(getattr(variable, "id", ""), set()).update(constants.get(node.iter.id, ()))
    for node in nodes:
        key: ast.AST | None = None
        if not names:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
        elif isinstance(node, ast.Subscript) and _is_called(node.value, names):
            key = node.slice
        elif isinstance(node, ast.Compare) and any(_is_called(item, names) for item in node.comparators):
            key = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            key = node.args[0] if _is_called(node.func.value, names) else None
        if key is not None:
            yield from _texts(key) if isinstance(key, ast.Constant) else constants.get(getattr(key, "id", "?"), ())


def _texts(node: ast.AST) -> list[str]:
    return [item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _is_called(node: ast.AST, names: tuple[str, ...]) -> bool:
    """Whether an expression is a mapping called one of `names`, as it is, of an object, or in `(options or {})`."""
    expressions = (node, *getattr(node, "values", ()))
    return any(getattr(item, "id", getattr(item, "attr", None)) in names for item in expressions)


@cache
def _arguments(source: _Source, root: str) -> Mapping[str, frozenset[str]]:
    """The classes that are made of `root` in lower case, as Olive's tables of them are, and the parameters of each."""
    classes = {node.name: node for tree in _trees(source) for node in tree.body if isinstance(node, ast.ClassDef)}
    parameters: dict[str, frozenset[str]] = {}
    for name, node in classes.items():
        line: list[ast.ClassDef] = [node]
        for base in line:  # grows by each base that the file defines
            line += [classes[item.id] for item in base.bases if isinstance(item, ast.Name) and item.id in classes]
        if name != root and line[-1].name == root:
            methods = [item for base in line for item in base.body if isinstance(item, ast.FunctionDef)]
            made = next((item.args for item in methods if item.name == "__init__"), None)
            arguments = [] if made is None else [*made.args[1:], *made.kwonlyargs]
            parameters[name.lower()] = frozenset(item.arg for item in arguments)
    return parameters


@cache
def _fields() -> frozenset[str]:
    nodes = [node for tree in _trees(_RECIPE) for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [item for node in nodes if node.name in _RECIPE_CLASSES for item in node.body]
    targets = [item.target for item in fields if isinstance(item, ast.AnnAssign)]
    return frozenset(item.id for item in targets if isinstance(item, ast.Name) and not item.id.startswith("_"))


@cache
def pass_classes() -> Mapping[str, str]:
    """The class of each of Olive's passes, "module.name", by its type in lower case."""
    table = next((folder / "olive_config.json" for folder in _folders("olive")), None)
    passes = {} if table is None else json.loads(table.read_text(encoding="utf-8"))["passes"]
    return {name.lower(): str(keys["module_path"]) for name, keys in passes.items()}


@cache
def pass_parameters(path: str) -> Mapping[str, frozenset[str]]:
    """The parameters of the pass whose class is `path`, and of five passes a few more that stand inside of one: what
    `_default_config` and all that it names list, each with the texts that it takes where its type is an enumeration.
    None where there is no source."""
    parameters: dict[str, frozenset[str]] = {}
    asked = [path]
    for one in asked:  # grows by each name that is found
        module, _, name = one.rpartition(".")
        defined, imported = _module(module)
        node = defined.get(name)
        nodes: list[ast.AST] = [] if node is None else [node]
        names = [imported[name]] if node is None and name in imported else []
        if isinstance(node, ast.ClassDef):
            nodes = [item for item in node.body if getattr(item, "name", "") == "_default_config"]
            names += [f"{module}.{base.id}" for base in node.bases if isinstance(base, ast.Name)]
            if nodes and not any(getattr(item, "id", "") == "super" for item in ast.walk(nodes[0])):
                names = []
        for item in (item for root in nodes for item in _outside_of_parameters(root)):
            if isinstance(item, ast.Name):
                names.append(f"{module}.{item.id}")
            written: list[tuple[ast.expr | None, ast.expr]] = []
            if isinstance(item, ast.Dict):
                written = list(zip(item.keys, item.values, strict=True))
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Subscript):
                written = [(item.targets[0].slice, item.value)]
            for key, value in written:
                if isinstance(value, ast.Call) and _is_parameter(value):
                    kind = next((keyword.value for keyword in value.keywords if keyword.arg == "type_"), None)
                    parameters[getattr(key, "value", "")] = _enumerated(f"{module}.{getattr(kind, 'id', '')}")
        asked += [name for name in dict.fromkeys(names) if name not in asked]
    return parameters


@cache
def _validated(path: str) -> Mapping[str, frozenset[str]]:
    """The texts, in lower case, that the `validate_config` of the pass whose class is `path` leaves of enumerations, by
    the parameter: those that it returns a parameter to be `in`."""
    module, _, name = path.rpartition(".")
    methods = [item for item in getattr(_module(module)[0].get(name), "body", ()) if isinstance(item, ast.FunctionDef)]
    checks = [item for method in methods if method.name == "validate_config" for item in ast.walk(method)]
    returned = [item.value for item in checks if isinstance(item, ast.Return)]
    return {
        item.left.attr: frozenset(
            one.attr.lower() for one in item.comparators[0].elts if isinstance(one, ast.Attribute)
        )
        for item in returned
        if isinstance(item, ast.Compare)
        and isinstance(item.left, ast.Attribute)
        and isinstance(item.comparators[0], ast.Set)
    }


def _enumerated(path: str) -> frozenset[str]:
    """The texts of an enumeration; none of another class."""
    module, _, name = path.rpartition(".")
    defined, imported = _module(module)
    node = defined.get(name)
    if node is None and name in imported:
        return _enumerated(imported[name])
    if not isinstance(node, ast.ClassDef) or not any("Enum" in getattr(base, "id", "") for base in node.bases):
        return frozenset()
    return frozenset(text for item in node.body if isinstance(item, ast.Assign) for text in _texts(item.value))


@cache
def _module(name: str) -> tuple[Mapping[str, ast.AST], Mapping[str, str]]:
    """What a module defines by name, and the dotted names of what it imports; nothing of one that has no file."""
    package, *parts = name.split(".")
    files = [folder.joinpath(*parts).with_suffix(".py") for folder in _folders(package)]
    body = [node for file in files if file.is_file() for node in ast.parse(file.read_bytes()).body]
    targets = {id(node): getattr(node, "targets", [getattr(node, "target", node)]) for node in body}
    defined = {getattr(one, "name", getattr(one, "id", "")): node for node in body for one in targets[id(node)]}
    origins = [node for node in body if isinstance(node, ast.ImportFrom)]
    return defined, {one.asname or one.name: f"{node.module}.{one.name}" for node in origins for one in node.names}


def _outside_of_parameters(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression or a function but those inside of a parameter, whose default may name others."""
    yield node
    for child in () if _is_parameter(node) else ast.iter_child_nodes(node):
        yield from _outside_of_parameters(child)


def _is_parameter(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PassConfigParam"
