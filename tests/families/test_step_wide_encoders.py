"""An encoder whose rows depend on what else it is given gives each picture and sound the rows that it has alone, or is
refused when the package is opened."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.session.requests import ScoringRequest
from tests.exports.step_wide import ENCODER_FORMS, step_wide_encoder
from tests.families.at_random import NATS, Asked, expected_scores, prompt
from tests.families.pictures import picture
from tests.families.plain_media import AUDIO, IMAGE, Item, PlainMedia
from tests.families.sounds import RATE, sound

pytestmark = pytest.mark.slow

TARGET = " blue stone"


def _items(kind: str) -> list[Item]:
    """Small and large ones."""
    if kind == IMAGE:
        return [picture(at, side, side) for at, side in enumerate((24, 90, 40, 24, 100, 32))]
    return [sound(at, int(RATE * seconds)) for at, seconds in enumerate((0.3, 3.0, 0.5, 0.9, 1.7, 0.3))]


@pytest.mark.parametrize("form", ENCODER_FORMS)
def test_each_item_has_the_rows_that_it_has_alone(form: str) -> None:
    family, path = ENCODER_FORMS[form][0], step_wide_encoder(form)
    plain = PlainMedia(family)
    plain.export = dataclasses.replace(plain.export, path=path)
    kind = IMAGE if IMAGE in plain.kinds else AUDIO
    asked = [Asked(f"Ann sees {kind} and a", (item,), "text", (TARGET,)) for item in _items(kind)]
    try:
        session = olive_ext.open(path, engine={"num_slots": 8, "encoder_batch_rows": 2048})
    except OliveExtError:
        return
    with session:
        requests = [ScoringRequest(one.pop("prompt"), TARGET, **one) for one in (prompt(plain, ask) for ask in asked)]
        found = [output.token_logprobs for output in session.loglikelihood(requests)]
    for ask, scores in zip(asked, found, strict=True):
        np.testing.assert_allclose(scores, expected_scores(plain, ask, TARGET), atol=NATS)
