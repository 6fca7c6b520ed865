"""Each mistake of the table is refused through its door: by its code, field and value, and in one line. Commands end
with status 2, without a traceback and without anything of other libraries on the terminal."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check import check_recipe, mistakes, refuse
from olive_ext.cli import main
from olive_ext.cli.exit_status import command
from olive_ext.cli.options import commands
from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, EvaluationConfig
from olive_ext.errors import OliveExtError
from olive_ext.registry import load
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from tests.mistakes.early import Told, told
from tests.mistakes.place import Place, put_root
from tests.mistakes.recipes import put, with_value
from tests.mistakes.table import TABLE, Mistake
from tests.refusals import assert_says, last_lines
from tests.session.fake_engine import FakeEngine
from tests.session.tiny import byte_level


def in_python(given: dict[str, Any]) -> None:
    EvaluationConfig.of("m", {"tasks": ["a"], **given})


def in_options(given: dict[str, Any]) -> None:
    settings = {"tasks": ["a"], **given}.items()
    command(
        ["evaluate", "m", *(word for key, value in settings for word in ("--set", f"{key}={json.dumps(value)}"))], None
    )


def in_evaluator(given: dict[str, Any]) -> None:
    evaluators = {"e": {"type": EVALUATOR_TYPE, "tasks": ["a"], **given}}
    refuse(mistakes({"evaluators": evaluators, "evaluator": "e"}, has_model=False))


def in_pass(given: dict[str, Any]) -> None:
    refuse(mistakes({"passes": {"p": {"type": PASS_TYPE, "config": {"tasks": ["a"], **given}}}}, has_model=False))


CALLS: dict[str, Callable[[Any], object]] = {
    "request": lambda given: GenerationRequest(**{"prompt": "x", **given}),
    "python": in_python,
    "options": in_options,
    "evaluator": in_evaluator,
    "pass": in_pass,
}
EDITS: dict[str, Callable[[Place, Any], object]] = {
    "option": Place.option,
    "genai": lambda place, values: place.genai(**values),
    "file": lambda place, given: place.put(*given),
    "template": lambda place, text: place.put("chat_template.jinja", text).also("--apply-chat-template"),
    "place": lambda place, edit: edit(place),
    "task": Place.task,
    "data": lambda place, given: place.data(*given[0], **given[1]),
    "coded": lambda place, given: place.coded(*given),
    "known": lambda place, edit: edit(place.unopened().tasks_are("tiny_generate")),
    "unopened": lambda place, edit: edit(place.unopened().tasks_are("tiny_generate")),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_root(tmp_path_factory.mktemp("mistakes"))


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    given = [row.given for row in TABLE if row.door == "command"]
    return dict(zip(map(repr, given), told(tmp_path_factory.mktemp("early"), given), strict=True))


def raised_by(call: Callable[[], object]) -> OliveExtError:
    with pytest.raises(OliveExtError) as raised:
        call()
    return raised.value


def named(row: Mistake) -> str:
    return f"{row.door}-{row.field}-{str(row.given)[-30:]!a}" if not callable(row.given) else f"{row.door}-{row.words}"


CASES = [pytest.param(row, marks=[pytest.mark.long] if row.is_long else [], id=named(row)) for row in TABLE]


@pytest.mark.parametrize("row", CASES)
def test_mistake_is_refused(
    row: Mistake, tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if row.door in CALLS:
        error: Any = raised_by(lambda: CALLS[row.door](row.given))
    elif row.door == "call":
        error = raised_by(lambda: row.given(tmp_path))
    elif row.door == "session":
        session = Session(engine := FakeEngine(512), byte_level())
        error = raised_by(lambda: row.given(session))
        assert engine.requests == []
    elif row.door == "recipe":
        (error,) = check_recipe(put(tmp_path, with_value(*row.given))).errors
    elif row.door == "command":
        error = request.getfixturevalue("early")[repr(row.given)]
        assert not error.imported
    else:
        place, errors = Place(request.getfixturevalue("root"), tmp_path), list[OliveExtError]()
        EDITS[row.door](place, row.given)
        functions = {name: noting(one.function, errors) for name, one in commands().items()}
        assert main([str(word) for word in place.argv], functions) == 2
        (line,) = last_lines(capfd.readouterr().err)
        assert line.startswith("olive-ext: error: ")
        assert "onnxruntime_src" not in line
        error = errors[0]
        if row.door == "known":
            assert main(["check", *map(str, place.argv[1:6])]) == 2
            told = capfd.readouterr().err
            assert not [word for word in row.words.split() if word not in told], told
    assert_says(error, row.code, row.field, holds=tuple(row.words.split()))
    values = row.value if isinstance(row.value, list) else []
    assert row.value is ... or str(error.value) in map(str, (row.value, *values))
    assert "\n" not in str(error)
    assert row.door not in CALLS or len(str(error)) < 500 or row.code == "unknown_key"


def noting(function: str, errors: list[OliveExtError]) -> Callable[[Namespace], int]:
    """A command whose errors are noted as they pass."""

    def run(arguments: Namespace) -> int:
        try:
            status: int = load(function)(arguments)
            return status
        except OliveExtError as error:
            errors.append(error)
            raise

    return run


def test_a_metric_that_is_no_number_is_named(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others stand: they may have taken hours."""
    place = Place(root, tmp_path)
    place.coded("metric_list", "return 'good'", "[{metric: acc, aggregation: !function mine.f}]")
    assert main([str(word) for word in place.argv]) == 0
    assert re.search("'mine': acc,none .*'good'", capfd.readouterr().err)
