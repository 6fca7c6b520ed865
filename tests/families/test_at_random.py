"""Requests with pictures, sounds and texts at random, under random settings, have the numbers of plain passes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.exports.media import SOUND_FAMILIES, media_export
from tests.families.at_random import FAMILIES, NATS, Draw, expected_scores, problems
from tests.families.pictures import PictureReference
from tests.families.plain_media import AUDIO, IMAGE
from tests.families.sounds import SoundReference

IN_DEFAULT_RUN = ("qwen2_5_vl", "llava_clip", "qwen3_asr")
MARKED = [
    pytest.param(name, marks=pytest.mark.slow if name in IN_DEFAULT_RUN else pytest.mark.exporters) for name in FAMILIES
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", MARKED)
def test_answers_are_those_of_whole_passes(family: str, seed: int) -> None:
    settings, found = problems(family, seed)
    assert not found, f"seed {seed}: {settings}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 30))
@pytest.mark.parametrize("family", FAMILIES)
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
    asked = [one for one in draw.requests(20) if one.form == "text" and set(one.text) & {IMAGE, AUDIO} <= {kind}]
    asked = [one for one in asked if kind == IMAGE or len({len(item[0]) for item in one.items}) < 2]  # type: ignore[arg-type]
    scored = [(one, target) for one in asked for target in one.targets]
    assert any(one.items for one, _ in scored)
    for one, target in scored:
        theirs = reference.score(one.text.replace(kind, reference.marker), target, one.items)
        np.testing.assert_allclose(expected_scores(draw.plain, one, target), theirs, atol=NATS)
