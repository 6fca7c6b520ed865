"""One open model, used from several threads, with the real engine under it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from olive_ext.errors import SessionError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringOutput, ScoringRequest
from tests.device.open import open_on
from tests.exports import VOCAB, genai_export
from tests.refusals import refused

pytestmark = pytest.mark.slow


@pytest.fixture
def session() -> Iterator[Session]:
    with open_on("cpu", genai_export("llama")) as session:
        yield session


def _requests(seed: int) -> list[ScoringRequest]:
    rng = random.Random(seed)
    draw = lambda length: [rng.randrange(4, VOCAB) for _ in range(length)]  # noqa: E731
    stem = draw(30)
    return [ScoringRequest(stem[: rng.randint(1, 30)] + draw(5), draw(4)) for _ in range(6)]


def _logprobs(outputs: list[ScoringOutput]) -> list[float]:
    return [logprob for output in outputs for logprob in output.token_logprobs]


def test_threads_that_score_and_generate_get_each_their_own_answers(session: Session) -> None:
    prompts = [[seed + 10] * 20 for seed in range(4)]
    expected = [_logprobs(session.loglikelihood(_requests(seed))) for seed in range(4)]
    answers = [session.generate([GenerationRequest(prompt, max_new_tokens=12)])[0].tokens for prompt in prompts]
    found: dict[tuple[str, int], object] = {}

    def score(seed: int) -> None:
        for _ in range(3):
            found["score", seed] = _logprobs(session.loglikelihood(_requests(seed)))

    def generate(number: int) -> None:
        for _ in range(3):
            requests = [GenerationRequest(prompts[number], max_new_tokens=12)]
            found["generate", number] = session.generate(requests)[0].tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4) for work in (score, generate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i in range(4):
        assert found["score", i] == pytest.approx(expected[i], abs=1e-5)
        assert found["generate", i] == answers[i]


def test_scoring_inside_generate_continuous_is_refused_in_its_thread_and_waits_in_another(session: Session) -> None:
    requests = [GenerationRequest([20 + i] * (5 + i), max_new_tokens=3 + 4 * i) for i in range(6)]
    expected = [output.tokens for output in session.generate(requests)]
    scores = _logprobs(session.loglikelihood(_requests(9)))
    session.gc()
    results = session.generate_continuous(enumerate(requests))
    found = dict([next(results)])
    with refused(SessionError, "closed", holds=("loglikelihood", "generate_continuous")):
        session.loglikelihood(_requests(9))
    waited: list[float] = []
    other = threading.Thread(target=lambda: waited.extend(_logprobs(session.loglikelihood(_requests(9)))))
    other.start()
    other.join(0.2)
    assert waited == []
    found.update(results)
    other.join(60)
    assert waited == pytest.approx(scores, abs=1e-5)
    assert [found[i].tokens for i in range(6)] == expected


def test_an_iterator_given_up_halfway_leaves_right_numbers_behind(session: Session) -> None:
    requests = [GenerationRequest([20 + i] * (5 + i), max_new_tokens=3 + 4 * i) for i in range(6)]
    scores = _logprobs(session.loglikelihood(_requests(9)))
    results = session.generate_continuous(enumerate(requests))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert _logprobs(session.loglikelihood(_requests(9))) == pytest.approx(scores, abs=1e-5)
