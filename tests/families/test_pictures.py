"""Models that see pictures give the numbers of Hugging Face transformers, however steps are cut and prefixes shared.

Texts have none, one or two pictures; some share a picture, a text before it, or both.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from PIL import Image

import olive_ext
from olive_ext.check.model_check import Findings, check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import ConfigError, LostRequestsError, OliveExtError, TaskError
from olive_ext.media.encoder import MediaEncoder
from olive_ext.media.graphs import ItemGraphs
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.media_types import Modality
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports.media import MEDIA_FAMILIES, media_export, plain_encoder_export
from tests.families.pictures import PictureReference, feature_rows, picture
from tests.refusals import refused

IN_DEFAULT_RUN = {"qwen2_5_vl"}
PICTURES = [picture(0, 40, 40), picture(1, 60, 30), picture(2, 24, 70)]
Asked = tuple[str, str, Sequence[Image.Image]]


def _marked(family: str) -> object:
    return pytest.param(family, marks=pytest.mark.slow if family in IN_DEFAULT_RUN else pytest.mark.exporters)


@pytest.fixture(scope="module", params=map(_marked, MEDIA_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def _reference(family: str) -> PictureReference:
    return PictureReference(family, media_export(family)[1])


def _open(family: str, **engine: object) -> Session:
    return olive_ext.open(media_export(family)[0], engine=engine)


def _asked(family: str) -> list[Asked]:
    """16 targets behind three pictures, and two without one."""
    marker = MEDIA_FAMILIES[family].marker
    targets = (" blue stone", " of the garden number")
    asked: list[Asked] = [
        (f"Ann {verb} the {marker} and", target, [one])
        for one in PICTURES
        for verb in ("sees", "paints")
        for target in targets
    ]
    asked += [(f"{marker}", target, [PICTURES[1]]) for target in targets]
    pairs = [[PICTURES[0], PICTURES[1]], [PICTURES[0], PICTURES[0]]]
    asked += [(f"Ann sees the {marker} and {marker} here", " a letter", pair) for pair in pairs]
    return [*asked, ("Bob carries the heavy", " wheel", []), ("Ann sees the", " quiet engine", [])]


@cache
def _expected(family: str) -> list[list[float]]:
    return [_reference(family).score(*one) for one in _asked(family)]


@pytest.mark.parametrize(("num_slots", "chunk_size", "scoring"), [(1, 0, "rows"), (3, 128, "rows"), (2, 0, "tree")])
def test_targets_behind_pictures_within_1e_4_nats(family: str, num_slots: int, chunk_size: int, scoring: str) -> None:
    """A chunk of 0 tokens is one of the largest item's: each item has a chunk, and text what is left around it."""
    if scoring == "tree" and family == "qwen3_5":
        pytest.skip("states cannot be scored in tree batches")
    requests = [ScoringRequest(context, target, images=images) for context, target, images in _asked(family)]
    chunk_size = chunk_size or max(map(_reference(family).num_tokens, PICTURES))
    with _open(family, num_slots=num_slots, chunk_size=chunk_size, scoring=scoring) as session:
        found = session.loglikelihood(requests)
        execution, counters = session.describe_execution(), session.counters
    for output, expected in zip(found, _expected(family), strict=True):
        assert output.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert execution["images_encoded"] == len(PICTURES)
    assert counters.tokens_fed <= 1.05 * counters.tokens_distinct < counters.tokens_naive


def test_greedy_answers_are_transformers(family: str) -> None:
    """Some prompts end with the picture, and are asked twice."""
    reference, marker = _reference(family), MEDIA_FAMILIES[family].marker
    asked = [(text, one) for text in (f"Ann sees the {marker} and", marker, marker) for one in PICTURES]
    requests = [GenerationRequest(text, max_new_tokens=12, images=[one]) for text, one in asked]
    with _open(family, num_slots=3) as session:
        outputs = session.generate([*requests, GenerationRequest("Ann sees the", max_new_tokens=12)])
    for (text, one), output in zip(asked, outputs, strict=False):
        assert reference.continues(reference.ids(text, [one]), [one], output.tokens, 12)
    assert reference.continues(reference.ids("Ann sees the", []), [], outputs[-1].tokens, 12)


@pytest.mark.slow
def test_prompt_that_ends_with_a_picture_is_answered() -> None:
    """No token stands behind LLaVA's placeholders."""
    reference, prompts = _reference("llava_clip"), ["<image>", "Ann sees the <image>"]
    with _open("llava_clip", num_slots=2, chunk_size=17) as session:
        outputs = session.generate([GenerationRequest(text, max_new_tokens=6, images=PICTURES[:1]) for text in prompts])
    for text, output in zip(prompts, outputs, strict=True):
        assert reference.continues(reference.ids(text, PICTURES[:1]), PICTURES[:1], output.tokens, 6)


def test_text_opens_no_encoder(family: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(media_export(family)[0], package)
    marker = MEDIA_FAMILIES[family].marker
    encoder = resolve(ModelSettings(model=str(package))).files.companions["vision"].graph
    with olive_ext.open(package) as session:
        encoder.unlink()
        assert session.loglikelihood([("Ann sees the", " blue stone")])[0].token_count == 2
        with pytest.raises(OliveExtError, match=encoder.name):
            session.loglikelihood([ScoringRequest(marker, " stone", images=PICTURES[:1])])


@pytest.mark.slow
def test_folder_of_graphs_by_hand_gives_the_numbers_of_the_package(tmp_path: Path) -> None:
    source, _ = media_export("llava_clip")
    renamed = {"vision.onnx": "eyes.onnx", "embedding.onnx": "words.onnx", "genai_config.json": None}
    for file in source.iterdir():
        if (name := renamed.get(file.name, file.name)) is not None:
            shutil.copy(file, tmp_path / name)
    asked = [ScoringRequest(context, target, images=images) for context, target, images in _asked("llava_clip")]
    for components in ({}, {"vision": "eyes.onnx", "embedding": "words.onnx"}):
        with olive_ext.open(tmp_path, components=components) as session:
            found = session.loglikelihood(asked)
        for output, expected in zip(found, _expected("llava_clip"), strict=True):
            assert output.token_logprobs == pytest.approx(expected, abs=1e-4)


def test_features_are_transformers(family: str) -> None:
    model = resolve(ModelSettings(model=str(media_export(family)[0])))
    assert model.media is not None
    (spec,) = model.media.encoders
    items = [MediaProcessor(model.media, model.files).item(Modality.IMAGE, one) for one in PICTURES]
    graph = str(spec.files.graph)
    encoder = MediaEncoder(spec, lambda: ort.InferenceSession(graph), ItemGraphs(Device("cpu"), ort.InferenceSession))
    for one, item in zip(PICTURES, items, strict=True):
        expected = _reference(family).features([one]).numpy()
        np.testing.assert_allclose(
            feature_rows(encoder.features(item))[0], expected, atol=2e-5 * np.abs(expected).max()
        )


def test_messages_hold_pictures_or_leave_them_to_the_list(family: str) -> None:
    marker = MEDIA_FAMILIES[family].marker
    text = f"<user>{marker}what?<assistant>"
    held = [{"role": "user", "content": [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "what?"}]}]
    open_ = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    ids = _reference(family).tokenizer.encode(text, add_special_tokens=False)
    with _open(family) as session:
        outputs = session.loglikelihood(
            [
                ScoringRequest(held, [50, 60]),
                ScoringRequest(open_, [50, 60], images=[PICTURES[0]]),
                ScoringRequest(ids, [50, 60], images=[PICTURES[0]]),
            ]
        )
        assert session.counters.tokens_fed == session.counters.tokens_naive // 3
    assert len({output.logprob for output in outputs}) == 1


@pytest.mark.parametrize(
    ("context", "images", "error"),
    [
        ("{marker}", [], "gives 0 pictures, and its prompt has 1 of the marker"),
        ("plain", PICTURES[:1], "gives 1 picture, and its prompt has 0"),
        ("{marker}{marker}", PICTURES, "gives 3 pictures, and its prompt has 2"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            [],
            "1 part for a picture, 1 of them without one, and the request gives 0 pictures beside them",
        ),
        ([{"role": "user", "content": [{"type": "video"}]}], [], "a part of the type 'video'"),
        ([{"role": "user", "content": [{"type": "audio", "audio": b""}]}], [], "gives 1 sound; this model takes none"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], [], r"'image_url' without 'image_url\.url'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}],
            [],
            "only data URLs",
        ),
        ("{marker}" + " word" * 600, PICTURES[:1], "pictures are not cut"),
    ],
)
@pytest.mark.slow
def test_request_that_gives_other_pictures_than_it_needs_is_refused(
    context: object, images: list[Image.Image], error: str
) -> None:
    name = next(iter(IN_DEFAULT_RUN))
    if isinstance(context, str):
        context = context.format(marker=MEDIA_FAMILIES[name].marker)
    with _open(name) as session:
        request = ScoringRequest(context, " stone", images=images)  # type: ignore[arg-type]
        with pytest.raises((TaskError, ConfigError, LostRequestsError), match=error):
            session.loglikelihood([request])


@pytest.mark.slow
def test_text_that_holds_a_placeholder_is_refused_and_costs_itself_alone() -> None:
    """The embedding graph would read features in its place, and none are there."""
    name = next(iter(IN_DEFAULT_RUN))
    marker = MEDIA_FAMILIES[name].marker
    error = r"request 1 has no answer: a text holds '<\|image_pad\|>' .* reads a picture"
    good = ScoringRequest("Ann sees", " blue stone")
    with _open(name) as session:
        for images in ([], PICTURES[:1]):
            bad = ScoringRequest(f"Ann {marker * len(images)} sees", f" the {marker} here", images=images)
            with pytest.raises(LostRequestsError, match=error):
                session.loglikelihood([good, bad])
        with pytest.raises(LostRequestsError, match=error):
            session.loglikelihood_rolling(["Ann sees", f"Ann sees the {marker} here"])


@pytest.mark.exporters
def test_rows_behind_a_shorter_first_one_are_answered_in_place() -> None:
    """mobius' Gemma 4 for WebGPU takes the first row's length for that of all."""
    package, _ = media_export("gemma4_vl", "f32", "webgpu")
    asked = [GenerationRequest(list(range(20, 20 + length)), max_new_tokens=4) for length in (5, 60, 33, 7)]
    answers = []
    for num_slots in (1, 3):
        with olive_ext.open(package, execution_provider="cpu", engine={"num_slots": num_slots}) as session:
            answers.append([output.tokens for output in session.generate(asked)])
    assert answers[0] == answers[1]


@pytest.mark.exporters
def test_placeholder_of_a_model_with_other_markers_is_refused_in_a_prompt() -> None:
    with _open("gemma3") as session:
        for context, images in (("a <image_soft_token>", []), ("<start_of_image><image_soft_token>", PICTURES[:1])):
            with pytest.raises(LostRequestsError, match="holds '<image_soft_token>'"):
                session.loglikelihood([ScoringRequest(context, " stone", images=images)])


@pytest.mark.slow
def test_picture_of_more_tokens_than_a_chunk_may_have_loses_its_request_alone() -> None:
    (name,) = IN_DEFAULT_RUN
    largest = max(map(_reference(name).num_tokens, PICTURES))
    asked = [ScoringRequest(MEDIA_FAMILIES[name].marker, " stone", images=[one]) for one in PICTURES]
    answered: list[int] = []
    with _open(name, chunk_size=largest - 1) as session, pytest.raises(LostRequestsError) as caught:
        session.loglikelihood(asked, on_result=lambda place, _: answered.append(place))
    too_large = [place for place, one in enumerate(PICTURES) if _reference(name).num_tokens(one) == largest]
    words = f"a picture takes {largest} tokens and is fed in one step: 'engine.chunk_size' = {largest - 1} allows fewer"
    assert sorted(caught.value.lost) == too_large
    assert all(words in reason for reason in caught.value.lost.values())
    assert sorted([*answered, *too_large]) == list(range(len(PICTURES)))


def _checked(package: Path, **given: object) -> Findings:
    return check_model(EvaluationConfig.parse({"model": {"path": str(package)}, "tasks": ["a"], **given}))


TOO_SMALL = "a picture takes 16 tokens and is fed in one step: 'engine.chunk_size' = 15 allows fewer"


@pytest.mark.slow
def test_chunk_that_no_picture_of_the_model_fits_into_is_told_with_the_first_and_texts_run() -> None:
    path = plain_encoder_export("f32", "default")
    with olive_ext.open(path, engine={"chunk_size": 15}) as session:
        assert session.loglikelihood([("Ann sees the", " blue stone")])[0].token_count == 2
        with pytest.raises(LostRequestsError, match=TOO_SMALL):
            session.loglikelihood([ScoringRequest("<image>", " stone", images=PICTURES[:1])])
    findings = _checked(path, engine={"chunk_size": 15})
    assert findings.problems == []
    assert f"{TOO_SMALL}  (text needs no such step)" in findings.text()


@pytest.mark.slow
def test_chunk_that_no_picture_of_the_model_fits_into_is_refused_when_all_shapes_are_to_be_run() -> None:
    path, engine = plain_encoder_export("f32", "webgpu"), {"chunk_size": 15, "strict_shapes": True}
    with pytest.raises(ConfigError, match=TOO_SMALL):
        olive_ext.open(path, execution_provider="cpu", engine=engine)
    assert _checked(path, engine=engine, execution_provider="cpu").problems == [TOO_SMALL]


@pytest.mark.slow
def test_encoder_that_genai_config_names_and_that_is_missing_is_told_and_texts_run(tmp_path: Path) -> None:
    package = Path(shutil.copytree(plain_encoder_export("f32", "default"), tmp_path / "package"))
    name = json.loads((package / "genai_config.json").read_text())["model"]["vision"]["filename"]
    (package / name).unlink()
    words = f"genai_config.json names '{name}' for model.vision.filename; '{package / name}' does not exist"
    findings = _checked(package)
    assert findings.problems == []
    assert f"{words}  (text runs without encoders)" in findings.text()
    with olive_ext.open(package) as session:
        assert session.loglikelihood([("Ann sees the", " blue stone")])[0].token_count == 2
        with refused(TaskError, "unsupported", holds=("1", words)):
            session.loglikelihood([ScoringRequest("<image>", " stone", images=PICTURES[:1])])


@pytest.mark.slow
def test_check_tells_of_pictures_where_the_tokenizer_is_broken(tmp_path: Path) -> None:
    package = Path(shutil.copytree(plain_encoder_export("f32", "default"), tmp_path / "package"))
    whole = _checked(package).text()
    assert re.search(r"image placeholder +\d+ '<image>'", whole)
    (package / "tokenizer.json").write_text("{", encoding="utf-8")
    findings = _checked(package)
    assert len(findings.problems) == 1
    assert "tokenizer" in findings.problems[0]
    assert re.search(r"image placeholder +\d+\n", findings.text())
    assert re.findall("(image features .*)", findings.text()) == re.findall("(image features .*)", whole)


@pytest.mark.exporters
def test_text_is_shared_and_batched_where_pictures_see_both_ways() -> None:
    """A decoder in which a picture's tokens see each other does as any other with what has no picture."""
    stems = ("Ann sees the quiet engine and ", "Bob carries the heavy " * 3)
    text = [
        ScoringRequest(stem + words, target)
        for stem in stems
        for words in ("a", "the")
        for target in (" wheel", " stone")
    ]
    alone = []
    with _open("gemma4_seen", num_slots=1) as session:
        for request in text:
            alone.append(session.loglikelihood([request])[0].logprob)
            session.release_memory()
        notes = session.describe_execution()["notes"]
    assert any("4 sliding layers beyond the window of 16" in note for note in notes)
    with _open("gemma4_seen", num_slots=3) as session:
        found = [output.logprob for output in session.loglikelihood(text)]
        counters = session.counters
        assert session.describe_execution()["batching"] == "alike"
    assert found == pytest.approx(alone, abs=1e-5)
    assert counters.tokens_fed == counters.tokens_distinct < counters.tokens_naive / 3
    assert counters.steps < counters.tokens_fed / 4
