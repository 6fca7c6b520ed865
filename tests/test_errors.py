"""Codes of errors: each is raised somewhere, and sentences of those that users cause are shown here. Other tests ask
for codes, fields and values."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from olive_ext import errors
from olive_ext.check import read_recipe
from olive_ext.cli.commands import copy_quickstart
from olive_ext.config import EvaluationConfig
from olive_ext.errors import CODES, ConfigError, OliveExtError, suggest
from olive_ext.graph.nodes import OLDEST_OPSET, NodeWriter
from olive_ext.media.pictures import read_picture
from olive_ext.model.files.package_config import json_object, real_path
from olive_ext.model.providers.resolution import operators_library, resolve_providers
from olive_ext.records.travelling import unpack
from olive_ext.session.requests import GenerationRequest
from tests.refusals import refused

PACKAGE = Path(errors.__file__).parent


def parsed(**values: Any) -> EvaluationConfig:
    return EvaluationConfig.parse({"model": {"path": "m"}, "tasks": ["a"], **values})


def file(folder: Path, content: object) -> Path:
    path = folder / "x.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


Make = Callable[[Path], object]
SETTING = {"model": {"decoder": {"session_options": {"enable_profiling": "evil"}}}}

SHOWN: list[tuple[str, str, Make, str]] = [
    ("unknown_key", "limt", lambda _: parsed(limt=3), "unknown key 'limt': did you mean 'limit'?"),
    ("wrong_value", "documents", lambda _: parsed(documents=3), '\'documents\' = 3: give "all" or "enough"'),
    ("missing", "model.path", lambda _: parsed(model={}), "missing key 'model.path'"),
    (
        "contradiction",
        "limit",
        lambda _: parsed(documents="enough", reference="r", limit=10),
        "'limit' = 10: 'documents' = 'enough' stops by itself",
    ),
    ("not_found", "model", lambda folder: real_path(folder / "m"), "model path '{folder}/m' does not exist"),
    (
        "exists",
        "folder",
        lambda folder: copy_quickstart(file(folder, {}).parent),
        "'folder' = '{folder}': is there already: give a folder that is new or empty",
    ),
    ("no_access", "", lambda folder: read_recipe(folder), "cannot read the recipe '{folder}': Is a directory"),
    ("damaged", "", lambda folder: json_object(file(folder, [])), "'{folder}/x.json' holds [], not a JSON object"),
    (
        "too_large",
        "",
        lambda folder: json_object(file(folder, {}), largest=1),
        "'{folder}/x.json' has 2 bytes: at most 1 are read",
    ),
    (
        "unknown_name",
        "",
        lambda _: resolve_providers("cudaa", available=["CPUExecutionProvider"]),
        "execution_provider names the unknown execution provider 'cudaa': did you mean 'cuda' (extra 'gpu')?",
    ),
    (
        "untrusted",
        "model.decoder.session_options.enable_profiling",
        lambda folder: operators_library(SETTING, folder),
        "'model.decoder.session_options.enable_profiling' = 'evil': '{folder}' sets an entry of ONNX Runtime that is "
        "not known as harmless: nothing of a model's folder is run unless 'trust_remote_code' = true",
    ),
    (
        "unsupported",
        "",
        lambda _: NodeWriter(onnx.GraphProto(), 1, "x"),
        f"the graph's opset is 1; {OLDEST_OPSET} or later is needed",
    ),
    ("media", "", lambda _: read_picture(b"x"), "a picture cannot be read as a picture: no format that is known here"),
    (
        "records",
        "",
        lambda folder: unpack(file(folder, {}), folder),
        "'{folder}/x.json' is no file of records, or was cut off or changed on its way (File is not a zip file)",
    ),
    (
        "provider",
        "",
        lambda _: resolve_providers("cuda", available=["CPUExecutionProvider"]),
        "CUDAExecutionProvider (from execution_provider) is not in this build of ONNX Runtime, which has "
        "CPUExecutionProvider; install the extra 'gpu' ('.[gpu]' in a clone), name another in 'execution_provider' or "
        "set 'allow_cpu_fallback'",
    ),
]


@pytest.mark.parametrize(("code", "field", "make", "sentence"), SHOWN, ids=[row[0] for row in SHOWN])
def test_sentence_of_a_code(tmp_path: Path, code: str, field: str, make: Make, sentence: str) -> None:
    with refused(OliveExtError, code, field) as raised:
        make(tmp_path)
    assert sentence.replace("{folder}", str(tmp_path)) in str(raised.value)


def test_every_code_is_raised_and_every_code_that_is_raised_is_known() -> None:
    by_class = {name: kind.code for name, kind in vars(errors).items() if hasattr(kind, "code")}
    calls = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in by_class
    ]
    written = [word.value.value for call in calls for word in call.keywords if word.arg == "code" and _is_text(word)]
    assert {*written, *(by_class[call.func.id] for call in calls if isinstance(call.func, ast.Name))} == set(CODES)


def _is_text(word: ast.keyword) -> bool:
    return isinstance(word.value, ast.Constant)


def test_field_and_value_stand_before_the_message_that_does_not_name_them() -> None:
    assert str(ConfigError("give more", "engine.slots", 0)) == "'engine.slots' = 0: give more"
    assert str(ConfigError("it is needed", "engine.slots")) == "'engine.slots': it is needed"
    assert str(ConfigError("unknown key 'slots'", "slots", 3, code="unknown_key")) == "unknown key 'slots'"
    assert ConfigError("give a name", "tasks", ConfigError).value == str(ConfigError), "no plain data"
    with refused(ConfigError, "wrong_value", "temperature", -1):
        GenerationRequest(prompt="a", temperature=-1)


def test_error_inside_of_another_place_keeps_its_code_and_crosses_processes() -> None:
    error = ConfigError("give a name", "tasks", [Path("x")], code="missing").inside("evaluators.a", "evaluators.a")
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert (type(same), same.code, same.field) == (ConfigError, "missing", "evaluators.a.tasks")
        assert str(same).startswith("evaluators.a: 'tasks' = ")


def test_names_that_begin_with_a_short_one_are_near() -> None:
    assert suggest("kl", ["accuracy", "kl_max", "kl_mean"]) == "did you mean 'kl_max' or 'kl_mean'?"
    assert suggest("k", ["kl_mean"]) == ""
