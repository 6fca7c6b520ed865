"""Whisper from sound to text beside the table of agreement: forms of sound, mistakes, and a word error rate."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.backends.word_errors import normalized, word_error_rate
from olive_ext.errors import LostRequestsError, OliveExtError, TaskError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.agreement.references import RATE, features, noise
from tests.exports.genai import whisper_export
from tests.families.pictures import wav
from tests.refusals import refused


@pytest.fixture(scope="module")
def package() -> Path:
    return whisper_export()


@pytest.fixture(scope="module")
def session(package: Path) -> Session:
    return olive_ext.open(package)


def test_features_are_the_raw_form_of_sound_and_two_sounds_or_both_forms_are_refused(session: Session) -> None:
    sound, raw = GenerationRequest(audio=[(noise(2, 4), RATE)], max_new_tokens=8), features(noise(2, 4))
    outputs = session.generate([sound, GenerationRequest(source=raw, max_new_tokens=8)])
    assert outputs[0] == outputs[1]
    short = (noise(0, 1), RATE)
    with refused(LostRequestsError, "incomplete", holds="2"):
        session.generate([GenerationRequest(audio=[short, short])])
    with refused(LostRequestsError, "incomplete", holds=("source", "audio")):
        session.generate([GenerationRequest(audio=[short], source=features(short[0]))])
    with refused(OliveExtError, "unsupported", holds=("[80, 100]", "[80, 3000]")):
        session.generate([GenerationRequest(source=raw[:, :100], max_new_tokens=8)])


def test_long_sound_is_answered_window_by_window(session: Session) -> None:
    samples = noise(3, 70)
    parts = [samples[start : start + 30 * RATE] for start in range(0, len(samples), 30 * RATE)]
    whole, *alone = session.generate(
        [GenerationRequest(audio=[(one, RATE)], max_new_tokens=6) for one in (samples, *parts)]
    )
    assert whole.tokens == tuple(token for part in alone for token in part.tokens)
    assert whole.text == " ".join(part.text.strip() for part in alone)
    with refused(LostRequestsError, "incomplete", holds="30"):
        session.loglikelihood([ScoringRequest("", "cat", audio=[(samples, RATE)])])


def test_messages_hold_sound_or_leave_it_to_the_list(session: Session) -> None:
    content = wav((noise(4, 2).clip(-1, 1) * 2**14).astype("<i2"))
    data = {"data": base64.b64encode(content).decode(), "format": "wav"}
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": data},
        {"type": "audio", "audio": content},
        {"type": "audio"},
    ]
    text = {"type": "text", "text": "old"}
    asked = [
        GenerationRequest(
            [{"role": "user", "content": [part, text]}], max_new_tokens=6, audio=[content][len(part) - 1 :]
        )
        for part in parts
    ]
    outputs = session.generate([*asked, GenerationRequest("old", audio=[content], max_new_tokens=6)])
    assert len({output.tokens for output in outputs}) == 1
    scored = session.loglikelihood(
        [
            ScoringRequest([{"role": "user", "content": parts[:1]}], "cat"),
            ScoringRequest("", "cat", audio=[content]),
        ]
    )
    assert scored[0] == scored[1]


PARTS: list[tuple[dict[str, Any], int, str, Any]] = [
    (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
        0,
        "unsupported:input_audio",
        ("mp3", "wav"),
    ),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, 0, "wrong_value", "input_audio.data"),
    ({"type": "input_audio", "input_audio": {"data": "@", "format": "wav"}}, 0, "incomplete", "base64"),
    ({"type": "audio"}, 0, "incomplete", ("1 part", "1 of them without", "0 sounds")),
    ({"type": "audio", "audio": b"RIFF"}, 1, "incomplete", ("1 part", "0 of them without", "1 sound beside")),
    ({"type": "image", "image": b"x"}, 0, "unsupported", ("1 picture", "takes sound")),
    ({"type": "text", "text": "x"}, 0, "incomplete", ("no sound", "audio")),
]


@pytest.mark.parametrize(("part", "audio", "code", "holds"), PARTS)
def test_message_with_other_sound_than_is_needed_is_refused(
    session: Session, part: dict[str, Any], audio: int, code: str, holds: Any
) -> None:
    code, _, field = code.partition(":")
    with refused(OliveExtError, code, field, holds=holds):
        session.generate([GenerationRequest([{"role": "user", "content": [part]}], audio=[b"RIFF"] * audio)])


def test_word_error_rate_counts_words_of_normalized_texts() -> None:
    pytest.importorskip("jiwer")
    pairs = [normalized("Low, middle!", "low middle"), normalized("high low", "high (noise) middle low")]
    assert word_error_rate(pairs) == pytest.approx(1 / 4)
    with refused(TaskError, "task"):
        normalized("...", "x")
