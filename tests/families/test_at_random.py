"""Requests with pictures, sounds and texts at random, under random settings, have the numbers of plain passes."""

from __future__ import annotations

import random

import numpy as np
import pytest

import olive_ext
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports import hf_model
from tests.exports.genai import whisper_export
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.families.at_random import FAMILIES, NATS, Draw, expected_scores, problems
from tests.families.pictures import PictureReference
from tests.families.plain_media import AUDIO, IMAGE
from tests.families.sounds import RATE, SoundReference, sound
from tests.families.test_encoder_decoder import Reference
from tests.families.test_speech import features

IN_DEFAULT_RUN = ("qwen2_5_vl", "llava_clip", "qwen3_asr")


def _marked(mark: pytest.MarkDecorator) -> list[object]:
    """The families, those of the default run with `mark`."""
    return [pytest.param(name, marks=mark if name in IN_DEFAULT_RUN else pytest.mark.exporters) for name in FAMILIES]


MARKED = _marked(pytest.mark.slow)
AT_LENGTH = [
    pytest.param(name, seed, marks=pytest.mark.long if name in IN_DEFAULT_RUN and seed < 12 else pytest.mark.exporters)
    for name in FAMILIES
    for seed in range(2, 30)
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", MARKED)
def test_answers_are_those_of_whole_passes(family: str, seed: int) -> None:
    settings, found = problems(family, seed)
    assert not found, f"seed {seed}: {settings}"


@pytest.mark.parametrize(("family", "seed"), AT_LENGTH)
def test_answers_are_those_of_whole_passes_at_length(family: str, seed: int) -> None:
    settings, found = problems(family, seed)
    assert not found, f"seed {seed}: {settings}"


@pytest.mark.parametrize("family", MARKED)
def test_whole_passes_are_transformers(family: str) -> None:
    """What the others are held against. (transformers fills sounds of one prompt up to the longest, and Qwen3-ASR's
    encoder there gives others than alone: so all are of one length here.)"""
    draw = Draw(family, 0)
    made = SoundReference if family in SOUND_FAMILIES else PictureReference
    reference, kind = made(family, media_export(family)[1]), AUDIO if family in SOUND_FAMILIES else IMAGE
    asked = [one for one in draw.requests(40) if one.form == "text" and set(one.text) & {IMAGE, AUDIO} <= {kind}]
    asked = [one for one in asked if kind == IMAGE or len({len(item[0]) for item in one.items}) < 2]  # type: ignore[arg-type]
    scored = [(one, target) for one in asked for target in one.targets]
    assert any(one.items for one, _ in scored)
    for one, target in scored:
        theirs = reference.score(one.text.replace(kind, reference.marker), target, one.items)
        np.testing.assert_allclose(expected_scores(draw.plain, one, target), theirs, atol=NATS)


@pytest.mark.parametrize(
    "seed", [pytest.param(at, marks=pytest.mark.long if at else pytest.mark.slow) for at in range(8)]
)
def test_speech_has_transformers_numbers(seed: int) -> None:
    rng = random.Random(seed)
    reference, words = Reference(hf_model("whisper")), ["old cat", "a", "river number 3", "stone", "the blue"]
    sounds = [sound(seed * 10 + at, rng.randint(1, 30 * RATE)) for at in range(3)]
    scored = [(rng.choice(sounds), rng.choice(words)) for _ in range(8)]
    asked = [(rng.choice(sounds), rng.randint(1, 8)) for _ in range(4)]
    engine = {
        "num_slots": rng.randint(1, 4),
        "chunk_size": rng.choice((1, 2, 256)),
        "graph": rng.choice(("scoring_head", "untouched")),
        "overlaps_steps": rng.choice(("auto", True)),
    }
    with olive_ext.open(whisper_export(), engine=engine) as session:
        scores = session.loglikelihood([ScoringRequest("", text, audio=[one]) for one, text in scored])
        answers = session.generate([GenerationRequest(audio=[one], max_new_tokens=most) for one, most in asked])
        targets = [session.tokenizer.encode_answer(text) for _, text in scored]
    for (one, _), target, score in zip(scored, targets, scores, strict=True):
        expected = reference.score(features(one[0]), [reference.start], target)
        np.testing.assert_allclose(score.token_logprobs, expected, atol=NATS, err_msg=str(engine))
    for (one, most), answer in zip(asked, answers, strict=True):
        assert reference.continues(features(one[0]), [reference.start], answer.tokens, most), engine
