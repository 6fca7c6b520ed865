"""Models that take sound among their tokens give the numbers of Hugging Face transformers, however steps are cut and
prefixes shared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnxruntime as ort
import pytest
from lm_eval.api.instance import Instance

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.config import ModelSettings
from olive_ext.errors import OliveExtError, TaskError
from olive_ext.media.encoder import MediaEncoder
from olive_ext.media.graphs import ItemGraphs
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.media_types import Modality
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.families.pictures import feature_rows, picture
from tests.families.sounds import Sound, SoundReference, sound
from tests.refusals import refused

SOUNDS = [sound(0, 9000), sound(1, 24321), sound(2, 50000)]
Asked = tuple[str, str, Sequence[Sound]]
MARKS = {"qwen3_asr": pytest.mark.slow}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=MARKS.get(name, pytest.mark.exporters)) for name in SOUND_FAMILIES]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def _reference(family: str) -> SoundReference:
    return SoundReference(family, media_export(family)[1])


def _open(family: str, **engine: object) -> Session:
    return olive_ext.open(media_export(family)[0], engine=engine)


def _asked(family: str) -> list[Asked]:
    """12 targets behind three sounds, and one without."""
    marker = SOUND_FAMILIES[family].marker
    asked: list[Asked] = [
        (f"Ann {verb} the {marker} and", target, [one])
        for one in SOUNDS
        for verb in ("hears", "paints")
        for target in (" blue stone", " of the garden number")
    ]
    return [*asked, ("Bob carries the heavy", " wheel", [])]


@cache
def _expected(family: str) -> list[list[float]]:
    return [_reference(family).score(*one) for one in _asked(family)]


@pytest.mark.parametrize(("num_slots", "chunk_size", "scoring"), [(1, 0, "rows"), (3, 128, "rows"), (2, 0, "tree")])
def test_targets_behind_sounds_within_2e_4_nats(family: str, num_slots: int, chunk_size: int, scoring: str) -> None:
    """A chunk of 0 tokens is one of the largest item's: each item has a chunk, and text what is left around it."""
    requests = [ScoringRequest(context, target, audio=sounds) for context, target, sounds in _asked(family)]
    chunk_size = chunk_size or max(map(_reference(family).num_tokens, SOUNDS))
    with _open(family, num_slots=num_slots, chunk_size=chunk_size, scoring=scoring) as session:
        found = session.loglikelihood(requests)
        execution, counters = session.describe_execution(), session.counters
    for output, expected in zip(found, _expected(family), strict=True):
        assert output.token_logprobs == pytest.approx(expected, abs=2e-4)
    assert execution["sounds_encoded"] == len(SOUNDS)
    assert counters.tokens_fed <= 1.05 * counters.tokens_distinct < counters.tokens_naive


def test_greedy_answers_are_transformers(family: str) -> None:
    reference = _reference(family)
    text = f"Ann hears the {reference.marker} and"
    with _open(family, num_slots=3) as session:
        outputs = session.generate([GenerationRequest(text, max_new_tokens=12, audio=[one]) for one in SOUNDS])
    for one, output in zip(SOUNDS, outputs, strict=True):
        assert reference.continues(reference.ids(text, [one]), [one], output.tokens, 12)


def test_features_are_transformers_without_those_of_padding(family: str) -> None:
    model = resolve(ModelSettings(model=str(media_export(family)[0])))
    assert model.media is not None
    spec = next(spec for spec in model.media.encoders if spec.modality is Modality.AUDIO)
    graph = str(spec.files.graph)
    encoder = MediaEncoder(spec, lambda: ort.InferenceSession(graph), ItemGraphs(Device("cpu"), ort.InferenceSession))
    processor = MediaProcessor(model.media, model.files)
    for one in SOUNDS:
        expected = _reference(family).features([one]).numpy()
        (found,) = feature_rows(encoder.features(processor.item(Modality.AUDIO, one)))
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_messages_hold_sounds_or_leave_them_to_the_list(family: str) -> None:
    held = [{"role": "user", "content": [{"type": "audio", "audio": SOUNDS[0]}, {"type": "text", "text": "what?"}]}]
    open_ = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "what?"}]}]
    marker = SOUND_FAMILIES[family].marker
    ids = _reference(family).tokenizer.encode(f"<user>{marker}what?<assistant>", add_special_tokens=False)
    asked = [
        ScoringRequest(held, [50, 60]),
        ScoringRequest(open_, [50, 60], audio=[SOUNDS[0]]),
        ScoringRequest(ids, [50, 60], audio=[SOUNDS[0]]),
    ]
    with _open(family) as session:
        outputs = session.loglikelihood(asked)
        assert session.counters.tokens_fed == session.counters.tokens_naive // 3
    assert len({output.logprob for output in outputs}) == 1


def test_requests_of_lm_eval_with_sounds_are_scored_and_answered(family: str) -> None:
    """As `doc_to_audio` gives them; a template gets a part for each "<audio>"."""
    given = [{"audio": [{"array": samples, "sampling_rate": rate}]} for samples, rate in SOUNDS]
    text, target = "Ann hears the {} and", " blue stone"
    scored = [Instance("loglikelihood", {}, (text.format("<audio>"), target, one), 0) for one in given]
    asked = [Instance("generate_until", {}, (text.format("<audio>"), {"max_gen_toks": 6}, one), 0) for one in given]
    with OrtLM(str(media_export(family)[0])) as lm:
        assert lm.session.media is not None
        marker = lm.session.media.marker_text(Modality.AUDIO)
        scores, texts = lm.loglikelihood(scored), lm.generate_until(asked)
        context, whole = (lm.tok_encode(part) for part in (text.format(marker), text.format(marker) + target))
        expected = lm.session.loglikelihood(
            [ScoringRequest(context, whole[len(context) :], audio=[one]) for one in SOUNDS]
        )
        outputs = lm.session.generate([GenerationRequest(context, max_new_tokens=6, audio=[one]) for one in SOUNDS])
        shown = lm.apply_chat_template([{"role": "user", "content": "what is <audio>?"}])
        with refused(TaskError, "unknown_name"):
            lm.loglikelihood([Instance("loglikelihood", {}, ("a", " b", {"video": [SOUNDS[0]]}), 0)])
    assert [score for score, _ in scores] == pytest.approx([output.logprob for output in expected], abs=1e-5)
    assert texts == [output.text for output in outputs]
    assert len({score for score, _ in scores}) == len(SOUNDS)
    assert shown == f"<user>what is {SOUND_FAMILIES[family].marker}?<assistant>"


@pytest.mark.exporters
def test_picture_and_sound_share_a_prompt() -> None:
    reference, (samples, rate) = _reference("gemma4_any"), SOUNDS[0]
    text, image = "Ann sees <|image|> and hears <|audio|> here", picture(0, 40, 40)
    with _open("gemma4_any") as session:
        whole, parts = session.loglikelihood(
            [
                ScoringRequest(text, " blue stone", images=[image], audio=[(samples, rate)]),
                ScoringRequest(text.replace("<|image|>", ""), " blue stone", audio=[(samples, rate)]),
            ]
        )
        execution = session.describe_execution()
    assert (execution["images_encoded"], execution["sounds_encoded"]) == (1, 1)
    assert parts.token_logprobs == pytest.approx(
        reference.score(text.replace("<|image|>", ""), " blue stone", [SOUNDS[0]]), abs=2e-4
    )
    assert whole.logprob != pytest.approx(parts.logprob, abs=1e-2)


@pytest.mark.parametrize(
    ("context", "given", "error"),
    [
        ("{marker}", [], "gives 0 sounds, and its prompt has 1 of the marker"),
        ("plain", SOUNDS[:1], "gives 1 sound, and its prompt has 0"),
        ("{marker}", [(np.zeros(0, np.float32), 16000)], "has no samples"),
        ("{marker}", [(np.zeros(800, np.float32), 8000)], "8000 samples a second; this model takes 16000"),
        ("{marker}", [sound(0, 50 * 16000)], "cut"),
    ],
)
def test_sound_that_is_not_taken_is_refused_in_one_line(
    family: str, context: str, given: Sequence[Sound], error: str
) -> None:
    marker = SOUND_FAMILIES[family].marker
    request = ScoringRequest(context.format(marker=marker), " stone", audio=given)
    with _open(family) as session, pytest.raises((TaskError, OliveExtError), match=error):
        session.loglikelihood([request])


@pytest.mark.exporters
def test_sound_of_which_the_extractor_would_drop_the_end_is_refused() -> None:
    model = resolve(ModelSettings(model=str(media_export("gemma4_any")[0])))
    assert model.media is not None
    with pytest.raises(TaskError, match=r"a sound of 31\.0 s is longer than 30\.0 s"):
        MediaProcessor(model.media, model.files).item(Modality.AUDIO, sound(0, 31 * 16000))
