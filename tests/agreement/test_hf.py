"""The numbers of an ONNX export equal those of Hugging Face transformers on the same fp32 weights.

Models: a Llama and a Qwen3 by onnxruntime-genai's builder, the release installed and 0.18.0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import olive_ext
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.agreement.reference import Reference, largest_difference
from tests.exports import CONTEXT, TEXT, VOCAB, genai_export, hf_model

pytestmark = pytest.mark.slow

EXPORTS = [("llama", None), ("llama", "0.18.0"), ("qwen3", None), ("qwen3", "0.18.0")]
WORDS = TEXT.split()


@cache
def _reference(family: str) -> Reference:
    return Reference(hf_model(family))


@pytest.fixture(scope="module", params=EXPORTS, ids=lambda export: f"{export[0]}-{export[1] or 'installed'}")
def export(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    family, release = request.param
    genai_export(family, release)
    return family, release


def _open(export: tuple[str, str | None], **engine: object) -> Session:
    return olive_ext.open(genai_export(*export), engine=engine)


@pytest.fixture(scope="module")
def session(export: tuple[str, str | None]) -> Iterator[Session]:
    with _open(export, num_slots=3, chunk_size=64) as session:
        yield session


def _mixed_requests() -> list[ScoringRequest]:
    """510 requests: shared stems, one-token and long targets, one-token and long contexts."""
    rng = random.Random(5)
    draw = lambda low, high: [rng.randrange(4, VOCAB) for _ in range(rng.randint(low, high))]  # noqa: E731
    stems = [draw(1, 120) for _ in range(20)]
    requests = []
    for _ in range(170):
        context = rng.choice(stems) + draw(0, 25)
        requests += [ScoringRequest(context, draw(1, 1)), ScoringRequest(context, draw(1, 20))]
        requests.append(ScoringRequest(draw(1, 2), draw(1, 40)))
    return requests


@cache
def _expected(family: str) -> list[tuple[list[float], bool]]:
    return [_reference(family).score(request.context, request.target) for request in _mixed_requests()]


def test_logprobs_of_510_mixed_requests_within_1e_4_nats(export: tuple[str, str | None], session: Session) -> None:
    expected = _expected(export[0])
    found = session.loglikelihood(_mixed_requests())
    assert largest_difference(found, [logprobs for logprobs, _ in expected]) < 1e-4
    assert [output.is_greedy for output in found] == [greedy for _, greedy in expected]
    greedy = session.loglikelihood([(request.context, _next(export, request)) for request in _mixed_requests()[:30]])
    assert all(output.is_greedy for output in greedy)


def _next(export: tuple[str, str | None], request: ScoringRequest) -> list[int]:
    return _reference(export[0]).generate(request.context, 1)


SLOTS_AND_CHUNKS = [(slots, chunk) for slots in (1, 3, 8) for chunk in (1, 7, 256)]


@pytest.mark.parametrize(
    ("count", "shapes"),
    [(85, [(1, 7), (3, 1), (3, 256), (8, 7)]), pytest.param(510, SLOTS_AND_CHUNKS, marks=pytest.mark.long)],
    ids=["a_sixth_of_the_requests", "all_requests"],
)
@pytest.mark.parametrize("graph", ["scoring_head", "untouched"])
def test_slots_chunks_and_order_change_nothing_beyond_1e_5(
    export: tuple[str, str | None], graph: str, count: int, shapes: list[tuple[int, int]]
) -> None:
    requests = _mixed_requests()[:count]
    with _open(export, num_slots=1, chunk_size=256, graph=graph) as session:
        base = [output.token_logprobs for output in session.loglikelihood(requests)]
    for num_slots, chunk_size in shapes:
        most = count // 4 if chunk_size == 1 else count  # a step for each token takes its time
        order = random.Random(num_slots * chunk_size).sample(range(len(requests)), most)
        with _open(export, num_slots=num_slots, chunk_size=chunk_size, graph=graph) as session:
            found = session.loglikelihood([requests[i] for i in order])
        assert largest_difference(found, [base[i] for i in order]) < 1e-5


def test_rolling_within_1e_4_relative(export: tuple[str, str | None], session: Session) -> None:
    tokenizer = session.tokenizer
    texts = [" ".join(WORDS[:60]), " ".join(WORDS[200:1400]), "one", ""]
    reference = _reference(export[0])
    for text, found in zip(texts, session.loglikelihood_rolling(texts), strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, tokenizer.bos_token_id, CONTEXT, 1)
        expected = sum(sum(reference.score(*pair)[0]) for pair in map(make_disjoint_window, windows))
        assert found.token_count == len(tokens)
        assert found.logprob == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_rolling_over_ids_scores_exactly_those(export: tuple[str, str | None], session: Session) -> None:
    ids = list(range(10, 40))
    (found,) = session.loglikelihood_rolling([RollingRequest(ids)])
    expected, _ = _reference(export[0]).score([session.tokenizer.prefix_token_id], ids)
    assert found.logprob == pytest.approx(sum(expected), rel=1e-4)


def _prompts() -> list[list[int]]:
    rng = random.Random(3)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    return [
        stem[: rng.randint(1, 40)] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(0, 60))] for _ in range(12)
    ]


@cache
def _generations(family: str) -> list[list[int]]:
    return [_reference(family).generate(prompt, 64) for prompt in _prompts()]


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_greedy_generations_of_64_tokens_are_equal(export: tuple[str, str | None], num_slots: int) -> None:
    requests = [GenerationRequest(prompt, max_new_tokens=64) for prompt in _prompts()]
    with _open(export, num_slots=num_slots, chunk_size=32) as session:
        found = session.generate(requests)
        if num_slots > 1:
            assert session.counters.steps < 12 * 64
    assert [list(output.tokens) for output in found] == _generations(export[0])


def test_chat_template_gives_the_same_prompt_and_answer(export: tuple[str, str | None], session: Session) -> None:
    messages = [{"role": "user", "content": "Ann sees the blue stone"}]
    hf = session.tokenizer.hf
    prompt = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    (found,) = session.generate([GenerationRequest(messages, max_new_tokens=20)])
    assert list(found.tokens) == _reference(export[0]).generate(prompt, 20)


def test_answers_whose_caches_move_together_are_those_of_transformers(export: tuple[str, str | None]) -> None:
    """Ten prompts and answers of many lengths: what ends early leaves no idle row, and no other answer changes."""
    rng = random.Random(9)
    lengths = [rng.randint(2, 24) for _ in range(10)]
    prompts = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 20))] for _ in lengths]
    with _open(export) as session:
        asked = zip(prompts, lengths, strict=True)
        found = session.generate([GenerationRequest(prompt, max_new_tokens=most) for prompt, most in asked])
        counters = session.describe_execution()["counters"]
    expected = [_reference(export[0]).generate(*pair) for pair in zip(prompts, lengths, strict=True)]
    assert [list(output.tokens)[: len(tokens)] for output, tokens in zip(found, expected, strict=True)] == expected
    assert counters["idle_rows"] == 0 < counters["copies"]
