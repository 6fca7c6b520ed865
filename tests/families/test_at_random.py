"""Requests with pictures, sounds and texts at random, under random settings, have the numbers of plain passes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.session.requests import ScoringRequest
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.exports.step_wide import ENCODER_FORMS, step_wide_encoder
from tests.families.at_random import FAMILIES, NATS, Asked, Draw, expected_scores, problems, prompt
from tests.families.pictures import PictureReference, picture
from tests.families.plain_media import AUDIO, IMAGE, PlainMedia
from tests.families.sounds import RATE, SoundReference, sound

IN_DEFAULT_RUN = ("qwen2_5_vl", "llava_clip", "qwen3_asr")


def _mark(name: str, seed: int) -> pytest.MarkDecorator:
    if name not in IN_DEFAULT_RUN or seed >= 12:
        return pytest.mark.exporters
    return pytest.mark.long if seed > 1 else pytest.mark.slow


MARKED = [pytest.param(name, marks=_mark(name, 0)) for name in FAMILIES]
SEEDS = [pytest.param(name, seed, marks=_mark(name, seed)) for name in FAMILIES for seed in range(30)]


@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_answers_are_those_of_whole_passes(family: str, seed: int) -> None:
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


TARGET = " blue stone"


@pytest.mark.slow
@pytest.mark.parametrize("form", ENCODER_FORMS)
def test_encoder_whose_rows_depend_on_what_else_it_is_given_is_right_or_refused(form: str) -> None:
    """Small and large items, each as alone."""
    family, path = ENCODER_FORMS[form][0], step_wide_encoder(form)
    plain = PlainMedia(family)
    plain.export = dataclasses.replace(plain.export, path=path)
    kind = IMAGE if IMAGE in plain.kinds else AUDIO
    items = [picture(at, side, side) for at, side in enumerate((24, 90, 40, 24, 100, 32))]
    if kind == AUDIO:
        items = [sound(at, int(RATE * seconds)) for at, seconds in enumerate((0.3, 3.0, 0.5, 0.9, 1.7, 0.3))]
    asked = [Asked(f"Ann sees {kind} and a", (item,), "text", (TARGET,)) for item in items]
    try:
        session = olive_ext.open(path, engine={"num_slots": 8, "encoder_batch_rows": 2048})
    except OliveExtError:
        return
    with session:
        requests = [ScoringRequest(one.pop("prompt"), TARGET, **one) for one in (prompt(plain, ask) for ask in asked)]
        found = [output.token_logprobs for output in session.loglikelihood(requests)]
    for ask, scores in zip(asked, found, strict=True):
        np.testing.assert_allclose(scores, expected_scores(plain, ask, TARGET), atol=NATS)
