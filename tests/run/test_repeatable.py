"""Two evaluations of one model give the same bytes."""

from __future__ import annotations

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
