"""lm-eval's tasks with pictures: answers are hf-multimodal's, and choices are scored as transformers scores them."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.hf_vlms import HFMultimodalLM
from lm_eval.tasks import TaskManager
from PIL import Image

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.errors import LostRequestsError
from tests.exports.media import media_export
from tests.families.pictures import MediaReference, picture
from tests.refusals import refused

TASKS = Path(__file__).parents[2] / "recipes" / "vision" / "tasks"
NUM_DOCUMENTS = 8


@cache
def _reference() -> MediaReference:
    return MediaReference("llava", media_export("llava")[1])


@pytest.fixture(scope="module")
def lm() -> Iterator[OrtLM]:
    with OrtLM(str(media_export("llava")[0]), engine={"num_slots": 4}) as opened:
        yield opened


def _evaluate(model: Any, task: str) -> dict[str, Any]:
    found = simple_evaluate(
        model,
        tasks=[task],
        limit=NUM_DOCUMENTS,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    return dict(found)


@pytest.mark.long
def test_answers_are_those_of_hf_multimodal(lm: OrtLM, tmp_path: Path) -> None:
    reference = _reference()
    processor = transformers.LlavaProcessor(
        reference.processor, reference.tokenizer, patch_size=8, vision_feature_select_strategy="full"
    )
    processor.save_pretrained(tmp_path)
    reference.model.name_or_path = str(tmp_path)  # where it looks for the processor
    hf = HFMultimodalLM(pretrained=reference.model, batch_size=1)
    results = [_evaluate(model, "shapes_answer")["samples"]["shapes_answer"] for model in (hf, lm)]
    answers = [[sample["resps"] for sample in samples] for samples in results]
    assert len(answers[1]) == NUM_DOCUMENTS
    assert len({str(answer) for answer in answers[1]}) > 1  # they depend on the picture
    assert answers[1] == answers[0]


def test_choices_behind_pictures_have_transformers_log_probabilities(lm: OrtLM) -> None:
    before = lm.session.describe_execution()
    samples = _evaluate(lm, "shapes_colour")["samples"]["shapes_colour"]
    after = lm.session.describe_execution()
    drawn = runpy.run_path(str(TASKS / "shapes.py"))["choices"]()["test"]["image"]
    for sample in samples:
        for answer, arguments in zip(sample["filtered_resps"], sample["arguments"], strict=True):
            expected = _reference().score(arguments[0], arguments[1], [drawn[sample["doc_id"]]])
            assert answer[0] == pytest.approx(sum(expected), abs=1e-4)
    assert after["images_encoded"] - before.get("images_encoded", 0) <= NUM_DOCUMENTS
    counters = [execution["counters"] for execution in (before, after)]
    fed, distinct = (counters[1][name] - counters[0][name] for name in ("tokens_fed", "tokens_distinct"))
    assert fed <= 1.05 * distinct


def test_pictures_are_limited_and_resized_as_asked(tmp_path: Path) -> None:
    images = [picture(0, 40, 20), picture(1, 20, 20)]
    images[0].save(tmp_path / "0.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    given = (images, [str(tmp_path / "0.png"), images[1]], [str(tmp_path / "1.png"), images[1]])
    asked = [("<image> and <image>", {"until": ["."], "max_gen_toks": 4}, {"visual": list(one)}) for one in given]
    requests = [Instance("generate_until", {}, one, 0, ("named", place, 1)) for place, one in enumerate(asked)]
    with OrtLM(str(media_export("llava")[0]), max_images=1, image_max_side=10) as lm:
        with refused(LostRequestsError, "incomplete", holds="2"):
            lm.generate_until(requests, disable_tqdm=True)  # lm-eval would take nothing for an answer
        lm.lost.is_read = True
        found = lm.generate_until(requests, disable_tqdm=True)
        same = lm.session.generate([_alone(images[0].resize((10, 5), Image.Resampling.BICUBIC))])[0]
        assert lm.session.describe_execution()["images_encoded"] == 1
        assert [f"'{tmp_path / '1.png'}'" in one.reason for one in lm.lost] == [True]
    assert found[:2] == [same.text] * 2


def _alone(image: Image.Image) -> Any:
    from olive_ext.session.requests import GenerationRequest

    return GenerationRequest("<image> and ", max_new_tokens=4, stop=["."], images=[image])


def test_chat_message_holds_pictures_where_the_text_has_them(lm: OrtLM) -> None:
    text = lm.apply_chat_template([{"role": "user", "content": "a <image> b <image>"}])
    assert text == "<user>a <image> b <image><assistant>"
    with OrtLM(session=lm.session, interleave=False, max_images=1) as other:
        text = other.apply_chat_template([{"role": "user", "content": "a <image> b <image>"}])
    assert text == "<user><image>a  b <assistant>"
