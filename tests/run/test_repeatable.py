"""Two evaluations of one model give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import olive_ext
from tests.exports import genai_export


def _requests(num_documents: int = 60) -> list[tuple[list[int], list[int]]]:
    """Documents behind one stem, three answers each."""
    rng = np.random.default_rng(0)
    stem = rng.integers(5, 300, 40).tolist()
    documents = [stem + rng.integers(5, 300, 40).tolist() for _ in range(num_documents)]
    return [(document, rng.integers(5, 300, 4).tolist()) for document in documents for _ in range(3)]


def test_every_call_of_a_deterministic_session_gives_the_same_bytes() -> None:
    requests = _requests()
    with olive_ext.open(genai_export("llama"), deterministic=True) as session:
        first, again = (session.loglikelihood(requests) for _ in range(2))
        facts = session.describe_execution()
        session.loglikelihood(requests[5:90])
        third = session.loglikelihood(requests)
    assert [output.token_logprobs for output in first] == [output.token_logprobs for output in again]
    assert [output.token_logprobs for output in first] == [output.token_logprobs for output in third]
    assert (facts["deterministic"], facts["scoring"]) == (True, "tree")
    assert facts["scoring_reason"].startswith("by rule: ")


def test_where_a_deterministic_session_keeps_its_answers_decides_no_bit(tmp_path: Path) -> None:
    """An evaluation without `output_dir` had another mean KL than with it, and a bound at the one was broken by the
    other: 200 documents are two chunks."""
    scores = []
    for number in range(3):
        more: dict[str, Any] = {"record_to": tmp_path / "records"} if number == 2 else {}
        with olive_ext.open(genai_export("llama"), deterministic=True, **more) as session:
            session.keep_answers(tmp_path / "answers" if number == 1 else None)
            scores.append([output.token_logprobs for output in session.loglikelihood(_requests(200))])
    assert scores[0] == scores[1] == scores[2]


def test_first_call_of_another_session_differs_because_the_stem_is_not_resident_yet() -> None:
    with olive_ext.open(genai_export("llama"), engine={"scoring": "rows"}) as session:
        scores = [[out.token_logprobs for out in session.loglikelihood(_requests()[:6])] for _ in range(3)]
        session.gc()
        forgotten = [out.token_logprobs for out in session.loglikelihood(_requests()[:6])]
    assert scores[1] == scores[2]
    assert forgotten == scores[0]
