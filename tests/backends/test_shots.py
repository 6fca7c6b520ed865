"""Examples of tasks with pictures: lm-eval gives a model those of the document alone; here the prompt has all, in its
order, each is encoded once, and choices have transformers' log-probabilities. lm-eval compares documents of few-shot
tasks that hold arrays and pictures with `!=`."""

from __future__ import annotations

import io
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from PIL import Image

from olive_ext.backends.evaluated_task import prepare
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.lm_eval_run import run_tasks
from olive_ext.backends.task_loading import SEEDS, load_tasks
from olive_ext.config import EvaluationSettings
from olive_ext.errors import LostRequestsError, TaskError
from olive_ext.media.pictures import media_digest
from tests.exports.media import CHAT_TEMPLATE, media_export
from tests.families.pictures import MediaReference
from tests.refusals import refused

TASKS = Path(__file__).parents[2] / "recipes" / "vision" / "tasks"
NUM_DOCUMENTS, NUM_SHOTS = 4, 2


@cache
def _reference() -> MediaReference:
    return MediaReference("llava", media_export("llava")[1])


@cache
def _drawn() -> list[dict[str, Any]]:
    return list(runpy.run_path(str(TASKS / "shapes.py"))["choices"]()["test"])


def _shots() -> list[list[dict[str, Any]]]:
    """Those that lm-eval's own sampler draws for each document, one behind the other, with its default seed."""
    sampler = ContextSampler(_drawn()).set_rnd(SEEDS["fewshot_random_seed"])
    return [list(sampler.sample(NUM_SHOTS)) for _ in range(NUM_DOCUMENTS)]


def _run(lm: OrtLM, *tasks: str, **values: Any) -> dict[str, Any]:
    given = {"num_fewshot": NUM_SHOTS, "limit": NUM_DOCUMENTS, "bootstrap_iters": 0, **values}
    settings = EvaluationSettings(tasks=list(tasks), include_path=str(TASKS), **given)
    loaded = load_tasks(list(tasks), str(TASKS))
    return run_tasks(lm, loaded, settings)


def test_pictures_of_examples_reach_the_prompt_in_its_order_and_are_encoded_once() -> None:
    own = ConfigurableTask.fewshot_context, ConfigurableTask.construct_requests
    with OrtLM(str(media_export("llava")[0]), engine={"num_slots": 4}) as lm:
        samples = _run(lm, "shapes_colour")["samples"]["shapes_colour"]
        execution = lm.session.describe_execution()
    pictures = set()
    for sample, shots in zip(sorted(samples, key=lambda sample: sample["doc_id"]), _shots(), strict=True):
        used = [*shots, _drawn()[sample["doc_id"]]]
        pictures |= {one["image"].tobytes() for one in used}
        for (answer, _), arguments in zip(sample["filtered_resps"], sample["arguments"], strict=True):
            context = str(arguments[0])
            assert [context.find(str(one["text"])) >= 0 for one in used] == [True] * len(used)
            assert context.count("<image>") == len(used)
            expected = _reference().score(context, str(arguments[1]), [one["image"] for one in used])
            assert answer == pytest.approx(sum(expected), abs=1e-4)
    assert len(pictures) > NUM_DOCUMENTS
    assert execution["images_encoded"] == len(pictures)
    assert (ConfigurableTask.fewshot_context, ConfigurableTask.construct_requests) == own


@pytest.mark.parametrize("multiturn", [False, True])
def test_examples_in_a_chat_template_have_their_pictures(multiturn: bool, tmp_path: Path) -> None:
    with OrtLM(str(media_export("llava")[0])) as lm:
        lm.tokenizer.chat_template = CHAT_TEMPLATE.replace("MARKER", "<image>")
        given = {"apply_chat_template": True, "fewshot_as_multiturn": multiturn}
        plain, shown = _run(lm, "shapes_answer"), _run(lm, "shapes_answer", **given)
        execution = lm.session.describe_execution()
    for found in (plain, shown):
        for sample in found["samples"]["shapes_answer"]:
            ((_, _, media),) = sample["arguments"]
            assert len(media["visual"]) == NUM_SHOTS + 1
    assert "<user>" in str(shown["samples"]["shapes_answer"][0]["arguments"])
    assert execution["images_encoded"] <= NUM_DOCUMENTS * (NUM_SHOTS + 1)


def _by_lm_eval(lm: OrtLM, **values: Any) -> None:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    given = {"num_fewshot": NUM_SHOTS, "limit": 2, "task_manager": manager, "bootstrap_iters": 0}
    simple_evaluate(lm, tasks=["shapes_answer"], **given, **values)


def test_lm_eval_itself_gives_no_pictures_of_examples_which_is_never_silently_wrong() -> None:
    """With `max_images` the question's picture would be taken for the first example's."""
    package = str(media_export("llava")[0])
    with OrtLM(package) as lm, refused(LostRequestsError, "incomplete", holds=("1", "3")):
        _by_lm_eval(lm)
    told = ("3", "'<image>'", "1", "'olive-ext evaluate'")
    with OrtLM(package, max_images=1) as lm:
        with refused(TaskError, "task", holds=told):
            _by_lm_eval(lm)
        lm.tokenizer.chat_template = CHAT_TEMPLATE.replace("MARKER", "<image>")
        with refused(TaskError, "task", holds=told):
            _by_lm_eval(lm, apply_chat_template=True)


def _cut_picture(shade: int) -> Image.Image:
    """It has a size, and pixels that cannot be read."""
    file = io.BytesIO()
    noise = np.random.default_rng(shade).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:-900]))


class Shots(ConfigurableTask):
    """A task whose prompts are its examples."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def fewshot_context(self, doc: Any) -> Any:
        return self.sampler.sample(n=4, eval_doc=doc)


@pytest.mark.parametrize(
    "held", [lambda number: np.full(2000, number), lambda number: torch.full((2000,), number), _cut_picture]
)
def test_document_is_no_example_of_itself_whatever_it_holds(held: Any) -> None:
    documents = [{"name": "a", "held": held(number)} for number in range(5)]
    own = {**documents[2], "held": held(2)} if held is not _cut_picture else documents[2]
    task = Shots(ContextSampler(documents).set_rnd(1))
    prepare({"t": task}, None, thinks=False)
    found = task.fewshot_context(own)
    assert {id(document) for document in found} == {id(one) for one in documents if one is not documents[2]}


def test_digest_of_what_a_document_holds_sees_every_number() -> None:
    for make in (np.asarray, torch.as_tensor):
        numbers = [make(np.where(np.arange(5000) == place, 1.0, 0.0)) for place in (2000, 2001)]
        assert media_digest([numbers[0]]) != media_digest([numbers[1]])
