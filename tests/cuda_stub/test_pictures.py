"""Pixels and frames go to the device and nothing of a picture or a sound comes back: one, several in a prompt, several
in a run of their encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import olive_ext
from olive_ext.session import Session
from olive_ext.session.requests import ScoringRequest
from tests.cuda_stub.counts import Counts, counts
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, plain_encoder_export, plain_items_export
from tests.families.pictures import picture
from tests.families.sounds import sound

pytestmark = [pytest.mark.cuda_stub, pytest.mark.slow]

PIXELS = 3 * 32 * 32 * 2
"""Bytes of a picture's pixels as the encoder takes them, in fp16."""

FEATURES = 16 * 64 * 2
TEXT = 2_000
"""Bytes to the device at most of a short prompt's tokens, positions and places of rows."""

ENGINE = {"num_slots": 4, "chunk_size": 96}


def _asked(session: Session, *requests: ScoringRequest) -> Counts:
    """What crosses for these requests."""
    counts()
    session.loglikelihood(list(requests))
    found = counts()
    assert found.wrong_copies == 0
    return found


def _without_trial(session: Session) -> None:
    """The trial compares features; kernels that do nothing leave what lay in memory."""
    runner: Any = session.executor.runner  # type: ignore[attr-defined]
    for encoder in runner._parts.embedding._encoders.values():
        encoder._batches._tried |= {(count, False): range(1 << 20) for count in range(2, 64)}


def test_a_picture_crosses_once_as_pixels_and_its_features_never() -> None:
    package = plain_encoder_export("f16", "cuda")
    with olive_ext.open(package, execution_provider="cuda", engine=ENGINE) as session:

        def ask(seed: int, word: str) -> Counts:
            text = f"{word} sees the <image> and the"
            return _asked(session, ScoringRequest(text, " stone", images=[picture(seed, 40, 40)]))

        ask(0, "Ann")
        new, known = ask(1, "Ann"), ask(1, "Bob")
        facts = session.describe_execution()
    assert facts["image_encoder_device"] == "cuda"
    assert (facts["images_encoded"], facts["image_cache_hits"]) == (2, 1)
    assert PIXELS < new.bytes_to_device < PIXELS + FEATURES
    assert known.bytes_to_device < FEATURES
    assert new.bytes_to_host == known.bytes_to_host < 64


def test_several_pictures_of_a_prompt_are_joined_on_the_device() -> None:
    package = plain_encoder_export("f16", "cuda")
    engine = {**ENGINE, "encoder_batch_rows": 1}
    with olive_ext.open(package, execution_provider="cuda", engine=engine) as session:

        def ask(first: int, word: str) -> Counts:
            text = f"{word} sees the <image>, <image> and <image> and the"
            pictures = [picture(first + number, 40, 40) for number in range(3)]
            return _asked(session, ScoringRequest(text, " stone", images=pictures))

        ask(0, "Ann")
        new, known = ask(10, "Ann"), ask(10, "Bob")
        facts = session.describe_execution()
    assert (facts["images_encoded"], facts["image_encoder_runs"], facts["image_cache_hits"]) == (6, 6, 3)
    assert 3 * PIXELS < new.bytes_to_device < 3 * PIXELS + TEXT
    assert known.bytes_to_device < TEXT
    assert new.bytes_to_host == known.bytes_to_host < 64


def test_sounds_cross_once_as_frames_and_their_features_never() -> None:
    package, marker = plain_items_export("gemma4_any", "f16", "cuda"), SOUND_FAMILIES["gemma4_any"].marker
    engine = {**ENGINE, "encoder_batch_rows": 1}
    with olive_ext.open(package, execution_provider="cuda", engine=engine) as session:

        def ask(seed: int, word: str) -> Counts:
            text = f"{word} hears the {marker} and {marker} and the"
            return _asked(session, ScoringRequest(text, " stone", audio=[sound(seed, 9000), sound(seed + 1, 9000)]))

        ask(0, "Ann")
        new, known = ask(10, "Ann"), ask(10, "Bob")
        facts = session.describe_execution()
        assert session.media is not None
        item = session.media.processor.item(list(session.media.markers)[1], sound(10, 9000))
        frames = item.load()["input_features"].size * 2
    assert facts["sound_encoder_device"] == "cuda"
    assert (facts["sounds_encoded"], facts["sound_cache_hits"]) == (4, 2)
    assert 2 * frames < new.bytes_to_device < 2 * frames + TEXT
    assert known.bytes_to_device < TEXT
    assert new.bytes_to_host == known.bytes_to_host < 64


def test_pictures_of_one_run_cross_once_and_are_parted_on_the_device() -> None:
    """Ten requests with a picture each, of any size: as many bytes as one by one, in fewer runs."""
    package, marker = plain_items_export("qwen2_5_vl", "f16", "cuda"), MEDIA_FAMILIES["qwen2_5_vl"].marker
    sizes = [(40, 40), (60, 30), (64, 64), (20, 60), (33, 33), (64, 40), (24, 70), (50, 20), (30, 30), (48, 48)]

    def requests(first: int) -> list[ScoringRequest]:
        pictures = [picture(first + number, *size) for number, size in enumerate(sizes)]
        return [ScoringRequest(f"{marker} and", " stone", images=[one]) for one in pictures]

    found, runs = {}, {}
    for rows in (1, 1024):
        engine = {**ENGINE, "encoder_batch_rows": rows}
        with olive_ext.open(package, execution_provider="cuda", engine=engine) as session:
            _without_trial(session)
            _asked(session, *requests(0))
            before = session.describe_execution()
            found[rows] = _asked(session, *requests(100))
            facts = session.describe_execution()
            assert session.media is not None
            modality = next(iter(session.media.markers))
            items = [session.media.processor.item(modality, picture(0, *size)) for size in sizes]
        assert facts["images_encoded"] == 2 * len(sizes)
        runs[rows] = facts["image_encoder_runs"] - before["image_encoder_runs"], facts.get("images_one_by_one")
    pixels = sum(item.load()["pixel_values"].size for item in items) * 2
    assert runs == {1: (len(sizes), None), 1024: (2, None)}  # eight of them, and two
    for crossed in found.values():
        assert pixels < crossed.bytes_to_device < pixels + len(sizes) * TEXT
        assert crossed.bytes_to_host < len(sizes) * 64
        assert crossed.largest_to_host < np.int64().nbytes * len(sizes) * 2
