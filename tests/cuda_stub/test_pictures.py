"""Pixels go to the device and nothing of a picture comes back."""

from __future__ import annotations

import pytest

import olive_ext
from olive_ext.text.requests import ScoringRequest
from tests.cuda_stub.counts import counts
from tests.exports.media import plain_encoder_export
from tests.families.pictures import picture

pytestmark = [pytest.mark.cuda_stub, pytest.mark.slow]

PIXELS = 3 * 32 * 32 * 2
"""Bytes of a picture's pixels as the encoder takes them, in fp16."""

FEATURES = 16 * 64 * 2


def test_a_picture_crosses_once_as_pixels_and_its_features_never() -> None:
    package = plain_encoder_export("f16", "cuda")
    with olive_ext.open(package, execution_provider="cuda", engine={"num_slots": 4, "chunk_size": 64}) as session:

        def ask(seed: int, word: str) -> None:
            text = f"{word} sees the <image> and the"
            session.loglikelihood([ScoringRequest(text, " stone", images=[picture(seed, 40, 40)])])

        ask(0, "Ann")
        counts()
        ask(1, "Ann")
        new = counts()
        ask(1, "Bob")
        known = counts()
        facts = session.describe_execution()
    assert facts["image_encoder_device"] == "cuda"
    assert (facts["images_encoded"], facts["image_cache_hits"]) == (2, 1)
    assert (new.wrong_copies, known.wrong_copies) == (0, 0)
    assert PIXELS < new.bytes_to_device < PIXELS + FEATURES
    assert known.bytes_to_device < FEATURES
    assert new.bytes_to_host == known.bytes_to_host < 64
