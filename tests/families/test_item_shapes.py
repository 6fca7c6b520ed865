"""After the warm-up no session on the way of a picture or a sound meets an input shape that it was not run with: the
encoder, what cuts and joins its features, the embedding graph, what brings its rows to the decoder. Sessions are
observed from outside."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import olive_ext
from olive_ext.session.requests import GenerationRequest, ScoringOutput, ScoringRequest
from tests.exports.genai import whisper_export
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, media_export
from tests.exports.mobius import mobius_export
from tests.exports.optimum import optimum_export
from tests.families.observed import late_on_the_way, observing, on_the_way
from tests.families.pictures import picture
from tests.families.sounds import sound

pytestmark = pytest.mark.slow

WHISPERS = [partial(mobius_export, "whisper"), partial(optimum_export, "whisper")]
"""They have no extractor's file."""

SIZES = [(40, 40), (60, 30), (24, 70), (64, 64), (30, 30), (50, 20), (20, 60), (64, 40), (33, 33), (48, 48)]
LENGTHS = [9000, 16000, 20000, 31000, 5000, 12345, 40000]
FAMILIES = [
    ("gemma3", "default"),  # mobius, caches that are returned grown
    ("llava", "default"),
    ("qwen2_5_vl", "default"),
    ("qwen2_5_vl", "webgpu"),  # mobius, caches that are written in place
    ("llava_clip", "default"),  # onnxruntime-genai's layout
    ("qwen2_5_vl_genai", "default"),
    ("qwen3_asr", "default"),
    ("gemma4_vl", "default"),  # encoders that return as many rows as an item has
    ("gemma4_any", "default"),
]


def _asked(family: str) -> list[ScoringRequest]:
    """Items of many sizes behind texts of many lengths: one in a prompt, three, none."""
    if family in SOUND_FAMILIES:
        marker, given = SOUND_FAMILIES[family].marker, [sound(seed, length) for seed, length in enumerate(LENGTHS)]
        kind = "audio"
    else:
        marker, given = MEDIA_FAMILIES[family].marker, [picture(seed, *size) for seed, size in enumerate(SIZES)]
        kind = "images"
    words = "and the heavy blue wheel of a garden number "
    asked = [ScoringRequest(f"{words[: 5 * n]}{marker} and", " stone", **{kind: [one]}) for n, one in enumerate(given)]
    asked.append(ScoringRequest(f"{marker}, {marker} and {marker} are", " letters", **{kind: given[:3]}))
    return [*asked, *(ScoringRequest(words[:n], " stone") for n in (3, 17, 40))]


def _to_generate(asked: list[ScoringRequest]) -> list[GenerationRequest]:
    return [GenerationRequest(one.context, max_new_tokens=4, images=one.images, audio=one.audio) for one in asked]


@cache
def _in_any_shape(family: str, package: Path) -> tuple[list[ScoringOutput], list[Any]]:
    """Scores and answers of a session that runs nothing beforehand, item by item."""
    asked, engine = _asked(family), {"num_slots": 3, "chunk_size": 96, "encoder_batch_rows": 1}
    with olive_ext.open(package, execution_provider="cpu", engine=engine) as session:
        return session.loglikelihood(asked), [answer.tokens for answer in session.generate(_to_generate(asked))]


@pytest.mark.parametrize("encoder_batch_rows", [1, 64])
@pytest.mark.parametrize(("family", "provider"), FAMILIES)
def test_no_session_meets_a_shape_that_it_was_not_run_with(family: str, provider: str, encoder_batch_rows: int) -> None:
    package, _ = media_export(family, "f32", provider)
    asked = _asked(family)
    strict = {"num_slots": 3, "chunk_size": 96, "encoder_batch_rows": encoder_batch_rows, "strict_shapes": True}
    with observing() as observed, olive_ext.open(package, execution_provider="cpu", engine=strict) as session:
        begin = len(observed.runs)
        found = session.loglikelihood(asked)
        tokens = [answer.tokens for answer in session.generate(_to_generate(asked))]
        late, facts = late_on_the_way(session, observed, begin), session.describe_execution()
    assert late == []
    assert facts["encoder_shapes_late"] == 0
    assert len(observed.runs) - begin > len(asked)
    expected, answers = _in_any_shape(family, package)
    assert tokens == answers
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-4)


@pytest.mark.parametrize(
    "package", [whisper_export, *(pytest.param(made, marks=pytest.mark.exporters) for made in WHISPERS)]
)
def test_encoder_of_speech_is_run_beforehand_with_what_stacks_its_rows(
    package: Callable[[], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "package"
    shutil.copytree(package(), folder)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    sounds = [sound(seed, length) for seed, length in enumerate(LENGTHS)]
    start = list(range(4, 8))
    answers = [
        GenerationRequest(start[: 1 + n % 2], max_new_tokens=3 + n % 3, audio=[one]) for n, one in enumerate(sounds)
    ]
    asked = [ScoringRequest(start, [20 + n, 30, 40][: 1 + n % 3], audio=[one]) for n, one in enumerate(sounds)]
    engine = {"num_slots": 5}
    with observing() as observed, olive_ext.open(folder, engine={**engine, "strict_shapes": True}) as session:
        begin = len(observed.runs)
        tokens = [answer.tokens for answer in session.generate(answers)]
        found = [output.logprob for output in session.loglikelihood(asked)]
        late, facts = late_on_the_way(session, observed, begin), session.describe_execution()
    assert late == []
    assert facts["encoder_shapes_late"] == 0
    assert facts["encoder_shapes_warmed"] >= engine["num_slots"]
    assert facts["encoder_runs"] >= len(sounds)
    with olive_ext.open(folder, engine=engine) as session:
        assert tokens == [answer.tokens for answer in session.generate(answers)]
        assert found == [output.logprob for output in session.loglikelihood(asked)]


def test_a_new_graph_on_the_way_of_an_item_cannot_escape_the_count() -> None:
    """Sessions are run where they are counted, by a binding that knows its shapes: no module that handles items or
    sources runs ONNX Runtime's own."""
    opened = set()
    with (
        observing() as observed,
        olive_ext.open(
            media_export("llava")[0], engine={"strict_shapes": True, "num_slots": 2, "chunk_size": 16}
        ) as session,
    ):
        runner: Any = session.executor.runner  # type: ignore[attr-defined]
        count = runner._parts.embedding._graphs.count
        is_on_the_way = on_the_way(session)
        opened = {id(one) for one, _ in observed.runs if is_on_the_way(one)}
        assert len(opened) == count._num_sessions
        observed_shapes = {(id(one), shapes) for one, shapes in observed.runs if is_on_the_way(one)}
        assert len(observed_shapes) == session.describe_execution()["encoder_shapes_warmed"]
