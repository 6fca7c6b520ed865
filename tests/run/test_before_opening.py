"""Mistakes of a package and of settings that are known before the model is opened, and tasks that it does not take: the
model here cannot be opened, and it is the mistake that is told, by an evaluation and by a check of the recipe alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from olive_ext.check import check_model, check_recipe
from olive_ext.cli import main
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import OliveExtError, TaskError, warn_ignored
from olive_ext.model import resolve
from olive_ext.run import evaluate
from olive_ext.run.task_fit import refuse_misfits
from tests.backends.local_tasks import write_tasks
from tests.check.tiny import put_model
from tests.exports import quickstart
from tests.exports.genai import genai_export
from tests.exports.genai_layout import genai_layout
from tests.refusals import refused, tells

GENERATE, CHOICE = ["tiny_generate"], ["tiny_choice"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package whose graph parses, and that ONNX Runtime does not open."""
    put_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    graph = onnx.load(tmp_path / "model" / "model.onnx")
    graph.opset_import[0].version = 999
    onnx.save(graph, tmp_path / "model" / "model.onnx")
    write_tasks(tmp_path / "tasks")
    return tmp_path


def config(folder: Path, tasks: list[str], **more: Any) -> EvaluationConfig:
    given = {"path": str(folder / "model")}
    return EvaluationConfig.parse({"model": given, "tasks": tasks, "include_path": str(folder / "tasks"), **more})


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ({"temperature": 0.7, "top_p": 0.5}, ["temperature = 0.7", "top_p = 0.5"]),
        ({"temperature": 0.7, "do_sample": False}, []),
        ({"temperature": 0, "top_k": 0, "max_gen_toks": 4}, []),
    ],
)
def test_sampling_that_a_greedy_task_leaves_out_is_told(
    given: dict[str, Any], unread: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The task's own file says `do_sample: false`, and lm-eval lets that stand."""
    warn_ignored.cache_clear()
    settings = "{until: [a], max_gen_toks: 4, do_sample: false}"
    greedy = f"include: tiny_generate.yaml\ntask: greedy\ngeneration_kwargs: {settings}\n"
    (folder / "tasks" / "greedy.yaml").write_text(greedy)
    with refused(OliveExtError, "unsupported"):
        evaluate(config(folder, ["greedy"], gen_kwargs=given))
    told = [line for line in caplog.messages if "'gen_kwargs'" in line]
    assert [part in line for part, line in zip(unread, told, strict=True)] == [True] * len(unread)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gen_kwargs": {"bogus": 1}}, "'bogus' 1"),
        ({"gen_kwargs": {"max_gen_toks": 64}}, "max_length 64"),
        ({"apply_chat_template": True}, "'apply_chat_template'"),
        ({"tasks": ["empty"]}, "'empty'"),
    ],
)
def test_check_of_a_recipe_tells_it(folder: Path, changes: dict[str, Any], expected: str) -> None:
    from olive_ext.check import check_recipe

    (folder / "tasks" / "empty.yaml").write_text("group: empty\ntask: []\n")
    evaluator = {"type": "OrtLMEvaluator", "tasks": GENERATE, "include_path": str(folder / "tasks"), **changes}
    recipe = {
        "input_model": {"type": "ONNXModel", "model_path": str(folder / "model")},
        "evaluators": {"mine": evaluator},
        "evaluator": "mine",
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    problems = check_recipe(folder / "recipe.json").problems
    assert any(tells(problem, expected) for problem in problems), problems


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decoder_start_token_id": None}, "'decoder_start_token_id'"),
        ({"decoder_start_token_id": 10**6}, "'decoder_start_token_id' 1000000 0"),
        ({"decoder_start_token_id": -1}, "'decoder_start_token_id' -1"),
        ({"suppress_tokens": [10**6]}, "'suppress_tokens' 1000000 0"),
    ],
)
def test_first_token_of_a_decoder_is_known_before_opening(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    from tests.exports.genai import whisper_export

    shutil.copytree(whisper_export(), tmp_path / "model")
    for name, more in (("config.json", {}), ("generation_config.json", changes), ("genai_config.json", {})):
        file = tmp_path / "model" / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for section in (content, content.get("model", {})):
            section.pop("decoder_start_token_id", None)
        file.write_text(json.dumps({"decoder_start_token_id": 1, **content, **more} if more else content))
    problems = check_model(config(tmp_path, ["x"])).problems
    assert any(tells(problem, expected) for problem in problems), problems


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
