"""Documents of few-shot tasks that hold arrays and pictures: lm-eval compares them with `!=`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask
from PIL import Image

from olive_ext.backends.evaluated_task import evaluated
from olive_ext.media.pictures import media_digest


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
    task: Any = evaluated("t", Shots)(ContextSampler(documents).set_rnd(1))
    found = task.fewshot_context(own)
    assert {id(document) for document in found} == {id(one) for one in documents if one is not documents[2]}


def test_digest_of_what_a_document_holds_sees_every_number() -> None:
    for make in (np.asarray, torch.as_tensor):
        numbers = [make(np.where(np.arange(5000) == place, 1.0, 0.0)) for place in (2000, 2001)]
        assert media_digest([numbers[0]]) != media_digest([numbers[1]])
