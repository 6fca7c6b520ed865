"""Tasks that a model does not take are refused before it is opened, by the run and by a check of the recipe alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from olive_ext.backends.task_loading import declared_configs, load_tasks
from olive_ext.check import check_recipe
from olive_ext.cli import main
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import TaskError
from olive_ext.model import resolve
from olive_ext.run import evaluate
from olive_ext.run.task_fit import refuse_misfits
from tests.check.tiny import put_model
from tests.exports import quickstart
from tests.exports.genai import genai_export
from tests.exports.genai_layout import genai_layout
from tests.refusals import refused, tells

RECIPES = Path(__file__).parents[2] / "recipes"
SPEECH, VISION = RECIPES / "speech" / "tasks", RECIPES / "vision" / "tasks"


def problems(model: Path, task: str, folder: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """What the run raises, and what a check of a recipe with the same model and tasks finds."""
    given = {"tasks": [task], "include_path": str(folder), "max_length": 64}
    with pytest.raises(TaskError) as raised:
        evaluate(EvaluationConfig.parse({**given, "model": {"path": str(model)}}))
    recipe = {
        "input_model": {"type": "ONNXModel", "model_path": str(model)},
        "evaluators": {"ours": {"type": "OrtLMEvaluator", **given}},
        "evaluator": "ours",
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return str(raised.value), check_recipe(path).problems


@pytest.mark.parametrize(
    ("task", "folder", "words"),
    [("tones_words", SPEECH, "'tones_words' sound"), ("shapes_colour", VISION, "'shapes_colour' pictures")],
)
def test_pictures_and_sound_for_a_model_of_text(
    task: str, folder: Path, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(quickstart.exported()), "--tasks", task, "--include-path", str(folder)]) == 2
    assert tells(said := capsys.readouterr().err, words)
    raised, found = problems(put_model(tmp_path / "model"), task, folder, tmp_path)
    assert found == [raised]
    assert raised in said


@pytest.mark.parametrize(("key", "what"), [("doc_to_image", "pictures"), ("doc_to_audio", "sound")])
def test_pictures_and_sound_for_a_runtime_that_takes_text_alone(key: str, what: str) -> None:
    values = {"model": genai_layout("qwen2_5_vl_genai"), "engine": {"runtime": "genai"}}
    with refused(TaskError, "unsupported", holds=("'seen'", what, "'engine.runtime' = 'genai'")):
        refuse_misfits(resolve(ModelSettings.of(values)), {"seen": {key: "it"}})


def test_text_for_a_model_of_speech(tmp_path: Path) -> None:
    model = Path(shutil.copytree(genai_export("whisper", "0.18.0"), tmp_path / "whisper"))
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n', encoding="utf-8")
    (tmp_path / "plain.yaml").write_text(
        f"task: plain\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: text\ndoc_to_target: text\n"
        "metric_list: [{metric: exact_match}]\n",
        encoding="utf-8",
    )
    raised, found = problems(model, "plain", tmp_path, tmp_path)
    assert tells(raised, "'plain' ('doc_to_audio')")
    assert raised in found


@pytest.mark.parametrize(("task", "folder"), [("tones_words", SPEECH), ("shapes_colour", VISION)])
def test_files_tell_what_loaded_tasks_give(task: str, folder: Path) -> None:
    fields = ("doc_to_audio", "doc_to_image")
    (told,) = declared_configs([task], str(folder)).items()
    assert [told[1].get(name) is not None for name in fields] == [task == "tones_words", task != "tones_words"]
    ((name, loaded),) = load_tasks([task], str(folder)).configs.items()
    assert (name, [loaded[one] is None for one in fields]) == (told[0], [told[1].get(one) is None for one in fields])
