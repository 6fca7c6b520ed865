"""What is accepted, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig, EvaluationSettings
from olive_ext.errors import ConfigError
from tests.refusals import refused

AUTO_OR_COUNT = 'give an integer from 1 to 65536 or "auto"'


def refusal(where: str = "", **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EvaluationSettings.parse({"tasks": ["a"], **values}, where)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": "foo"}, f"'batch_size' = 'foo': {AUTO_OR_COUNT}"),
        ({"batch_size": True}, f"'batch_size' = True: {AUTO_OR_COUNT}"),
        ({"batch_size": 0}, f"'batch_size' = 0: {AUTO_OR_COUNT}"),
        ({"limit": -1}, "'limit' = -1: give a positive integer or a number between 0 and 1"),
        ({"limit": True}, "'limit' = True: give a positive integer or a number between 0 and 1"),
        ({"num_fewshot": -1}, "'num_fewshot' = -1: give an integer from 0"),
        ({"seed": "x"}, "'seed' = 'x': give an integer from 0 to 4294967295"),
        ({"tasks": []}, "'tasks' = []: give a non-empty list, each item a string or a mapping"),
        ({"tasks": "a"}, "'tasks' = 'a': give a non-empty list, each item a string or a mapping"),
        ({"apply_chat_template": []}, "'apply_chat_template' = []: give true or false or a string"),
        ({"model_class": "x"}, '\'model_class\' = \'x\': give "hf", "ort", "ortgenai" or "ort-multimodal"'),
        ({"model_args": 3}, "'model_args' = 3: give a mapping"),
        ({"include_path": 3}, "'include_path' = 3: give a string or a list, each item a string"),
        (
            {"provider_libraries": {"a": 3}},
            "'provider_libraries' = {'a': 3}: give a mapping of names, each to a string",
        ),
        (
            {"execution_provider": [["cuda", {"a": [1]}], 3]},
            "'execution_provider' = [['cuda', {'a': [1]}], 3]: "
            "give a string or a list, each item a string or a pair [a string, a mapping of options]",
        ),
        ({"engine": 3}, "'engine' = 3: give a mapping"),
        ({"engine": {"num_slots": "x"}}, f"'engine.num_slots' = 'x': {AUTO_OR_COUNT}"),
    ],
)
def test_wrong_value_is_refused_with_one_line(values: dict[str, Any], message: str) -> None:
    assert refusal(**values) == message


def test_long_value_is_cut_in_the_message() -> None:
    assert len(refusal(batch_size="x" * 10_000)) < 250


def test_missing_key_is_named() -> None:
    with refused(ConfigError, "missing", "tasks", holds="model.path"):
        EvaluationConfig.parse({"model": {}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tassks": 1}, "unknown key 'tassks': did you mean 'tasks'?"),
        ({"engine": {"chunksize": 1}}, "unknown key 'engine.chunksize': did you mean 'chunk_size'?"),
        ({"num_slots": 1}, "unknown key 'num_slots': did you mean 'engine.num_slots'?"),
        ({"engine": {"zzz": 1}}, "unknown key 'engine.zzz': known keys: adapters, chunk_size, compiled_dir, "),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_known_one(values: dict[str, Any], message: str) -> None:
    assert refusal(**values).startswith(message)


def test_every_problem_is_named_with_its_place() -> None:
    assert refusal("evaluators.mine", batch_size="foo", taskss=1) == (
        f"'evaluators.mine.batch_size' = 'foo': {AUTO_OR_COUNT}; "
        "unknown key 'evaluators.mine.taskss': did you mean 'tasks'?"
    )


def test_multiturn_examples_without_a_template_are_refused() -> None:
    assert refusal(fewshot_as_multiturn=True) == "'fewshot_as_multiturn' needs 'apply_chat_template'"
    assert refusal("passes.p", fewshot_as_multiturn=True).startswith("passes.p: 'fewshot_as_multiturn' needs")
    settings = EvaluationSettings.parse({"tasks": ["a"], "fewshot_as_multiturn": True, "apply_chat_template": "tool"})
    assert settings.apply_chat_template == "tool"


@pytest.mark.parametrize(("written", "value"), [("8", 8), (8, 8), ("auto", "auto"), ("auto:4", "auto:4")])
def test_batch_size_takes_counts_in_text_too(written: str | int, value: str | int) -> None:
    assert EvaluationSettings.parse({"tasks": ["a"], "batch_size": written}).batch_size == value


def test_providers_keep_names_and_options_in_order() -> None:
    written = ["webgpu", ("CUDAExecutionProvider", {"device_id": 1})]
    assert EvaluationSettings.parse({"tasks": ["a"], "execution_provider": written}).execution_provider == written


class TestWordsThatOliveMadePathsOf:
    """A word that is also a folder of the working directory comes back as that folder's absolute path."""

    def test_task_is_put_right(self, tmp_path: Path) -> None:
        (tmp_path / "mmlu").mkdir()
        assert EvaluationSettings.parse({"tasks": [str(tmp_path / "mmlu"), "arc"]}).tasks == ["mmlu", "arc"]

    def test_task_file_keeps_its_path(self, tmp_path: Path) -> None:
        task = tmp_path / "mine.yaml"
        task.touch()
        assert EvaluationSettings.parse({"tasks": [str(task)]}).tasks == [str(task)]

    def test_path_that_does_not_exist_stays_for_the_error_about_it(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "missing")
        assert EvaluationSettings.parse({"tasks": [missing]}).tasks == [missing]

    def test_provider_device_and_auto_are_put_right(self, tmp_path: Path) -> None:
        for name in ("cuda", "cpu", "auto", "hf"):
            (tmp_path / name).mkdir()
        written = {
            "tasks": ["a"],
            "execution_provider": [str(tmp_path / "cuda"), [str(tmp_path / "cpu"), {}]],
            "device": str(tmp_path / "cpu"),
            "batch_size": str(tmp_path / "auto"),
            "model_class": str(tmp_path / "hf"),
            "engine": {"num_slots": str(tmp_path / "auto")},
        }
        settings = EvaluationSettings.parse(written)
        assert settings.execution_provider == ["cuda", ("cpu", {})]
        assert (settings.device, settings.batch_size, settings.model_class) == ("cpu", "auto", "hf")
        assert settings.engine.num_slots == "auto"

    def test_folder_options_keep_their_paths(self, tmp_path: Path) -> None:
        written = {"tasks": ["a"], "include_path": str(tmp_path), "output_dir": str(tmp_path)}
        settings = EvaluationSettings.parse(written)
        assert (settings.include_path, settings.output_dir) == (str(tmp_path), str(tmp_path))


def test_every_field_is_described() -> None:
    for model in (EvaluationConfig, *_nested(EvaluationConfig)):
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def _nested(model: Any) -> list[Any]:
    fields = [field.annotation for field in model.model_fields.values()]
    return [annotation for annotation in fields if hasattr(annotation, "model_fields")]


@pytest.mark.parametrize("word", ["auto", "export"])
def test_folder_with_the_name_of_a_word_is_never_taken_for_the_word(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Olive makes the word an absolute path where such a folder is in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / word).mkdir()
    told = refusal(reference={"path": "hf", "float_model": str(tmp_path / word)})
    assert told.startswith(f"'reference.float_model' = '{tmp_path / word}': the word '{word}', or what has that name")
    for inside in (f"./{word}", str(tmp_path / word / "model.onnx"), word):
        settings = EvaluationSettings.parse({"tasks": ["a"], "reference": {"path": "hf", "float_model": inside}})
        assert settings.reference is not None
        assert settings.reference.float_model == inside


@pytest.mark.parametrize("number", [0, 10_001, True, "many"])
def test_answers_to_a_document_have_the_bounds_of_a_tasks_own_number(number: object) -> None:
    """lm-eval makes a request for each: millions by a slip are told before, not after hours."""
    assert refusal(repeats=number) == f"'repeats' = {number!r}: give an integer from 1 to 10000"


def test_earlier_names_of_engine_settings_are_taken() -> None:
    settings = EvaluationSettings.parse({"tasks": ["a"], "engine": {"decode_ahead": True, "scoring": "branches"}})
    assert (settings.engine.overlaps_steps, settings.engine.scoring) == (True, "tree")
    assert refusal(engine={"decode_ahead": 3}).startswith("'engine.overlaps_steps' = 3: ")
