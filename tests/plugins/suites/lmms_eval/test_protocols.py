"""Protocols of lmms-eval on local documents: answers and numbers are those of its own transformers class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

pytest.importorskip("lmms_eval")

import lmms_eval.tasks
from lmms_eval.api.instance import Instance
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.models import get_model
from lmms_eval.tasks.ocrbench.utils import OCRBench_score
from lmms_eval.utils import load_yaml_config

from olive_ext.errors import TaskError
from olive_ext.plugins.suites.lmms_eval.ort_lmms import OrtChat, OrtSimple
from tests.exports.media import media_export
from tests.families.pictures import PictureReference
from tests.plugins.suites.lmms_eval.local_documents import SPLITS, WORDS, drawn, write

pytestmark = [pytest.mark.slow, pytest.mark.other_env]

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def reference() -> PictureReference:
    return PictureReference("llava", media_export("llava")[1])


@pytest.fixture(scope="module")
def theirs(reference: PictureReference, tmp_path_factory: pytest.TempPathFactory) -> Any:
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


def test_choices_behind_pictures_have_transformers_log_probabilities(ours: Any, reference: PictureReference) -> None:
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
    with pytest.raises(TaskError, match="task 'drawn', document 0: a part of its messages is of type 'video'"):
        model.generate_until([asked("generate_until", "", lambda _: video, {}, 0, "drawn", "test")])
    with pytest.raises(TaskError, match="several rounds"):
        model.generate_until_multi_round([asked("generate_until_multi_round")])
    with pytest.raises(TaskError, match="--force_simple"):
        model.loglikelihood([asked("loglikelihood", "", " a", None, 0, "drawn", "test")])
