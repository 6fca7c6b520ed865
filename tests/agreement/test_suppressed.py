"""Whisper's suppressed tokens are never said, and answers, greedy and of beam searches, are those of transformers'
`generate` with the same lists. Sounds run together and alone, in any order, on both forms of the graph."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from transformers.generation import GenerationMixin

import olive_ext
from olive_ext.session import Session
from olive_ext.session.requests import GenerationOutput, GenerationRequest, ScoringRequest
from tests.exports import hf_model
from tests.exports.genai import whisper_export
from tests.families.test_encoder_decoder import Reference
from tests.families.test_speech import features, noise

NUM_TOKENS = 12
STOPS = (1, *range(30, 42))
"""The tiny model hardly ever says 1."""

SEARCHES: list[dict[str, Any]] = [
    {},
    {"num_beams": 4},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 0.0, "num_return_sequences": 3},
    {"num_beams": 2, "early_stopping": "never", "length_penalty": 2.0},
]
FORMS: list[dict[str, Any]] = [
    {"num_slots": 1 + 4},
    {"num_slots": 16, "overlaps_steps": True},
    {"num_slots": 9, "graph": "untouched", "overlaps_steps": True},
]

pytestmark = pytest.mark.slow


@cache
def _sources() -> list[npt.NDArray[np.float32]]:
    return [features(noise(seed, 3)) for seed in range(5)]


@cache
def _lists() -> dict[str, list[int]]:
    """Tokens that the model would say without them: its first ones, and what it says most often later."""
    reference = Reference(hf_model("whisper"))
    said = [reference.greedy(source, [reference.start], NUM_TOKENS) for source in _sources()]
    later = [token for answer in said for token in answer[1:]]
    return {
        "suppress_tokens": sorted({max(set(later), key=later.count), *STOPS[2:6], 900}),
        "begin_suppress_tokens": sorted({answer[0] for answer in said}),
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suppressed") / "package"
    shutil.copytree(whisper_export(), folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **_lists()}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=FORMS, ids=str)
def session(package: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with olive_ext.open(package, engine=request.param) as session:
        session.stop_ids = frozenset(STOPS)
        yield session


@cache
def _expected(place: int, number: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """Sequences of the search up to a stop id, and their scores, where it is one with beams."""
    load: Any = transformers.AutoModelForSpeechSeq2Seq.from_pretrained
    model = load(hf_model("whisper"), dtype=torch.float32).eval()
    search = SEARCHES[number]
    settings = transformers.GenerationConfig(
        **search,
        **_lists(),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=list(STOPS),
        pad_token_id=0,
        decoder_start_token_id=model.config.decoder_start_token_id,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():  # Whisper's own `generate` adds languages and timestamps to this one
        given = torch.tensor(_sources()[place])[None]
        found = GenerationMixin.generate(model, input_features=given, generation_config=settings)
    answers = [row[1:] for row in found.sequences.tolist()]
    ends = [next((at for at, token in enumerate(one) if token in STOPS), len(one)) for one in answers]
    scores = found.sequences_scores.tolist() if search else []
    return [tuple(one[:end]) for one, end in zip(answers, ends, strict=True)], scores


def _request(place: int, number: int) -> GenerationRequest:
    return GenerationRequest(source=_sources()[place], max_new_tokens=NUM_TOKENS, **SEARCHES[number])


def _check(pair: tuple[int, int], output: GenerationOutput) -> None:
    tokens, scores = _expected(*pair)
    assert output.tokens == tokens[0], pair
    if scores:
        assert [one.tokens for one in output.sequences] == tokens, pair
        assert [one.score for one in output.sequences] == pytest.approx(scores, rel=1e-5)


def test_answers_and_scores_of_searches_are_those_of_transformers(session: Session) -> None:
    pairs = [(place, number) for place in range(len(_sources())) for number in range(len(SEARCHES))]
    random.Random(len(pairs)).shuffle(pairs)
    for pair, output in zip(pairs, session.generate([_request(*pair) for pair in pairs]), strict=True):
        _check(pair, output)
    for pair in pairs[:4]:
        _check(pair, session.generate([_request(*pair)])[0])
    if session.describe_execution()["overlaps_steps"]:
        assert session.counters.steps_overlapped > 0


def test_samples_hold_no_suppressed_token_and_are_others_than_with_them(session: Session) -> None:
    asked = [
        GenerationRequest(source=_sources()[0], max_new_tokens=NUM_TOKENS, temperature=1.0, top_k=5, seed=seed)
        for seed in range(40)
    ]
    said = [output.tokens for output in session.generate(asked)]
    lists = _lists()
    assert not {token for tokens in said for token in tokens} & set(lists["suppress_tokens"])
    assert not {tokens[0] for tokens in said if tokens} & set(lists["begin_suppress_tokens"])
    assert {token for tokens in said for token in tokens[1:]} & set(lists["begin_suppress_tokens"])


def test_scores_are_the_models_own(session: Session) -> None:
    """Of suppressed tokens, too, and whether they are the most probable ones."""
    reference = Reference(hf_model("whisper"))
    first = _lists()["begin_suppress_tokens"]
    targets = [[token, *_lists()["suppress_tokens"][:2]] for token in first]
    asked = [ScoringRequest("", target, source=source) for source in _sources() for target in targets]
    outputs = session.loglikelihood(asked)
    for request, output in zip(asked, outputs, strict=True):
        expected = reference.score(request.source, [reference.start], list(request.target))
        assert output.token_logprobs == pytest.approx(expected, abs=1e-4)
    greedy = session.loglikelihood([ScoringRequest("", [token], source=_sources()[0]) for token in first])
    assert sum(output.is_greedy for output in greedy) == 1


def test_nothing_of_a_row_but_its_best_token_comes_to_the_host(package: Path, session: Session) -> None:
    """Bytes of greedy answers are those of a model that suppresses nothing."""
    before = session.describe_execution()["counters"]["host_bytes"]
    session.generate([_request(0, 0)])
    taken = session.describe_execution()["counters"]["host_bytes"] - before
    assert 0 < taken <= 64 * NUM_TOKENS


def test_checkpoint_on_transformers_says_the_same(package: Path, tmp_path: Path) -> None:
    shutil.copytree(hf_model("whisper"), tmp_path / "hf")
    shutil.copy(package / "generation_config.json", tmp_path / "hf")
    with olive_ext.open(tmp_path / "hf") as session:
        session.stop_ids = frozenset(STOPS)
        for place in range(len(_sources())):
            _check((place, 0), session.generate([_request(place, 0)])[0])


def test_whispers_own_generate_gives_the_same_text_with_four_beams(package: Path) -> None:
    """With the stop id and the settings that its configuration names."""
    load: Any = transformers.AutoModelForSpeechSeq2Seq.from_pretrained
    model = load(hf_model("whisper"), dtype=torch.float32).eval()
    model.generation_config.update(**_lists())
    given = torch.tensor(np.stack(_sources()))
    with torch.inference_mode():
        found = model.generate(given, num_beams=4, max_new_tokens=NUM_TOKENS).tolist()
    with olive_ext.open(package) as opened:
        outputs = opened.generate([_request(place, 1) for place in range(len(_sources()))])
        ends = opened.stop_ids | {model.config.pad_token_id, model.config.decoder_start_token_id}
    for row, output in zip(found, outputs, strict=True):
        assert tuple(token for token in row if token not in ends) == output.tokens
