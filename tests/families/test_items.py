"""Models that take pictures or sounds, beside the table of agreement: features, prompts in all their forms, requests
that are refused, packages of which a part is missing, and what is not encoded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.check.model_check import Findings, check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import ConfigError, LostRequestsError, OliveExtError, TaskError
from olive_ext.model import resolve
from olive_ext.model.types import Modality
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.agreement.asked import marker, pictures, sounds, with_items
from tests.agreement.packages import FEATURES, package
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, media_export, plain_encoder_export
from tests.exports.step_wide import padded_features
from tests.families.pictures import sound
from tests.refusals import refused

IN_DEFAULT_RUN = ("qwen2_5_vl", "qwen3_asr")


def _marked(*names: str) -> list[Any]:
    return [name if name in IN_DEFAULT_RUN else pytest.param(name, marks=pytest.mark.exporters) for name in names]


every_sound = pytest.mark.parametrize("name", _marked(*SOUND_FAMILIES))


def _open(name: str, **engine: object) -> Session:
    return olive_ext.open(media_export(name)[0], engine=engine)


@pytest.fixture(scope="module")
def open_once() -> Iterator[Callable[[str], Session]]:
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(_open(name)))


@pytest.mark.parametrize("name", _marked(*MEDIA_FAMILIES))
def test_text_opens_no_encoder(name: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(media_export(name)[0], tmp_path / "package"))
    encoder = resolve(ModelSettings(model=str(copy))).files.companions["vision"].graph
    with olive_ext.open(copy) as session:
        encoder.unlink()
        assert session.loglikelihood([("Ann sees the", " blue stone")])[0].token_count == 2
        with refused(OliveExtError, "no_access", holds=encoder.name):
            session.loglikelihood([ScoringRequest(marker(package(name)), " stone", images=pictures()[:1])])


Given = Callable[[], list[Any]]
Holds = str | tuple[str, ...]


def _message(**part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


NONE: Given = list
PICTURE_MISTAKES: list[tuple[Any, Given, str, Holds]] = [
    ("{marker}", NONE, "incomplete", ("0 pictures", "1 of the marker")),
    ("plain", lambda: pictures()[:1], "incomplete", ("1 picture", "has 0")),
    ("{marker}{marker}", pictures, "incomplete", ("3 pictures", "has 2")),
    (_message(type="image"), NONE, "incomplete", ("1 part for a picture", "1 of them without", "0 pictures")),
    (_message(type="video"), NONE, "wrong_value", "'video'"),
    (_message(type="audio", audio=b""), NONE, "unsupported", "1 sound"),
    (_message(type="image_url"), NONE, "wrong_value", "image_url.url"),
    (_message(type="image_url", image_url={"url": "https://x/y.png"}), NONE, "incomplete", "base64"),
    ("{marker}" + " word" * 600, lambda: pictures()[:1], "incomplete", ("2408 tokens", "1895")),
]
SOUND_MISTAKES: list[tuple[Any, Given, str, Holds]] = [
    ("{marker}", NONE, "incomplete", ("0 sounds", "1 of the marker")),
    ("plain", lambda: sounds()[:1], "incomplete", ("1 sound", "has 0")),
    ("{marker}", lambda: [(np.zeros(0, np.float32), 16000)], "incomplete", "[0]"),
    ("{marker}", lambda: [(np.zeros(800, np.float32), 8000)], "incomplete", ("8000", "16000")),
    ("{marker}", lambda: [sound(0, 50 * 16000)], "incomplete", "cut"),
]
MISTAKES = [
    *(("qwen2_5_vl", *mistake) for mistake in PICTURE_MISTAKES),
    *(
        pytest.param(name, *mistake, marks=() if name in IN_DEFAULT_RUN else pytest.mark.exporters)
        for name in SOUND_FAMILIES
        for mistake in SOUND_MISTAKES
    ),
]


@pytest.mark.parametrize(("name", "context", "given", "code", "holds"), MISTAKES)
def test_request_with_other_items_than_it_needs_is_refused(
    open_once: Callable[[str], Session], name: str, context: Any, given: Given, code: str, holds: Holds
) -> None:
    made = package(name)
    context = context.format(marker=marker(made)) if isinstance(context, str) else context
    with refused(OliveExtError, code, holds=holds):
        open_once(name).loglikelihood([ScoringRequest(context, " stone", **with_items(made, given()))])


def test_text_that_holds_a_placeholder_is_refused_and_costs_itself_alone() -> None:
    """The embedding graph would read features in its place, and none are there."""
    word, good = marker(package("qwen2_5_vl")), ScoringRequest("Ann sees", " blue stone")
    with _open("qwen2_5_vl") as session:
        for images in ([], pictures()[:1]):
            bad = ScoringRequest(f"Ann {word * len(images)} sees", f" the {word} here", images=images)
            with refused(LostRequestsError, "incomplete", holds=("request 1", "<|image_pad|>")):
                session.loglikelihood([good, bad])
        with refused(LostRequestsError, "incomplete", holds=("request 1", "<|image_pad|>")):
            session.loglikelihood_rolling(["Ann sees", f"Ann sees the {word} here"])


def _checked(path: Path, **given: object) -> Findings:
    return check_model(EvaluationConfig.parse({"model": {"path": str(path)}, "tasks": ["a"], **given}))


TOO_SMALL = ("16 tokens", "'engine.chunk_size' = 15")


def test_chunk_that_no_picture_of_the_model_fits_into_is_reported_with_the_first_and_texts_run() -> None:
    path = plain_encoder_export("f32", "default")
    with olive_ext.open(path, engine={"chunk_size": 15}) as session:
        assert session.loglikelihood([("Ann sees the", " blue stone")])[0].token_count == 2
        with refused(LostRequestsError, "incomplete", holds=TOO_SMALL):
            session.loglikelihood([ScoringRequest("<image>", " stone", images=pictures()[:1])])
    findings = _checked(path, engine={"chunk_size": 15})
    assert findings.problems == []
    assert all(word in findings.text() for word in TOO_SMALL)


def test_chunk_that_no_picture_of_the_model_fits_into_is_refused_when_all_shapes_are_to_be_run() -> None:
    path, engine = plain_encoder_export("f32", "webgpu"), {"chunk_size": 15, "strict_shapes": True}
    with refused(ConfigError, "wrong_value", holds=TOO_SMALL):
        olive_ext.open(path, execution_provider="cpu", engine=engine)
    (problem,) = _checked(path, engine=engine, execution_provider="cpu").problems
    assert all(word in problem for word in TOO_SMALL)


def test_encoder_that_genai_config_names_and_that_is_missing_is_reported_and_texts_run(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain_encoder_export("f32", "default"), tmp_path / "package"))
    name = json.loads((copy / "genai_config.json").read_text())["model"]["vision"]["filename"]
    (copy / name).unlink()
    facts = ("genai_config.json", f"'{name}'", "model.vision.filename", f"'{copy / name}'")
    findings = _checked(copy)
    assert findings.problems == []
    assert all(fact in findings.text() for fact in facts)
    with olive_ext.open(copy) as session:
        assert session.loglikelihood([("Ann sees the", " blue stone")])[0].token_count == 2
        with refused(TaskError, "unsupported", holds=("1", *facts)):
            session.loglikelihood([ScoringRequest("<image>", " stone", images=pictures()[:1])])


def test_check_says_what_pictures_need_where_the_tokenizer_is_broken(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain_encoder_export("f32", "default"), tmp_path / "package"))
    whole = _checked(copy).text()
    assert re.search(r"image placeholder +\d+ '<image>'", whole)
    (copy / "tokenizer.json").write_text("{", encoding="utf-8")
    findings = _checked(copy)
    assert len(findings.problems) == 1
    assert "tokenizer" in findings.problems[0]
    assert re.search(r"image placeholder +\d+\n", findings.text())
    assert re.findall("(image features .*)", findings.text()) == re.findall("(image features .*)", whole)


def test_encoder_that_lacks_one_of_several_features_is_reported_with_both() -> None:
    path = padded_features("mask", FEATURES[:1], FEATURES)
    facts = ("vision.onnx", "image_features, feature_mask", "image_features_of_layer_1")
    with refused(TaskError, "unsupported", holds=facts), olive_ext.open(path) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=pictures()[:1])])


@every_sound
def test_requests_of_lm_eval_with_sounds_are_scored_and_answered(name: str) -> None:
    """As `doc_to_audio` gives them; a template gets a part for each "<audio>"."""
    given = [{"audio": [{"array": samples, "sampling_rate": rate}]} for samples, rate in sounds()]
    text, target = "Ann hears the {} and", " blue stone"
    scored = [Instance("loglikelihood", {}, (text.format("<audio>"), target, one), 0) for one in given]
    asked = [Instance("generate_until", {}, (text.format("<audio>"), {"max_gen_toks": 6}, one), 0) for one in given]
    with OrtLM(str(media_export(name)[0])) as lm:
        assert lm.session.media is not None
        word = lm.session.media.marker_text(Modality.AUDIO)
        scores, texts = lm.loglikelihood(scored), lm.generate_until(asked)
        context, whole = (lm.tok_encode(part) for part in (text.format(word), text.format(word) + target))
        expected = lm.session.loglikelihood(
            [ScoringRequest(context, whole[len(context) :], audio=[one]) for one in sounds()]
        )
        outputs = lm.session.generate([GenerationRequest(context, max_new_tokens=6, audio=[one]) for one in sounds()])
        shown = lm.apply_chat_template([{"role": "user", "content": "what is <audio>?"}])
        with refused(TaskError, "unknown_name"):
            lm.loglikelihood([Instance("loglikelihood", {}, ("a", " b", {"video": [sounds()[0]]}), 0)])
    assert [score for score, _ in scores] == pytest.approx([output.logprob for output in expected], abs=1e-5)
    assert texts == [output.text for output in outputs]
    assert len({score for score, _ in scores}) == len(given)
    assert shown == f"<user>what is {SOUND_FAMILIES[name].marker}?<assistant>"


def test_components_of_a_model_package_give_the_numbers_of_its_folder(tmp_path: Path) -> None:
    """Decoder, encoder of pictures and what joins them are components of one variant each. Another encoder is another
    model, whose answers are not taken from a journal."""
    source, components = media_export("qwen2_5_vl")[0], {}
    for part in ("decoder", "vision_encoder", "embedding"):
        shutil.copytree(source / part, tmp_path / part / "cpu")
        variant = {"variant_directory": f"{part}/cpu", "executor_info": {"ort": {"model_file": "model.onnx"}}}
        components[part] = {"variants": {"cpu": {**variant, "ep": "CPUExecutionProvider"}}}
    for file in source.glob("*.j*"):
        shutil.copy(file, tmp_path / "decoder" / "cpu")
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 1, "components": components}))
    text = f"Ann sees the {marker(package('qwen2_5_vl'))} and"
    requests = [ScoringRequest(text, " blue stone", images=[one]) for one in pictures()[:2]]
    found = []
    for path in (source, tmp_path):
        with olive_ext.open(path) as session:
            found.append([output.logprob for output in session.loglikelihood(requests)])
    assert found[0] == found[1] != found[0][::-1]
    before = resolve(ModelSettings(model=str(tmp_path))).digest
    with (tmp_path / "vision_encoder" / "cpu" / "model.onnx").open("ab") as file:
        file.write(b"\x12\x00")  # a producer without a name
    assert resolve(ModelSettings(model=str(tmp_path))).digest != before
