"""Factors that a graph chooses for a whole step: every text has those of its own length, whatever stands beside it.

Scores are transformers' in one pass over all that is fed; answers are those of its `generate`, which computes the whole
text anew with the long factors when it first has more tokens than the short ones hold for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.agreement.reference import EOS, Reference, largest_difference
from tests.exports import Export, export, hf_model
from tests.exports.ropes import ORIGINAL
from tests.exports.step_wide import EXPORTERS, step_wide_export
from tests.refusals import refused

pytestmark = pytest.mark.slow

NAMES = ["phi3_longrope-genai-0.14", "phi3_longrope-mobius"]
OTHERS = ["phi3_longrope-genai-0.18", "phi4_mini-genai-0.18", "phi4_mini-mobius", "phi3_longrope-mobius-static"]
EVERY = [*NAMES, *(pytest.param(name, marks=pytest.mark.exporters) for name in OTHERS)]
SETTINGS: list[dict[str, Any]] = [
    {"num_slots": 1, "chunk_size": 256},
    {"num_slots": 3, "chunk_size": 7, "graph": "untouched"},
    {"num_slots": 8, "chunk_size": 64, "overlaps_steps": True},
]
NATS = 1e-4
NUM_TOKENS = 12


def _words(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 1000) for _ in range(count)]


def _requests() -> list[ScoringRequest]:
    """Behind one stem texts that feed from 20 tokens to 110: most of each prefix is shared by both sides."""
    stem, requests = _words(100), []
    for kept in (20, 50, 57, ORIGINAL - 2, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 75, 100):
        for own in (0, 2):
            context = stem[:kept] + _words(own, seed=kept)
            requests += [ScoringRequest(context, _words(count, seed=count)) for count in (1, 2, 3, 8)]
    random.Random(2).shuffle(requests)
    return requests


@cache
def _reference(family: str) -> Reference:
    return Reference(export(f"{family}-mobius").hf)


@cache
def _scores(family: str) -> list[list[float]]:
    return [_reference(family).score(one.context, one.target)[0] for one in _requests()]


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(params=EVERY)
def package(request: pytest.FixtureRequest) -> Export:
    return export(request.param)


@pytest.fixture
def session(package: Export, settings: dict[str, Any]) -> Iterator[Session]:
    with olive_ext.open(package.path, engine=settings) as session:
        yield session


def test_scores_are_transformers_on_both_sides_together(
    session: Session, package: Export, settings: dict[str, Any]
) -> None:
    assert largest_difference(session.loglikelihood(_requests()), _scores(package.family)) < NATS
    assert session.counters.tokens_reused > 0 or settings.get("graph") == "untouched"  # it takes no side as an input


def test_a_slot_kept_from_one_call_is_no_prefix_of_a_longer_text_in_the_next(session: Session, package: Export) -> None:
    text = _words(ORIGINAL + 20)
    for count in (ORIGINAL - 10, ORIGINAL + 10, ORIGINAL - 5, ORIGINAL + 19, 9):
        asked = [ScoringRequest(text[:count], text[count : count + 1])]
        expected = [_reference(package.family).score(one.context, one.target)[0] for one in asked]
        assert largest_difference(session.loglikelihood(asked), expected) < NATS, count


def test_rolling_windows_are_whole_texts(session: Session, package: Export) -> None:
    prefix = session.tokenizer.prefix_token_id
    texts = [_words(count, seed=7) for count in (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 110)]
    found = session.loglikelihood_rolling([RollingRequest(text) for text in texts])
    for text, output in zip(texts, found, strict=True):
        expected = sum(_reference(package.family).score([prefix], text)[0])
        assert output.logprob == pytest.approx(expected, rel=NATS)


PROMPTS = [_words(count, seed=count) for count in (5, ORIGINAL - 8, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 100)]


def test_answers_that_cross_are_those_of_transformers(session: Session, package: Export) -> None:
    """Short and long prompts together, and each alone behind the others."""
    expected = [_reference(package.family).generate(prompt, NUM_TOKENS) for prompt in PROMPTS]
    asked = [GenerationRequest(prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    assert [list(output.tokens) for output in session.generate(asked)] == expected
    for request, tokens in zip(asked, expected, strict=True):
        assert [list(output.tokens) for output in session.generate([request])] == [tokens]


@cache
def _searched(family: str, place: int) -> tuple[list[int], float]:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(export(f"{family}-mobius").hf, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([PROMPTS[place]]),
            num_beams=3,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=EOS,
            output_scores=True,
            return_dict_in_generate=True,
        )
    tokens = found.sequences[0, len(PROMPTS[place]) :].tolist()
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return tokens[:end], float(found.sequences_scores[0])


@pytest.mark.parametrize("name", EVERY)
def test_beams_are_those_of_transformers_and_refused_where_they_would_cross(name: str) -> None:
    family = export(name).family
    with olive_ext.open(export(name).path, engine={"num_slots": 4}) as session:
        asked = [GenerationRequest(prompt, max_new_tokens=NUM_TOKENS, num_beams=3) for prompt in PROMPTS]
        stay = [at for at, prompt in enumerate(PROMPTS) if not len(prompt) <= ORIGINAL < len(prompt) + NUM_TOKENS - 1]
        assert len(stay) == 3
        for at, output in zip(stay, session.generate([asked[at] for at in stay]), strict=True):
            tokens, score = _searched(family, at)
            assert list(output.sequences[0].tokens) == tokens, at
            assert output.sequences[0].score == pytest.approx(score, rel=1e-4)
        for at in set(range(len(PROMPTS))) - set(stay):
            with refused(OliveExtError, "unsupported", holds=(f"{len(PROMPTS[at])}",)):
                session.generate([asked[at]])


@pytest.mark.parametrize("name", ["phi3_further-genai-0.18", "phi3_further-mobius"])
@pytest.mark.parametrize("engine", [{}, {"num_slots": 1, "chunk_size": 256}, {"chunk_size": 100}], ids=str)
def test_a_long_text_in_chunks_has_the_long_factors_from_its_first_on(name: str, engine: dict[str, Any]) -> None:
    """Each alone, and behind texts that end in its first chunk."""
    text, reference = _words(500), _reference("phi3_further")
    with olive_ext.open(export(name).path, engine=engine) as session:
        for counts in ([453], [40, 299, 300, 301, 420], [302, 200]):
            asked = [ScoringRequest(text[:count], text[count : count + 3]) for count in counts]
            expected = [reference.score(one.context, one.target)[0] for one in asked]
            assert largest_difference(session.loglikelihood(asked), expected) < NATS, counts


def _fed(session: Session, requests: Sequence[ScoringRequest]) -> int:
    before = session.counters.tokens_fed
    session.loglikelihood(requests)
    return session.counters.tokens_fed - before


@pytest.mark.parametrize("name", NAMES)
def test_each_side_shares_its_prefixes(name: str) -> None:
    """A text of each side and its questions: the stem is computed once for a side and no more."""
    stem = _words(ORIGINAL - 12)
    short = [ScoringRequest(stem + _words(4, seed=at), _words(2, seed=at)) for at in range(6)]
    long = [ScoringRequest(stem + _words(20, seed=at), _words(2, seed=at)) for at in range(6)]
    with olive_ext.open(export(name).path, engine={"num_slots": 8}) as session:
        assert _fed(session, [*short, *long]) <= 2 * len(stem) + 6 * (4 + 1) + 6 * (20 + 1)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_frequencies_that_follow_the_length_are_those_of_transformers(exporter: str) -> None:
    """Dynamic NTK. Transformers' module remembers the longest text: each is asked of a model of its own. Its `generate`
    keeps keys of other frequencies, which is what an answer by the token is here, too."""
    hf, text = hf_model("llama_dynamic"), _words(200)
    counts = [30, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 90, 150, 91]
    asked = [ScoringRequest(text[:count], text[count : count + 4]) for count in counts]
    expected = [Reference(hf).score(one.context, one.target)[0] for one in asked]
    answers = [Reference(hf).generate(prompt, NUM_TOKENS) for prompt in PROMPTS]
    with olive_ext.open(step_wide_export("dynamic", exporter), engine={"num_slots": 8, "chunk_size": 64}) as session:
        assert largest_difference(session.loglikelihood(asked), expected) < NATS
        found = session.generate([GenerationRequest(prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS])
    assert [list(output.tokens) for output in found] == answers
