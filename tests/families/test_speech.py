"""Whisper from sound to text: transformers' numbers from the same samples, in lm-eval, with a word error rate."""

from __future__ import annotations

import base64
import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import transformers
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.word_errors import normalized, word_error_rate
from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError, LostRequestsError, TaskError
from olive_ext.run import evaluate
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports import hf_model
from tests.exports.genai import whisper_export
from tests.families.test_encoder_decoder import Reference
from tests.refusals import refused

TASKS = Path(__file__).parents[2] / "recipes" / "speech" / "tasks"
RATE = 16000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package() -> Path:
    return whisper_export()


@pytest.fixture(scope="module")
def session(package: Path) -> Session:
    return olive_ext.open(package)


def noise(seed: int, seconds: float) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(scale=0.1, size=int(RATE * seconds)).astype(np.float32)


def features(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    found: npt.NDArray[np.float32] = extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0]
    return found


def test_answers_and_scores_are_those_of_transformers_on_the_same_sound(session: Session) -> None:
    reference = Reference(hf_model("whisper"))
    sounds = [noise(0, 3), noise(1, 29)]
    outputs = session.generate([GenerationRequest(audio=[(one, RATE)], max_new_tokens=20) for one in sounds])
    target = session.tokenizer.encode_answer("old cat")
    scored = session.loglikelihood([ScoringRequest("", "old cat", audio=[(one, RATE)]) for one in sounds])
    for one, output, score in zip(sounds, outputs, scored, strict=True):
        assert reference.continues(features(one), [reference.start], output.tokens, 20)
        expected = reference.score(features(one), [reference.start], target)
        assert score.token_logprobs == pytest.approx(expected, abs=1e-4)


def test_features_are_the_raw_form_of_sound(session: Session) -> None:
    sound, raw = GenerationRequest(audio=[(noise(2, 4), RATE)], max_new_tokens=8), features(noise(2, 4))
    outputs = session.generate([sound, GenerationRequest(source=raw, max_new_tokens=8)])
    assert outputs[0] == outputs[1]


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


def wav(samples: npt.NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((samples * 2**14).astype("<i2").tobytes())
    return file.getvalue()


def test_messages_hold_sound_or_leave_it_to_the_list(session: Session) -> None:
    content = wav(noise(4, 2).clip(-1, 1))
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


@pytest.mark.parametrize(
    ("part", "audio", "error"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
            0,
            "format 'mp3': only wav is read",
        ),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, 0, r"without 'input_audio\.data'"),
        ({"type": "input_audio", "input_audio": {"data": "@", "format": "wav"}}, 0, "not valid base64"),
        ({"type": "audio"}, 0, "1 part for a sound, 1 of them without one, and the request gives 0 sounds beside them"),
        (
            {"type": "audio", "audio": b"RIFF"},
            1,
            "1 part for a sound, 0 of them without one, and the request gives 1 sound beside them",
        ),
        ({"type": "image", "image": b"x"}, 0, "1 picture; this model takes sound"),
        ({"type": "text", "text": "x"}, 0, "gives no sound; this model takes one in 'audio'"),
    ],
)
def test_message_with_other_sound_than_is_needed_is_refused(
    session: Session, part: dict[str, Any], audio: int, error: str
) -> None:
    with pytest.raises((TaskError, ConfigError, LostRequestsError), match=error):
        session.generate([GenerationRequest([{"role": "user", "content": [part]}], audio=[b"RIFF"] * audio)])


def test_two_sounds_or_a_sound_beside_features_are_refused(session: Session) -> None:
    sound = (noise(0, 1), RATE)
    with refused(LostRequestsError, "incomplete", holds="2"):
        session.generate([GenerationRequest(audio=[sound, sound])])
    with refused(LostRequestsError, "incomplete", holds=("source", "audio")):
        session.generate([GenerationRequest(audio=[sound], source=features(sound[0]))])


def test_task_of_speech_has_a_word_error_rate(package: Path) -> None:
    pytest.importorskip("jiwer")
    with OrtLM(str(package)) as lm:
        found = simple_evaluate(
            lm,
            tasks=["tones_words"],
            limit=5,
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
        )
        num_runs = lm.session.describe_execution()["encoder_runs"]
    assert found is not None
    samples = found["samples"]["tones_words"]
    assert num_runs == len(samples) == 5  # no two sounds are alike
    pairs = [normalized(sample["doc"]["text"], sample["resps"][0][0]) for sample in samples]
    assert found["results"]["tones_words"]["wer,none"] == pytest.approx(word_error_rate(pairs))


BAD_SOUNDS: dict[str, list[Any]] = {
    "holds NaN or infinity": [{"array": [0.1, float("nan")], "sampling_rate": RATE}],
    r"has no samples \(an array of shape \[0\]\)": [{"array": [], "sampling_rate": RATE}],
    "has 8000 samples a second; this model takes 16000": [{"array": [0.1] * 99, "sampling_rate": 8000}],
    "the sound '/nowhere.wav' cannot be read": ["/nowhere.wav"],
    "the request gives no sound; this model takes one": [],
    "the request gives 2 sounds; this model takes one": [{"array": [0.1] * 99, "sampling_rate": RATE}] * 2,
}


def test_documents_whose_sounds_cannot_be_used_are_missing_and_the_others_are_evaluated(
    package: Path, tmp_path: Path
) -> None:
    sounds = [[{"array": noise(0, 1).tolist(), "sampling_rate": RATE}], *BAD_SOUNDS.values()]
    lines = [json.dumps({"number": number, "sounds": json.dumps(found)}) for number, found in enumerate(sounds)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "given.py").write_text("import json\n\ndef sounds(doc):\n    return json.loads(doc['sounds'])\n")
    (tmp_path / "heard.yaml").write_text(
        f"task: heard\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: ''\ndoc_to_audio: !function given.sounds\n"
        "doc_to_target: low\ngeneration_kwargs: {until: ['.'], max_gen_toks: 4}\n"
        "metric_list: [{metric: exact_match}]\n",
        encoding="utf-8",
    )
    given = {"tasks": ["heard"], "include_path": str(tmp_path), "on_error": "report", "bootstrap_iters": 0}
    report = evaluate(EvaluationConfig.parse({**given, "model": {"path": str(package)}}))
    assert report.results["n-samples"]["heard"]["effective"] == 1
    reasons = {item["doc_id"]: item["reason"] for item in report.missing}
    assert list(reasons) == list(range(1, len(sounds)))
    for reason, expected in zip(reasons.values(), BAD_SOUNDS, strict=True):
        assert re.search(expected, reason)
        assert "\n" not in reason


def test_word_error_rate_counts_words_of_normalized_texts() -> None:
    pytest.importorskip("jiwer")
    pairs = [normalized("Low, middle!", "low middle"), normalized("high low", "high (noise) middle low")]
    assert word_error_rate(pairs) == pytest.approx(1 / 4)
    with pytest.raises(TaskError, match="has no words"):
        normalized("...", "x")
