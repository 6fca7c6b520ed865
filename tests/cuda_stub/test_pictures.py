"""Pixels and frames go to the device and nothing of a picture or a sound comes back: one, several in a prompt, several
in a run of their encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import olive_ext
from olive_ext.model.types import Modality
from olive_ext.session import Session
from olive_ext.session.requests import ScoringRequest
from tests.cuda_stub.counts import Counts, counts
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, plain_encoder_export, plain_items_export
from tests.families.pictures import picture, sound

pytestmark = pytest.mark.cuda_stub

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


CROSSING = [
    ("llava", "sees the <image> and the", 1),
    ("llava", "sees the <image>, <image> and <image> and the", 3),
    ("gemma4_any", "hears the <|audio|> and <|audio|> and the", 2),
]


@pytest.mark.parametrize(("family", "text", "count"), CROSSING)
def test_items_cross_once_and_their_features_never(family: str, text: str, count: int) -> None:
    """They are joined on the device."""
    is_sound = family in SOUND_FAMILIES
    package = plain_items_export(family, "f16", "cuda") if is_sound else plain_encoder_export("f16", "cuda")
    kind, given = ("sound", "audio") if is_sound else ("image", "images")
    engine = {**ENGINE, "encoder_batch_rows": 1}
    with olive_ext.open(package, execution_provider="cuda", engine=engine) as session:

        def ask(first: int, word: str) -> Counts:
            numbers = range(first, first + count)
            own = [sound(number, 9000) if is_sound else picture(number, 40, 40) for number in numbers]
            return _asked(session, ScoringRequest(f"{word} {text}", " stone", **{given: own}))

        ask(0, "Ann")
        new, known = ask(10, "Ann"), ask(10, "Bob")
        facts = session.describe_execution()
        assert session.media is not None
        modality = next(one for one in session.media.markers if (one is Modality.AUDIO) == is_sound)
        item = session.media.processor.item(modality, sound(10, 9000) if is_sound else picture(10, 40, 40))
        size = count * item.load()["input_features" if is_sound else "pixel_values"].size * 2
    assert facts[f"{kind}_encoder_device"] == "cuda"
    assert [facts[f"{kind}{what}"] for what in ("s_encoded", "_encoder_runs", "_cache_hits")] == [2 * count] * 2 + [
        count
    ]
    assert size < new.bytes_to_device < size + TEXT
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
