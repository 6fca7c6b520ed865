"""Protocols of lmms-eval on local documents: answers and numbers are those of its own transformers class. Sounds in the
forms that its tasks give them: scores and answers are those of transformers. The command `python -m lmms_eval --model
olive_ext`, in a process of its own, on a task in a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("lmms_eval")

import lmms_eval.tasks
from lmms_eval.api.instance import Instance
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.models import get_model
from lmms_eval.tasks.ocrbench.utils import OCRBench_score
from lmms_eval.utils import load_yaml_config

from olive_ext.errors import LostRequestsError, TaskError
from olive_ext.plugins.suites.lmms_eval.ort_lmms import OrtChat, OrtSimple
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.families.pictures import RATE, MediaReference, sound
from tests.plugins.suites.lmms_eval.local_documents import SPLITS, WORDS, drawn, write

pytestmark = pytest.mark.other_env

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def reference() -> MediaReference:
    return MediaReference("llava", media_export("llava")[1])


@pytest.fixture(scope="module")
def theirs(reference: MediaReference, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lmms-eval's LLaVA, with the weights of the export in fp32."""
    folder = tmp_path_factory.mktemp("llava")
    reference.model.save_pretrained(folder)
    transformers.LlavaProcessor(
        reference.processor,
        reference.tokenizer,
        patch_size=8,
        vision_feature_select_strategy="full",
        chat_template=reference.tokenizer.chat_template,
    ).save_pretrained(folder)
    model = get_model("llava_hf")(pretrained=str(folder), device="cpu", device_map="cpu", dtype="float32")
    model._model = reference.model  # computes what the export is known to compute
    model.clean = lambda: None  # it is asked again
    return model


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    model = get_model("olive_ext")(str(media_export("llava")[0]), engine={"num_slots": 4})
    close, model.clean = model.clean, lambda: None
    yield model
    close()


def evaluated(model: Any, task: str, documents: Path, folder: Path) -> tuple[list[str], dict[str, float]]:
    """(answers, metrics) of `task` on the local documents."""
    for kind in OCRBench_score:
        OCRBench_score[kind] = 0  # lmms-eval adds up over evaluations of one process
    os.chdir(folder)  # where lmms-eval writes submissions
    protocol = load_yaml_config(str(Path(lmms_eval.tasks.__file__).parent / task.removesuffix("_val") / f"{task}.yaml"))
    local = {"dataset_path": str(documents), "dataset_name": None, "dataset_kwargs": {}}
    kind = ConfigurableTask if model.is_simple else ConfigurableMessagesTask
    asked = kind(config={**protocol, **local}, model_name="olive_ext")
    settings = f"max_new_tokens={NEW_TOKENS},temperature=0"
    found = simple_evaluate(model, tasks=[asked], gen_kwargs=settings, bootstrap_iters=0)
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    values = found["results"][task].items()
    metrics = {name: value for name, value in values if isinstance(value, float) and "stderr" not in name}
    return [sample["filtered_resps"][0] for sample in samples], metrics


@pytest.mark.parametrize("task", SPLITS)
def test_answers_and_numbers_are_those_of_transformers(
    task: str, theirs: Any, ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References of half of the documents are what transformers answers, so that metrics are neither 0 nor 1."""
    monkeypatch.chdir(tmp_path)
    said, _ = evaluated(theirs, task, write(tmp_path / "asked", task, WORDS), tmp_path)
    references = [answer if place % 2 else word for place, (answer, word) in enumerate(zip(said, WORDS, strict=True))]
    documents = write(tmp_path / "scored", task, references)
    expected = evaluated(theirs, task, documents, tmp_path)
    found = evaluated(ours, task, documents, tmp_path)
    print(task, found)
    assert found == expected
    assert len(set(found[0])) > 1
    assert any(0 < value < 1 for value in found[1].values())


def asked(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, arguments, 0, {"task": "drawn", "doc_id": 0, "repeats": 1})


def test_choices_behind_pictures_have_transformers_log_probabilities(ours: Any, reference: MediaReference) -> None:
    """Of the simple class, behind two pictures, by a plain pass of transformers."""
    pictures = [drawn("north", 0), drawn("42", 1)]
    simple = OrtSimple(session=ours.session)
    simple.task_dict = {"drawn": {"test": [{}]}}
    rest = (lambda _: pictures, 0, "drawn", "test")
    found = simple.loglikelihood([asked("loglikelihood", "Which?", text, *rest) for text in (" a", " b c")])
    for (logprob, _), text in zip(found, (" a", " b c"), strict=True):
        expected = reference.score("<user><image><image>Which?<assistant>", text, pictures)
        assert logprob == pytest.approx(sum(expected), abs=1e-4)


def test_what_is_not_taken_is_refused_by_the_documents_name(ours: Any) -> None:
    """Videos, several rounds, and choices as messages, which lmms-eval does not make either."""
    model = OrtChat(session=ours.session)
    model.task_dict = {"drawn": {"test": [{}]}}
    video = [{"role": "user", "content": [{"type": "video", "url": "a.mp4"}]}]
    with pytest.raises(TaskError, match=r"'drawn', document 0: .*'video'"):
        model.generate_until([asked("generate_until", "", lambda _: video, {}, 0, "drawn", "test")])
    with pytest.raises(TaskError, match="several rounds"):
        model.generate_until_multi_round([asked("generate_until_multi_round")])
    with pytest.raises(TaskError, match="--force_simple"):
        model.loglikelihood([asked("loglikelihood", "", " a", None, 0, "drawn", "test")])


FAMILY = "qwen3_asr"
SOUNDS = [sound(0, 9000), sound(1, 24321)]


@pytest.fixture(scope="module")
def model() -> Iterator[OrtChat]:
    model = OrtChat(str(media_export(FAMILY)[0]), engine={"num_slots": 2})
    yield model
    model.clean()


def mapping(given: Any) -> Any:
    return {"path": None, "array": given[0], "sampling_rate": given[1]}


def decoder(given: Any) -> Any:
    """Has what datasets' AudioDecoder has: samples [channels, N] as a tensor."""
    samples = SimpleNamespace(data=torch.from_numpy(given[0])[None], sample_rate=given[1])
    return SimpleNamespace(get_all_samples=lambda: samples)


@pytest.mark.parametrize("form", [mapping, decoder])
def test_choices_behind_sounds_have_transformers_log_probabilities(model: OrtChat, form: Any) -> None:
    """Of two sounds, each behind a text of its own, as mappings and as what datasets decodes."""
    simple = OrtSimple(session=model.session)
    simple.task_dict = {"heard": {"test": SOUNDS}}
    rest = (lambda given: [form(given)], "heard", "test")
    requests = [asked("loglikelihood", "What?", " blue stone", rest[0], at, *rest[1:]) for at in range(len(SOUNDS))]
    reference = MediaReference(FAMILY, media_export(FAMILY)[1])
    prompt = f"<user>{SOUND_FAMILIES[FAMILY].marker}What?<assistant>"
    for (found, _), given in zip(simple.loglikelihood(requests), SOUNDS, strict=True):
        assert found == pytest.approx(sum(reference.score(prompt, " blue stone", [given])), abs=2e-4)


def test_a_sound_in_messages_is_answered_as_one_by_the_simple_class(model: OrtChat) -> None:
    """lmms-eval's own messages call samples a video; files that are no WAV are refused as sounds, not as pictures."""
    settings = {"max_new_tokens": 5, "temperature": 0}
    simple = OrtSimple(session=model.session)
    model.task_dict = simple.task_dict = {"heard": {"test": [{}]}}
    visuals = [mapping(SOUNDS[1])]
    turn = ConfigurableMessagesTask._build_user_turn(visuals, "What?")
    place = (0, "heard", "test")
    (chat,) = model.generate_until([asked("generate_until", "", lambda _: turn, settings, *place)])
    (one,) = simple.generate_until([asked("generate_until", "What?", settings, lambda _: visuals, *place)])
    assert chat.text == one.text
    assert chat.token_counts.output_tokens > 0
    for wrong, why in (("a.mp3", "sound 'a.mp3'"), ({"array": SOUNDS[0][0], "sampling_rate": RATE * 3}, "resample it")):
        given = [wrong]
        with pytest.raises(LostRequestsError, match=why):
            simple.generate_until([asked("generate_until", "What?", settings, lambda _, given=given: given, *place)])


TASK = """\
task: drawn
dataset_path: {documents}
test_split: validation
output_type: generate_until
doc_to_visual: !function drawn.visuals
doc_to_text: question
doc_to_target: answers
generation_kwargs: {{max_new_tokens: 4, temperature: 0, do_sample: false}}
process_results: !function drawn.length
metric_list:
  - {{metric: length, aggregation: mean, higher_is_better: true}}
"""
FUNCTIONS = """\
def visuals(document):
    return [document["image"]]

def length(document, results):
    return {"length": float(len(results[0]) > 0)}
"""


def test_the_command_finds_the_model_and_resumes_from_its_cache(tmp_path: Path) -> None:
    """By the entry point, with an answer to each of --limit documents; the second run asks for the two new ones."""
    documents, tasks = write(tmp_path / "documents", "docvqa_val", WORDS), tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "drawn.yaml").write_text(TASK.format(documents=documents))
    (tasks / "drawn.py").write_text(FUNCTIONS)
    command = [sys.executable, "-m", "lmms_eval", "--model", "olive_ext", "--include_path", str(tasks)]
    command += ["--model_args", f"pretrained={media_export('llava')[0]}", "--tasks", "drawn", "--batch_size", "auto"]
    command += ["--use_cache", "cache", "--log_samples"]
    found = []
    for limit, hits in ((3, "0 hits, 3 misses"), (5, "3 hits, 3 from shared DB, 2 misses")):
        asked = [*command, "--limit", str(limit), "--output_path", f"out{limit}"]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        assert hits in done.stdout + done.stderr
        (samples,) = (tmp_path / f"out{limit}").rglob("*_samples_drawn.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        found.append([line["filtered_resps"] for line in sorted(lines, key=lambda line: int(line["doc_id"]))])
    assert [len(answers) for answers in found] == [3, 5]
    assert found[1][:3] == found[0]
    assert all(answer for answers in found[1] for answer in answers)
